"""A defense is a set of optional hooks into training; every hook does nothing unless a defense overrides it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.assets import Asset, Assets
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Shape, Target
from frostglass.store.files import Work

defenses = Registry("defense", "frostglass.defenses.training", "frostglass.defenses.release")

Part = Literal[
    "head", "classification loss", "batches", "starting weights", "training of the encoder"
]


@dataclass(frozen=True)
class TrainingProgress:
    """Where training stands: epoch 0 is the first of `epochs`."""

    epoch: int
    epochs: int

    @property
    def fraction(self) -> float:
        """Share of the epochs already finished, in [0, 1)."""
        return self.epoch / self.epochs


@dataclass(frozen=True)
class Batch:
    """What a loss may look at: images in [0, 1], labels, logits, the outputs of tapped layers by name, the progress.

    `inputs` are the images as the network sees them, where it normalises them first.
    """

    images: Tensor
    labels: Tensor
    logits: Tensor
    tapped: Mapping[str, Tensor]
    progress: TrainingProgress
    inputs: Tensor | None = None


@dataclass(frozen=True)
class Term:
    """One named part of the objective; the loss is the sum of weight × value over all of them."""

    weight: float
    value: Tensor


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy: of the class (N,) of each picture, or the mean over attributes (N, K), each of which it has or not."""
    return (
        F.cross_entropy(logits, labels)
        if labels.ndim == 1
        else F.binary_cross_entropy_with_logits(logits, labels)
    )


@dataclass(frozen=True)
class Stage:
    """A plain training that comes first; the defended one begins from its network, all but the head.

    `data` says whose pictures: public people, as classes of their own, or the private ones. `settings` are laid over the target's own.
    """

    data: Literal["public", "private"]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """How much training there is: pictures, pictures in a batch, epochs."""

    records: int
    batch: int
    epochs: int


class Opponent(Protocol):
    """A network of the attacker's, simulated while a target is trained: each learns while the other stands still.

    Its draws come from seeds of its own, so that a training that was killed goes on with the same result from `tensors`.
    """

    def turn(self, progress: TrainingProgress, number: int) -> None:
        """Learn against the network as it is, before the step of batch `number`; the network's weights, statistics and modes stay as they are."""

    def losses(self, batch: Batch) -> dict[str, Term]:
        """What the network gets to feel of the opponent, which stands still."""

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimisers, for a checkpoint."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""


@dataclass(frozen=True)
class Release:
    """What leaves the device instead of plain features: `features` (N, ...), and what the protection measured on the way, one row of plain values a batch."""

    features: Tensor
    facts: tuple[Mapping[str, Any], ...] = ()


class Defense:
    """Base of all defenses: parameters are fields, hooks are methods, and `off` holds the parameters at which it does nothing at all.

    Hooks run in this order: `stage`, `prepare`, `problems`, `begin`, `optimizer`, `opponent`; in each epoch `modes` and `batches`, in each step
    `losses`; at the end `facts`. One that `releases` acts when a trained network is used, on the features that leave the device.
    """

    name: ClassVar[str]
    off: ClassVar[Mapping[str, Any]]
    takes_attributes: ClassVar[bool] = (
        False  # whether it also serves where a picture has attributes instead of one class
    )
    releases: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Asset]:
        """What it must know of the world, besides the private pictures and the public ones."""
        return frozenset()

    def replaces(self) -> frozenset[Part]:
        """What this defense takes over from plain training; two defenses must not replace the same part."""
        return frozenset()

    def couples_samples(self) -> bool:
        """Whether its loss looks at several samples of a batch together."""
        return False

    def separates_samples(self) -> bool:
        """Whether it needs the gradient of each sample on its own."""
        return False

    def non_gradient_leakage(self) -> str | None:
        """How private pictures shape the network other than through the gradients of the training itself, if they do."""
        return None

    def stage(self) -> Stage | None:
        """A training to begin from; needs "starting weights" in `replaces`."""
        return None

    def during_stage(self) -> "Defense | None":
        """What of this defense already acts in the first stage, because its change of layers would ruin trained weights."""
        return None

    def prepare(self, target: Target, *, seed: int) -> Target:
        """Change the freshly built network before training (and again, the same way, before loading its weights)."""
        return target

    def problems(self, target: Target, size: Size) -> list[str]:
        """Everything that keeps this defense from working on the prepared network in a training of this size; nothing is computed."""
        return []

    def begin(self, target: Target, images: Images, *, seed: int) -> None:
        """Look at the private training pictures once, before the first epoch; may set which weights learn."""

    def optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, size: Size
    ) -> torch.optim.Optimizer:
        """Come between the gradients and the weights."""
        return optimizer

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        """A simulated attacker to train against, who owns the public pictures."""
        return None

    def release(
        self, encoder: nn.Module, images: Tensor, assets: Assets, *, seed: int, work: Work
    ) -> Release:
        """The features to let out for pictures; needs `releases`. What is finished is kept in `work`, so that a release that was stopped goes on."""
        raise TypeError(f"{type(self).__name__} must define release()")

    def misfits(self, image_shape: Shape, pictures: int, prior: Prior | None) -> list[str]:
        """Everything that keeps `release` from protecting so many pictures of this shape with this prior; nothing is computed."""
        return []

    def efforts(
        self, encoder: nn.Module, images: Tensor, assets: Assets, pictures: int
    ) -> Iterator[tuple[Callable[[], Any], float]]:
        """Pieces of the work of `release`, to be timed on a few images, and how often each is done for so many pictures."""
        yield from ()

    def modes(self, target: Target) -> None:
        """Put layers out of training mode again, at the start of each epoch."""

    def batches(self, labels: Tensor, size: int, rng: torch.Generator) -> list[Tensor]:
        """Which pictures form the batches of an epoch; needs "batches" in `replaces`. An empty batch is a step without pictures."""
        raise TypeError(f"{type(self).__name__} must define batches()")

    def taps(self, target: Target) -> tuple[str, ...]:
        """Names of the layers whose outputs `losses` wants to see."""
        return ()

    def losses(self, batch: Batch) -> dict[str, Term]:
        """Named terms to add to the objective."""
        return {}

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        """Whether the defense is at full strength; only epochs at which all are at_full_strength may be selected as the result."""
        return True

    def facts(self, target: Target, size: Size) -> dict[str, Any]:
        """What a reader of the finished target should know besides the parameters, as plain values."""
        return {}
