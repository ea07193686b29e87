"""How a classifier is trained, on which images, and with which labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.method import Budget
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Split, Target
from frostglass.data._impostors import other_people
from frostglass.data._splits import public_people
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, Stage, TrainingSize
from frostglass.models.answers import check_source, is_whole, source_files
from frostglass.models.build import source
from frostglass.models.endpoint import EndpointSettings
from frostglass.training.accelerator import Precision

PUBLIC = "public"
STRANGERS, EVALUATORS = "strangers", "evaluators"  # further names of images to train on
Share = Annotated[float, Field(ge=0, le=1)]


@parameters
class Training:
    """How a classifier is built and trained.

    Args:
        model: a built-in name, `timm:NAME`, `torchvision:NAME` or `package.module:function`.
        options: keyword arguments of the model's builder.
        mean, std: normalisation inside the model, one number per channel; none by default (images
            stay in [0, 1]).
        weights: what to load instead of training: a checkpoint of `model`, or a whole network.
            That is "onnx:FILE" or "torchscript:FILE", or the address of an endpoint,
            "https://host/path" (all three are only asked, for scores or labels), or
            "package.module:function", which is called without arguments and returns a trained
            network, or "hf:FOLDER" with config.json and model.safetensors. `model` is then what
            the positive control trains.
        trust: read a TorchScript file, which is a program and can write files when it is read.
        endpoint: how an endpoint is asked: `batch`, `timeout`, `retries` and `token`.
        classes: the people's names in the order of the outputs of `weights`, if that is not the
            sorted one. An order that is given is believed, also where another one fits the images
            better; a warning then names that one.
        start: where training begins: "public" for a training on the public people first, or a
            checkpoint; all but the head is taken.
        start_parts: the parts of the network to fill from that checkpoint, such as ["features"];
            everything but the head by default.
        epochs: how often each training image is shown.
        batch: images of a step.
        optimizer: "adam", "adamw" or "sgd".
        lr: its step size at the start.
        momentum: of SGD.
        nesterov: use Nesterov's form of it.
        weight_decay: how strongly weights are drawn to zero.
        schedule: of the step size: "constant", "cosine" to zero, or "milestones".
        milestones: shares of the epochs after which the schedule of that name multiplies by
            `decay`.
        decay: by how much.
        flip: mirror half of the training images.
        shift: move them by up to this many pixels.
        crop: cut out a square of at least this share of the area.
        jitter: strengths of random brightness, contrast, saturation and hue.
        cutout: blank a square of this share of the side.
        precision: "32", or "bf16" or "16" for mixed precision: weights stay in 32 bits, and the
            layers that gain from it compute in 16. A machine without it trains in 32 bits, with a
            warning.
        compile: compile the network by `torch.compile`. A machine that cannot, or a defense that
            reads layers, trains as it is, with a warning.
        keep: "best" keeps the epoch with the best validation accuracy (the later of equals),
            "last" the last.
        attributes: learn these attributes of the images, ["all"] for every one the data has,
            instead of identities; an image may have any number of them, and accuracy is then the
            mean over attributes.
        cut: the layer after which features leave the device, if the network is split between a
            device and a server; "head" is the last one of every network.
    """

    model: str = "cnn"
    options: dict[str, Any] = Field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    weights: str | None = None
    trust: bool = False
    endpoint: EndpointSettings = Field(default_factory=EndpointSettings)
    classes: tuple[str, ...] = ()
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
    precision: Precision = "32"
    compile: bool = False
    keep: Literal["best", "last"] = "best"
    attributes: tuple[str, ...] = ()
    cut: str | None = None

    def __post_init__(self) -> None:
        if self.start_parts and self.start in (None, PUBLIC):
            raise ValueError("start_parts names parts of a checkpoint: give its path as start")
        if self.weights and self.start:
            raise ValueError(
                "weights are loaded instead of training, so there is nothing to start: "
                "leave weights or start out"
            )
        if self.weights and is_whole(self.weights):
            check_source(self.weights, trust=self.trust)
        if self.classes and not self.weights:
            raise ValueError(
                "classes: states the order of the outputs of weights that are loaded: set weights, "
                "or leave it out"
            )
        if self.classes and self.attributes:
            raise ValueError(
                "classes: names people, and this model predicts attributes: leave it out, and name "
                "attributes in the order of the outputs"
            )
        for setting, names in (("attributes", self.attributes), ("classes", self.classes)):
            if twice := [name for name, times in Counter(names).items() if times > 1]:
                raise ValueError(f"{setting}: {twice[0]!r} is given twice: name each once")

    def files(self) -> list[Path]:
        """List the files this configuration reads."""
        paths = [self.starting_file, source(self.model)]
        whole = source_files(self.weights) if self.weights and self.whole else []
        if not self.whole:
            paths.append(self.weights)
        return [*whole, *(Path(path) for path in paths if path)]

    @property
    def whole(self) -> bool:
        """Whether `weights` name a whole network."""
        return is_whole(self.weights)

    @property
    def starting_file(self) -> str | None:
        return None if self.start == PUBLIC else self.start

    def retrained(self) -> "Training":
        """Return a copy that is trained here: without what was given."""
        plain = EndpointSettings()
        return replace(self, weights=None, classes=(), trust=False, endpoint=plain)

    def brief(self) -> "Training":
        """Return a copy with one epoch, for dry runs."""
        return replace(self, epochs=1)

    def budget(self, images: int) -> Budget:
        """Return the amount of work for a training set of this many images."""
        if self.weights:
            return Budget("loads weights")
        return Budget(f"{self.epochs} epochs × {images:,} images", trained=self.epochs * images)


@dataclass(frozen=True)
class FirstStage:
    """A training to start from: its images, its settings, and the defenses active in it."""

    data: Literal["public", "private"]
    config: Training
    defenses: tuple[Defense, ...]


def stage_split(split: Split, data: str, *, seed: int) -> Split:
    """Return the images of a stage: the private ones, those of evaluators, or public people.

    Public people are classes of their own; "strangers" are those without the held-out ones.
    """
    if data == EVALUATORS:
        return replace(split, train=split.known_to_evaluators)
    if data in (PUBLIC, STRANGERS):
        images = split.public if data == PUBLIC else other_people(split.public)
        return public_people(images, seed=seed)
    return split


def first_stage(config: Training, defenses: Sequence[Defense]) -> FirstStage | None:
    """Return the training before this one, if a defense or `config.start` asks for it.

    It may have a first stage of its own.
    """
    stages = [stage for defense in defenses if (stage := defense.stage())]
    if config.start == PUBLIC:
        stages.append(Stage("public", {}))
    if not stages or config.weights:
        return None
    stage = stages[0]
    start = config.starting_file if stage.data == "public" else config.start
    return FirstStage(
        stage.data, replace(config, start=start, **stage.settings), compose.during_stage(defenses)
    )


def starts_public(config: Training, defenses: Sequence[Defense]) -> bool:
    """Return whether a stage before a training is on public people."""
    stage = first_stage(config, defenses)
    if stage is None:
        return False
    return stage.data == PUBLIC or starts_public(stage.config, stage.defenses)


def size_of(config: Training, split: Split) -> TrainingSize:
    """Return how much training there is on this split."""
    secret = 0 if split.secret is None else len(split.secret.names)
    return TrainingSize(len(split.train), config.batch, config.epochs, secret)


def classes_of(config: Training, split: Split) -> tuple[str, ...]:
    """Return the classes that a training on this split learns: people, or attributes."""
    known = split.train.attribute_names
    return attributes_of(config, known) if config.attributes else split.classes


def attributes_of(config: Training, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the attributes that a training learns, out of those the data has."""
    if config.attributes == ("all",) and known:
        return known
    if unknown := [name for name in config.attributes if name not in known]:
        available = ", ".join(known) or "none: use faces, or a folder with a table of attributes"
        raise ConfigError(
            f"attributes: the data has no attribute {unknown[0]!r}; it has {available}"
        )
    return config.attributes


def targets_for(target: Target, images: Images) -> Tensor:
    """Return the labels a target should predict: classes (N,), or attributes (N, K) of 0 and 1."""
    return attributes_in(images, target.classes) if target.attributes else images.labels


def attributes_in(images: Images, names: tuple[str, ...]) -> Tensor:
    """Return which of the named attributes images have, (N, K) of 0.0 and 1.0."""
    if images.attributes is None:
        raise ConfigError(
            "the target predicts attributes, and these images have none: "
            "use data with attributes, such as faces"
        )
    return images.attributes[:, [images.attribute_names.index(name) for name in names]].float()
