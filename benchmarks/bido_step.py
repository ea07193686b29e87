"""The cost of BiDO's kernel terms: a training step over an undefended step of the same network."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.measured import Measured
from benchmarks.timing import ratio
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, TrainingProgress
from frostglass.defenses.training.bido import Bido
from frostglass.runtime.hooks import capture
from frostglass.training.build import untrained
from frostglass.training.settings import Training
from frostglass.training.trainer import optimizer_of

CLASSES, SHAPE, BATCH, LIMIT = 1000, (3, 64, 64), 64, 1.05
DEFENSES = {
    "BiDO-HSIC": Bido(measure="hsic_nocco", lambda_x=0.05, lambda_y=0.5),
    "BiDO-COCO": Bido(measure="coco_frobenius", lambda_x=5.0, lambda_y=50.0),
}


def measure() -> Iterator[Measured]:
    config = Training(model="vgg16", batch=BATCH, optimizer="adam")
    images = torch.rand(BATCH, *SHAPE, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(BATCH) // 4
    undefended = step(config, (), images, labels)
    for name, defense in DEFENSES.items():
        defended = step(config, (defense,), images, labels)
        times, mine, theirs = ratio(defended, undefended, rounds=9)
        yield Measured(
            f"{name} training step, vgg16, over undefended",
            times,
            f"batch {BATCH}: {mine:.2f} s against {theirs:.2f} s",
            most=LIMIT,
        )


def step(
    config: Training, defenses: tuple[Defense, ...], images: Tensor, labels: Tensor
) -> Callable[[], None]:
    """Return one step of the training loop, on the same batch every time."""
    target = untrained(config, tuple(map(str, range(CLASSES))), SHAPE, defenses, seed=0)
    module = target.module.train()
    optimizer = optimizer_of(config, list(module.parameters()))
    taps = [defense.taps(target) for defense in defenses]

    def run() -> None:
        with capture(module, tuple(name for names in taps for name in names)) as tapped:
            logits = module(images)
        batch = Batch(images, labels, logits, tapped, TrainingProgress(0, 1))
        terms = compose.losses(defenses, batch, taps)
        loss = sum((term.weight * term.value for term in terms.values()), start=torch.zeros(()))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return run
