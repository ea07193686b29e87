"""The only classifier loop: it trains targets and evaluators, undefended or with any defenses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Split, Target
from frostglass.data._splits import public_people
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, Stage
from frostglass.models.build import source

PUBLIC = "public"
Share = Annotated[float, Field(ge=0, le=1)]


@parameters
class Training:
    """How a classifier is built and trained.

    Args:
        model: a built-in name, `timm:NAME`, `torchvision:NAME` or `package.module:function`.
        options: keyword arguments of the model's builder.
        mean, std: normalisation inside the model, one number per channel; none by default (images stay in [0, 1]).
        weights: a checkpoint to load instead of training.
        start: where training begins: "public" for a training on the public people first, or a checkpoint; all but the head is taken.
        start_parts: the parts of the network to fill from that checkpoint, such as ["features"]; everything but the head by default.
        epochs, batch, optimizer, lr, momentum, nesterov, weight_decay: the usual; momentum is SGD's.
        schedule: "constant", "cosine" to zero, or "milestones": × `decay` after each share of the epochs in `milestones`.
        flip: mirror half of the training images. shift: move them by up to this many pixels. crop: cut out a square of at least this
            share of the area. jitter: strengths of random brightness, contrast, saturation and hue. cutout: blank a square of this share
            of the side.
        keep: "best" keeps the epoch with the best validation accuracy (the later of equals), "last" the last.
        attributes: learn these attributes of the pictures, ["all"] for every one the data has, instead of who is on them; a picture may
            have any number of them, and accuracy is then the mean over attributes.
        cut: the layer behind which the network's features leave the device, where it is split between one and a server.
    """

    model: str = "cnn"
    options: dict[str, Any] = Field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    weights: str | None = None
    start: str | None = None
    start_parts: tuple[str, ...] = ()
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 64
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    schedule: Literal["constant", "cosine", "milestones"] = "cosine"
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.75, 0.9)
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.1
    flip: bool = True
    shift: Annotated[int, Field(ge=0)] = 0
    crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    jitter: tuple[Share, Share, Share, Annotated[float, Field(ge=0, le=0.5)]] = (0.0, 0.0, 0.0, 0.0)
    cutout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    keep: Literal["best", "last"] = "best"
    attributes: tuple[str, ...] = ()
    cut: str | None = None

    def __post_init__(self) -> None:
        if self.start_parts and self.start in (None, PUBLIC):
            raise ValueError(
                "start_parts names parts of a checkpoint to begin from: give its path as start"
            )
        if self.weights and self.start:
            raise ValueError(
                "weights are loaded instead of training, so there is nothing to start: leave weights or start out"
            )
        if twice := [
            name for place, name in enumerate(self.attributes) if name in self.attributes[:place]
        ]:
            raise ValueError(f"attributes: {twice[0]!r} is given twice: name each once")

    def files(self) -> list[str]:
        """Files this configuration reads."""
        return [path for path in (self.weights, self.starting_file, source(self.model)) if path]

    @property
    def starting_file(self) -> str | None:
        return None if self.start == PUBLIC else self.start


@dataclass(frozen=True)
class FirstStage:
    """A training to begin from: on whose pictures, how, and which defenses already act in it."""

    data: Literal["public", "private"]
    config: Training
    defenses: tuple[Defense, ...]


def stage_split(split: Split, data: str, *, seed: int) -> Split:
    """Whose pictures a stage trains on: public people as classes of their own, or the private ones."""
    return public_people(split.public, seed=seed) if data == "public" else split


def first_stage(config: Training, defenses: Sequence[Defense]) -> FirstStage | None:
    """The training that comes before this one, if a defense or `config.start` asks for it; it may have one before it in turn."""
    asked = compose.stage(defenses) or (Stage("public", {}) if config.start == PUBLIC else None)
    if asked is None or config.weights:
        return None
    start = config.starting_file if asked.data == "public" else config.start
    return FirstStage(
        asked.data, replace(config, start=start, **asked.settings), compose.during_stage(defenses)
    )


def classes_of(config: Training, split: Split) -> tuple[str, ...]:
    """What a training on these pictures learns to tell: people, or attributes."""
    return (
        attributes_of(config, split.train.attribute_names) if config.attributes else split.classes
    )


def attributes_of(config: Training, known: tuple[str, ...]) -> tuple[str, ...]:
    """The attributes that a training learns, of those that the data has."""
    if config.attributes == ("all",) and known:
        return known
    if strange := [name for name in config.attributes if name not in known]:
        told = (
            f"it has {', '.join(known)}"
            if known
            else "it has none: use faces, or a folder with a table of attributes"
        )
        raise ConfigError(f"attributes: the data has no attribute {strange[0]!r}; {told}")
    return config.attributes


def targets_for(target: Target, images: Images) -> Tensor:
    """What a target should say of pictures: the class of each, (N,), or which attributes it has, (N, K) of 0.0 and 1.0."""
    return attributes_in(images, target.classes) if target.attributes else images.labels


def attributes_in(images: Images, names: tuple[str, ...]) -> Tensor:
    """Which of the named attributes pictures have, (N, K) of 0.0 and 1.0."""
    if images.attributes is None:
        raise ConfigError(
            "the target tells attributes, and these pictures come without any: use data with attributes, such as faces"
        )
    return images.attributes[:, [images.attribute_names.index(name) for name in names]].float()
