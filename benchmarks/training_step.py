"""An epoch of the training loop: undefended over a bare loop with the same network, batches and optimiser, and defended over undefended."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric

from benchmarks.timing import ratio
from frostglass.core.types import Images
from frostglass.data._augment import augment
from frostglass.data.faces import Faces
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, Size, TrainingProgress
from frostglass.defenses.training.bido import Bido
from frostglass.defenses.training.calor import Calor
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.defenses.training.label_smoothing import LabelSmoothing
from frostglass.defenses.training.mid import Mid
from frostglass.defenses.training.transfer import Transfer
from frostglass.training.build import untrained
from frostglass.training.loop import optimizer_of, train_epoch
from frostglass.training.settings import Training

LIMIT = 1.10
CONFIG = Training(model="cnn", options={"width": 32}, batch=64)
DEFENSES: dict[str, tuple[Defense, ...]] = {
    "MID": (Mid(),),
    "BiDO-HSIC": (Bido(),),
    "BiDO-COCO": (Bido(measure="coco_frobenius", lambda_x=5.0, lambda_y=50.0),),
    "LS": (LabelSmoothing(ramp=False),),
    "TL, half frozen": (Transfer(),),
    "TL + BiDO-HSIC": (Transfer(), Bido()),
    "CALoR": (Calor(rank=5),),
    "DP-SGD": (Dpsgd(),),
}


def epoch(images: Images, defenses: tuple[Defense, ...]) -> Callable[[], None]:
    """One epoch of our loop, without the stage that may come before it."""
    target = untrained(CONFIG, images.names, images.shape, defenses, seed=0)
    compose.begin(defenses, target, images, seed=0)
    rule = optimizer_of(CONFIG, [p for p in target.module.parameters() if p.requires_grad])
    rule = compose.optimizer(defenses, target.module, rule, Size(len(images), CONFIG.batch, 1))
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(target.module, rule)
    taps = compose.taps(defenses, target)

    def run() -> None:
        train_epoch(
            CONFIG,
            fabric,
            module,
            optimizer,
            target,
            images,
            defenses,
            taps,
            TrainingProgress(0, 1),
            seed=0,
        )

    return run


def bare_epoch(images: Images) -> Callable[[], None]:
    module = untrained(CONFIG, images.names, images.shape, (), seed=0).module.train()
    rule = optimizer_of(CONFIG, list(module.parameters()))

    def run() -> None:
        rng = torch.Generator().manual_seed(0)
        for index in torch.randperm(len(images), generator=rng).tensor_split(
            math.ceil(len(images) / CONFIG.batch)
        ):
            pictures = augment(images.floats(index), rng, flip=CONFIG.flip, shift=CONFIG.shift)
            loss = F.cross_entropy(module(pictures), images.labels[index])
            rule.zero_grad(set_to_none=True)
            loss.backward()
            rule.step()

    return run


def measure() -> Iterator[str]:
    images, _ = Faces(identities=20, images=32, public_identities=2, public_images=1).tables()
    plain = epoch(images, ())
    times, mine, theirs = ratio(plain, bare_epoch(images), rounds=7)
    yield f"undefended training epoch: {times:.3f} × bare loop (limit {LIMIT}); {mine:.2f} s against {theirs:.2f} s"
    for name, defenses in DEFENSES.items():
        times, mine, theirs = ratio(epoch(images, defenses), plain, rounds=5)
        yield f"{name} training epoch: {times:.2f} × undefended; {mine:.2f} s against {theirs:.2f} s"
