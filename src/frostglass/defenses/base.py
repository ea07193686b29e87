"""The contract of a defense: optional hooks into training, or into the release of features."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.assets import Asset, Assets
from frostglass.core.method import Method
from frostglass.core.pixels import Pixels
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Shape, Split, Target
from frostglass.data._augment import Changes
from frostglass.defenses.strengths import Range
from frostglass.store.files import Work

Part = Literal[
    "head",
    "classification loss",
    "batches",
    "starting weights",
    "training of the encoder",
    "answers",
    "cut",
]


@dataclass(frozen=True)
class TrainingProgress:
    """The current epoch, counted from 0, out of `epochs`."""

    epoch: int
    epochs: int

    @property
    def fraction(self) -> float:
        """Share of the epochs already finished, in [0, 1)."""
        return self.epoch / self.epochs


@dataclass(frozen=True)
class TrainingSize:
    """How much training there is: private images, batch size, epochs, and secret people."""

    records: int
    batch: int
    epochs: int
    secret_people: int = 0


@dataclass(frozen=True)
class Batch:
    """What a loss may read: images in [0, 1], labels, logits and outputs of the tapped layers.

    `inputs` are the images as the network sees them, if it normalises them first. `added` marks
    the images that a defense added to the private ones, and `people` numbers whom each image shows,
    as the defense does; None if none adds images. `companions` are the logits of further images
    that an opponent showed together with these.
    """

    images: Tensor
    labels: Tensor
    logits: Tensor
    tapped: Mapping[str, Tensor]
    progress: TrainingProgress
    inputs: Tensor | None = None
    added: Tensor | None = None
    people: Tensor | None = None
    companions: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AddedImages:
    """Images of further people to train on: the class each is trained as, and whom it shows.

    `pixels` uint8 (N, C, H, W); `labels` (N,) classes; `people` (N,) and `private` (classes,) are
    numbers of the people in these images and of the private ones: together 0, 1, 2 and so on. An
    epoch shows `per_epoch` images of every person, private ones too.
    """

    pixels: Pixels
    labels: Tensor
    people: Tensor
    private: Tensor
    per_epoch: int


@dataclass(frozen=True)
class Term:
    """One named part of the objective; the loss is the sum of weight × value over all terms."""

    weight: float
    value: Tensor


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of classes (N,), or the mean binary one of attributes (N, K)."""
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels)


@dataclass(frozen=True)
class Stage:
    """A first training without the defense; the defended one starts from it, except for the head.

    `data` says which images: those of public people, as classes of their own, or the private ones.
    `settings` override the target's training settings.
    """

    data: Literal["public", "private"]
    settings: Mapping[str, Any]


class Opponent:
    """What is trained beside the network, such as a simulated attacker: each while the other waits.

    Its random draws have their own seeds, and `tensors` holds its full state, so that an
    interrupted training resumes with the same result.
    """

    def turn(self, progress: TrainingProgress, number: int) -> None:
        """Train before the step of batch `number`; leave the target's network as it is."""

    def companions(
        self, images: Tensor, progress: TrainingProgress, number: int
    ) -> dict[str, Tensor]:
        """Return further images, as many as these of batch `number`, to show together with them.

        `losses` gets their logits by the same names.
        """
        return {}

    def losses(self, batch: Batch) -> dict[str, Term]:
        """Return the terms that the fixed opponent adds to the network's objective."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimiser states for a checkpoint."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned."""

    def facts(self) -> dict[str, Any]:
        """Return plain values about itself and the trained network; joins the defense's facts."""
        return {}


@dataclass(frozen=True)
class Release:
    """Features (N, ...) that leave the device, and measurements of the protection per batch.

    `ceiling` (N, ...) are those it started from, if what it can release has a limit of its own:
    their utility is the most that the protection could leave.
    """

    features: Tensor
    facts: tuple[Mapping[str, Any], ...] = ()
    ceiling: Tensor | None = None


