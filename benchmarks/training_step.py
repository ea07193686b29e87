"""A training epoch: undefended over a bare loop of the same network, defended over undefended."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.measured import Measured
from benchmarks.timing import ratio
from frostglass.core.types import Images, Split
from frostglass.data.faces import Faces
from frostglass.defenses.base import Defense, TrainingProgress
from frostglass.defenses.training.bido import Bido
from frostglass.defenses.training.calor import Calor
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.defenses.training.label_smoothing import LabelSmoothing
from frostglass.defenses.training.mid import Mid
from frostglass.defenses.training.transfer import Transfer
from frostglass.runtime.memory import keep_freed_memory
from frostglass.training.build import untrained
from frostglass.training.settings import Training
from frostglass.training.trainer import Trainer, changes_of, optimizer_of

# Both sides spend 98 % of an epoch in the same kernels, so that the ratio is near 1, and 31 rounds
# give it to 2 % only (the spread of resampled rounds).
LIMIT = 1.0
CONFIG = Training(model="cnn", options={"width": 32}, batch=64, epochs=1)
LARGE = Training(
    model="torchvision:resnet18", batch=16, epochs=1, crop=0.85, jitter=(0.1, 0.1, 0.1, 0.1)
)
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


def measure() -> Iterator[Measured]:
    keep_freed_memory()  # as the command line does
    images, public = Faces(identities=20, images=32, public_identities=2, public_images=1).tables()
    yield bare_ratio("undefended training epoch, over a bare loop", CONFIG, images, public, 81)
    large = noise(64, 224)
    yield bare_ratio("ResNet-18 epoch at 224 pixels, over a bare loop", LARGE, large, public, 9)
    undefended = epoch(CONFIG, images, public, ())
    for name, defenses in DEFENSES.items():
        times, mine, theirs = ratio(epoch(CONFIG, images, public, defenses), undefended, rounds=5)
        yield Measured(
            f"{name} training epoch, over undefended",
            times,
            f"{mine:.2f} s against {theirs:.2f} s",
        )


def bare_ratio(
    name: str, config: Training, images: Images, public: Images, rounds: int
) -> Measured:
    ours, bare = epoch(config, images, public, ()), bare_epoch(config, images)
    times, mine, theirs = ratio(ours, bare, rounds)
    return Measured(name, times, f"{mine:.2f} s against {theirs:.2f} s", most=LIMIT)


def noise(count: int, size: int) -> Images:
    """Return images without content, of two people."""
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 2, ("a", "b"), ("",) * count)


def epoch(
    config: Training, images: Images, public: Images, defenses: tuple[Defense, ...]
) -> Callable[[], None]:
    """Return one epoch of our loop, without a first stage."""
    target = untrained(config, images.names, images.shape, defenses, seed=0)
    split = Split(images, images, images, public)  # only its training images are used
    trainer = Trainer(config, target, split, defenses, seed=0, device=torch.device("cpu"))

    def run() -> None:
        trainer.epoch(TrainingProgress(0, 1))

    return run


def bare_epoch(config: Training, images: Images) -> Callable[[], None]:
    """Return one epoch of a minimal training loop, channels last, with the same augmentation."""
    last = torch.channels_last
    module = untrained(config, images.names, images.shape, (), seed=0).module.train()
    module.to(memory_format=last)
    optimizer = optimizer_of(config, list(module.parameters()))
    batches = math.ceil(len(images) / config.batch)

    def run() -> None:
        rng = torch.Generator().manual_seed(0)
        for index in torch.randperm(len(images), generator=rng).tensor_split(batches):
            changes = changes_of(config, len(index), images.shape, rng)
            augmented = changes.apply(images.floats(index)).contiguous(memory_format=last)
            loss = F.cross_entropy(module(augmented), images.labels[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return run
