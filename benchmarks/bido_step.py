"""A training step with BiDO over the undefended step of the same network, batch and optimiser: what the kernel terms cost."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.timing import ratio
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, TrainingProgress
from frostglass.defenses.training.bido import Bido
from frostglass.runtime.hooks import capture
from frostglass.training import _optimizer
from frostglass.training.build import untrained
from frostglass.training.settings import Training

CLASSES, SHAPE, BATCH, LIMIT = 1000, (3, 64, 64), 64, 1.05
DEFENSES = {
    "BiDO-HSIC": Bido(measure="hsic_nocco", lambda_x=0.05, lambda_y=0.5),
    "BiDO-COCO": Bido(measure="coco_frobenius", lambda_x=5.0, lambda_y=50.0),
}


def step(
    config: Training, defenses: tuple[Defense, ...], pictures: torch.Tensor, labels: torch.Tensor
) -> Callable[[], None]:
    """One step of the training loop, on the same batch every time."""
    target = untrained(config, tuple(map(str, range(CLASSES))), SHAPE, defenses, seed=0)
    module, rule = target.module.train(), _optimizer(config, list(target.module.parameters()))
    taps = compose.taps(defenses, target)

    def run() -> None:
        with capture(module, tuple(name for names in taps for name in names)) as tapped:
            logits = module(pictures)
        terms = compose.losses(
            defenses, Batch(pictures, labels, logits, tapped, TrainingProgress(0, 1)), taps
        )
        loss = sum((term.weight * term.value for term in terms.values()), start=torch.zeros(()))
        rule.zero_grad(set_to_none=True)
        loss.backward()
        rule.step()

    return run


def measure() -> Iterator[str]:
    config = Training(model="vgg16", batch=BATCH, optimizer="adam")
    pictures = torch.rand(BATCH, *SHAPE, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(BATCH) // 4
    floor = step(config, (), pictures, labels)
    for name, defense in DEFENSES.items():
        times, mine, theirs = ratio(step(config, (defense,), pictures, labels), floor, rounds=9)
        yield f"{name} training step, vgg16, batch {BATCH}: {times:.3f} × undefended (limit {LIMIT}); {mine:.2f} s against {theirs:.2f} s"