class Defense(Method):
    """Base of all defenses: parameters are fields, hooks are methods that do nothing by default.

    `disabled` holds the parameters at which the defense does nothing. `adaptive` names what
    knows the defense: variants of attacks, parameters of attacks on features, or attacks.
    Hooks run in this order: `stage`, `prepare`, `problems`, `added_images`, `begin`, `optimizer`,
    `opponent`; in each epoch `modes` and `batches`; in each step `changes` and `losses`; at the
    end `complete`, `facts` and `measurements`. A defense with `releases` acts on the features of a
    trained network when they leave the device, and must define `release`. One that `moves_cut` acts
    on neither: it decides by `cut` where they leave.
    """

    disabled: ClassVar[Mapping[str, Any]] = {}
    adaptive: ClassVar[tuple[str, ...]] = ()
    takes_attributes: ClassVar[bool] = False  # also defends classifiers of attributes
    needs_cut: ClassVar[bool] = False  # acts on features at a cut, so not on whole models
    releases: ClassVar[bool] = False
    moves_cut: ClassVar[bool] = False  # and acts on nothing else

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.releases and cls.release is Defense.release:
            raise TypeError(f"{cls.__name__} has releases = True and lacks release(): define it")

    @classmethod
    def trains(cls) -> bool:
        """Whether the defense acts on training: not on what leaves, or on where."""
        return not (cls.releases or cls.moves_cut)

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        """Return the parameters to tune with so many classes and secret people; none by default."""
        return {}

    @property
    def needs(self) -> frozenset[Asset]:
        """Assets the defense cannot work without, besides private and public images."""
        return frozenset()

    def replaces(self) -> frozenset[Part]:
        """Parts of plain training that this defense replaces; no two may replace the same part."""
        return frozenset()

    def couples_samples(self) -> bool:
        """Whether the loss of one sample depends on others in its batch."""
        return False

    def separates_samples(self) -> bool:
        """Whether the defense needs the gradient of each sample."""
        return False

    def non_gradient_leakage(self) -> str | None:
        """How private images shape the network other than by training gradients, if they do."""
        return None

    def stage(self) -> Stage | None:
        """A training to start from; needs "starting weights" in `replaces`."""
        return None

    def during_stage(self) -> "Defense | None":
        """The part of this defense that is already active in the first stage, such as layers."""
        return None

    def prepare(self, target: Target, *, seed: int) -> Target:
        """Change the untrained network; also called, with the same seed, before loading weights."""
        return target

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        """List everything that keeps the defense from training the prepared network."""
        return []

    def adds_images(self) -> bool:
        """Whether the network is also trained on images of other people than the private ones."""
        return False

    def added_images(self, split: Split, *, seed: int) -> AddedImages | None:
        """Return further images to train on; the same for the same split and seed."""
        return None

    def begin(self, target: Target, images: Images, *, seed: int) -> None:
        """Read the private training images before the first epoch; may set what is trainable."""

    def optimizer(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, size: TrainingSize
    ) -> torch.optim.Optimizer:
        """Wrap the optimiser."""
        return optimizer

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        """Return a simulated attacker to train against; it may use the public images."""
        return None

    def modes(self, target: Target) -> None:
        """Put layers back into evaluation mode at the start of each epoch."""

    def batches(self, labels: Tensor, size: int, rng: torch.Generator) -> list[Tensor]:
        """Return the image indices of each batch of an epoch; needs "batches" in `replaces`.

        An empty batch is a step without images.
        """
        raise TypeError(f"{type(self).__name__} must define batches()")

    def changes(self, count: int, image_shape: Shape, rng: torch.Generator) -> Changes | None:
        """Draw changes of the images of a batch, which come after those of the recipe."""
        return None

    def taps(self, target: Target) -> tuple[str, ...]:
        """Name the layers whose outputs `losses` reads."""
        return ()

    def losses(self, batch: Batch) -> dict[str, Term]:
        """Return named terms to add to the objective."""
        return {}

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        """Whether this epoch may be selected as the result: all defenses at full strength."""
        return True

    def complete(self, target: Target, split: Split) -> None:
        """Complete the trained network, such as by what its outputs are on average."""

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        """Return plain values about the trained target that a report shows."""
        return {}

    def measurements(self, target: Target, split: Split, *, seed: int) -> dict[str, Any]:
        """Measure the trained target on the images it was trained with; joins `facts`."""
        return {}

    def cut(self, layer: str | None) -> str | None:
        """Return the layer behind which features leave, where a config says `layer`."""
        return layer

    def release(
        self, encoder: nn.Module, images: Tensor, assets: Assets, *, seed: int, work: Work
    ) -> Release:
        """Return protected features of images; finished parts are kept in `work` to resume."""
        raise TypeError(f"{type(self).__name__} must define release()")

    def release_problems(self, image_shape: Shape, images: int, prior: Prior | None) -> list[str]:
        """List everything that keeps `release` from protecting this many images."""
        return []


defenses = Registry(
    "defense", "frostglass.defenses.training", "frostglass.defenses.release", contract=Defense
)
