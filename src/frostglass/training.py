"""The only classifier loop: it trains targets and evaluators, undefended or with any defenses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.checks import parameters
from frostglass.data.augment import augment
from frostglass.data.splits import public_people
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, Moment, Opponent, Size, Stage
from frostglass.errors import ConfigError, ModelError, RunError
from frostglass.files import Work
from frostglass.models.base import as_seen
from frostglass.models.build import build, source
from frostglass.models.checkpoint import body, load_body, load_weights, read_body
from frostglass.models.cut import cut
from frostglass.models.taps import find_head, find_taps
from frostglass.runtime import (
    capture,
    default_device,
    device_of,
    frozen,
    generator_for,
    optimizer_tensors,
    restore_optimizer,
    seed_for,
    seeded,
    under_prefix,
    with_prefix,
)
from frostglass.types import Images, Shape, Split, Target

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
            raise ValueError("start_parts names parts of a checkpoint to begin from: give its path as start")
        if self.weights and self.start:
            raise ValueError("weights are loaded instead of training, so there is nothing to start: leave weights or start out")
        if twice := [name for place, name in enumerate(self.attributes) if name in self.attributes[:place]]:
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
    return FirstStage(asked.data, replace(config, start=start, **asked.settings), compose.during_stage(defenses))


def untrained(
    config: Training,
    classes: tuple[str, ...],
    image_shape: Shape,
    defenses: Sequence[Defense],
    *,
    seed: int,
    start: Target | str | None = None,
) -> Target:
    """The network a training run starts from, with the defenses' changes applied; the same for the same seed.

    `start` fills it, all but the head: with what the first stage trained, or from a checkpoint file.
    """
    module = build(
        config.model, classes=len(classes), image_shape=image_shape, mean=config.mean, std=config.std, seed=seed, **config.options
    )
    # Taps are those of the plain network: what a defense puts in place of its head has none.
    head, taps = find_head(module, image_shape), find_taps(module, image_shape)
    bare = Target(
        module=module, classes=classes, image_shape=image_shape, head=head, taps=taps, attributes=bool(config.attributes),
        cut=cut(module, config.cut, image_shape).tap if config.cut else "",
    )  # fmt: skip
    if isinstance(start, Target):
        bare = compose.prepare(compose.during_stage(defenses), bare, seed=seed)
        load_body(bare.module, bare.head, body(start.module, start.head))
    elif start is not None:
        load_body(bare.module, bare.head, read_body(bare.module, bare.head, start, config.start_parts), config.start_parts)
    return compose.prepare(defenses, bare, seed=seed)


def check_recipe(config: Training, defenses: Sequence[Defense]) -> None:
    """Refuse what no network can mend: defenses of people for attributes, and an end before full strength: a half-defended model."""
    if config.attributes and (unfit := [defense.name for defense in defenses if not defense.takes_attributes]):
        raise ConfigError(
            f"{', '.join(unfit)} defends a classifier of people, and target.attributes asks for one of attributes: leave one of the two out"
        )
    weak = [defense.name for defense in defenses if not defense.settled(Moment(config.epochs - 1, config.epochs))]
    if weak and not config.weights:
        raise ConfigError(
            f"no epoch of {config.epochs} is at full defense strength ({', '.join(weak)}): raise target.epochs, or let the defense begin earlier"
        )


def check_training(config: Training, target: Target, defenses: Sequence[Defense], records: int) -> None:
    """Refuse defenses that cannot work on a prepared network with this recipe, before anything is computed."""
    check_recipe(config, defenses)
    if not config.weights and (found := compose.problems(defenses, target, Size(records, config.batch, config.epochs))):
        raise ConfigError(found)


def train_target(
    config: Training,
    split: Split,
    defenses: Sequence[Defense] = (),
    *,
    start: Target | None = None,
    perceptual: Target | None = None,
    seed: int = 0,
    work: Work | None = None,
) -> Target:
    """Train a classifier on the private training images (or load `config.weights`); selection sees validation images only.

    A first stage that a defense or `config.start` asks for is trained here too, unless its result is given as `start`. `perceptual` is a network by whose layers
    defenses compare pictures, where one does. Resumes from the last finished epoch in `work` with the same result as an uninterrupted run.
    """
    if isinstance(defenses, Defense) or not all(isinstance(defense, Defense) for defense in defenses):
        raise ConfigError(f"expected a list of defenses such as [Mid(weight=0.01)], got {defenses!r}")
    compose.check_composition(defenses)
    check_recipe(config, defenses)
    if len(split.train) < 2:
        raise ModelError(f"training needs at least 2 images, got {len(split.train)}")
    classes = classes_of(config, split)
    if first := first_stage(config, defenses):
        check_training(config, untrained(config, classes, split.train.shape, defenses, seed=seed), defenses, len(split.train))
        if start is None:
            before = seed_for(seed, "stage")
            start = train_target(first.config, stage_split(split, first.data, seed=before), first.defenses, seed=before)
    elif start is not None:
        raise ConfigError("a first stage was given, and neither target.start nor a defense asks for one: leave it out")
    target = untrained(config, classes, split.train.shape, defenses, seed=seed, start=start or config.starting_file)
    check_training(config, target, defenses, len(split.train))
    if config.weights:
        load_weights(target.module, config.weights)
        history: list[dict[str, float]] = []
        chosen = None
    else:
        history, chosen = _fit(config, target, split, defenses, perceptual, seed=seed, work=work or Work.scratch())
    target.module.eval()
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    info: dict[str, Any] = {
        "model": config.model,
        "parameters": sum(p.numel() for p in target.module.parameters()),
        "accuracy": {name: accuracy(target, images) for name, images in parts.items()},
        "history": history,
        "selected_epoch": chosen,
    }
    if not config.weights:
        info["trainable"] = sum(p.numel() for p in target.module.parameters() if p.requires_grad)
        info["facts"] = compose.facts(defenses, target, Size(len(split.train), config.batch, config.epochs))
    if first and start:
        info["first_stage"] = {
            "data": first.data,
            "epochs": first.config.epochs,
            "classes": len(start.classes),
            "accuracy": start.info["accuracy"],
            "before": start.info.get("first_stage"),
        }
    return replace(target, info=info)


def classes_of(config: Training, split: Split) -> tuple[str, ...]:
    """What a training on these pictures learns to tell: people, or attributes."""
    return attributes_of(config, split.train.attribute_names) if config.attributes else split.classes


def attributes_of(config: Training, known: tuple[str, ...]) -> tuple[str, ...]:
    """The attributes that a training learns, of those that the data has."""
    if config.attributes == ("all",) and known:
        return known
    if strange := [name for name in config.attributes if name not in known]:
        told = f"it has {', '.join(known)}" if known else "it has none: use faces, or a folder with a table of attributes"
        raise ConfigError(f"attributes: the data has no attribute {strange[0]!r}; {told}")
    return config.attributes


def wanted(target: Target, images: Images) -> Tensor:
    """What a target should say of pictures: the class of each, (N,), or which attributes it has, (N, K) of 0.0 and 1.0."""
    return attributes_in(images, target.classes) if target.attributes else images.labels


def attributes_in(images: Images, names: tuple[str, ...]) -> Tensor:
    """Which of the named attributes pictures have, (N, K) of 0.0 and 1.0."""
    if images.attributes is None:
        raise ConfigError("the target tells attributes, and these pictures come without any: use data with attributes, such as faces")
    return images.attributes[:, [images.attribute_names.index(name) for name in names]].float()


def right(logits: Tensor, answers: Tensor) -> Tensor:
    """How right logits are, picture by picture: 1 or 0 for a class, the share of attributes otherwise."""
    return (logits.argmax(1) == answers).float() if answers.ndim == 1 else ((logits > 0) == (answers > 0)).float().mean(1)


def _fit(
    config: Training, target: Target, split: Split, defenses: Sequence[Defense], perceptual: Target | None, *, seed: int, work: Work
) -> tuple[list, int]:
    from lightning_fabric import Fabric  # imported here: it takes seconds

    fabric = Fabric(accelerator=default_device().type, devices=1)
    compose.begin(defenses, target, split.train, seed=seed)
    check_training(
        config, target, defenses, len(split.train)
    )  # again: a boundary chosen by data may have frozen what another defense needs
    trainable = [p for p in target.module.parameters() if p.requires_grad]
    rule = compose.optimizer(defenses, target.module, optimizer_of(config, trainable), Size(len(split.train), config.batch, config.epochs))
    module, optimizer = fabric.setup(target.module, rule)
    names = compose.taps(defenses, target)
    opponents = compose.opponents(defenses, target, split.public, perceptual, seed=seed)
    history: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    chosen = -1
    if saved := work.load("training"):
        tensors, values = saved
        history, chosen = values["history"], values["chosen"]
        for number, opponent in enumerate(opponents):
            opponent.restore(under_prefix(f"opponent{number}", tensors))
        target.module.load_state_dict(under_prefix("module", tensors))
        restore_optimizer(optimizer, under_prefix("optimizer", tensors))
        best = under_prefix("best", tensors)
    for epoch in range(len(history), config.epochs):
        moment = Moment(epoch, config.epochs)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _lr_factor(config, moment)
        with seeded(seed, "epoch", epoch):  # dropout and noise inside the network
            row = train_epoch(config, fabric, module, optimizer, target, split.train, defenses, names, moment, opponents, seed=seed)
        row["validation_accuracy"] = accuracy(target, split.validation)
        if math.isnan(row["validation_accuracy"]):
            raise RunError(f"{config.model}: NaN or infinity after epoch {epoch}: lower the learning rate or the defense's strength")
        history.append(row)
        ready = config.keep == "last" or compose.settled(defenses, moment)
        if ready and (chosen < 0 or config.keep == "last" or row["validation_accuracy"] >= history[chosen]["validation_accuracy"]):
            chosen, best = epoch, {name: t.detach().clone() for name, t in target.module.state_dict().items()}
        if epoch + 1 < config.epochs:
            tensors = with_prefix("module", target.module.state_dict()) | with_prefix("optimizer", optimizer_tensors(optimizer))
            for number, opponent in enumerate(opponents):
                tensors |= with_prefix(f"opponent{number}", opponent.tensors())
            work.save("training", tensors | with_prefix("best", best), {"history": history, "chosen": chosen})
        work.progress(epoch + 1, config.epochs, f"accuracy {row['validation_accuracy']:.3f}")
    target.module.load_state_dict(best)
    return history, chosen


def train_epoch(
    config: Training, fabric: Any, module: nn.Module, optimizer: Any, target: Target, images: Images,
    defenses: Sequence[Defense], taps: Sequence[tuple[str, ...]], moment: Moment, opponents: Sequence[Opponent] = (), *, seed: int,
) -> dict[str, float]:  # fmt: skip
    """One pass over the training images; returns the mean of each loss term, of the logits' length and of the training accuracy."""
    module.train()
    compose.modes(defenses, target)
    dice = generator_for(seed, "order", moment.epoch)
    batches = _batches(config, images.labels, defenses, dice)
    seen = sum(map(len, batches))
    answers = wanted(target, images)
    totals: dict[str, float] = {}
    for number, index in enumerate(batches):
        for opponent in opponents:
            opponent.turn(moment, number)
        optimizer.zero_grad(set_to_none=True)
        if len(index):
            pictures = fabric.to_device(_augmented(config, images.floats(index), dice))
            labels = fabric.to_device(answers[index])
            with capture(target.module, tuple(dict.fromkeys(chain(*taps)))) as tapped:
                logits = module(pictures)
            batch = Batch(pictures, labels, logits, tapped, moment, as_seen(target.module, pictures))
            terms = compose.losses(defenses, batch, taps, opponents)
            loss = sum((term.weight * term.value for term in terms.values()), start=torch.zeros((), device=logits.device))
            if not loss.isfinite():
                worst = ", ".join(f"{name} {term.value.item()}" for name, term in terms.items())
                raise RunError(
                    f"{config.model}: the loss is not finite at epoch {moment.epoch}, batch {number} ({worst}): lower the learning rate or "
                    "the defense's strength; the last finished epoch is kept and the same command resumes there"
                )
            fabric.backward(loss)
            row = {name: term.weight * term.value.item() for name, term in terms.items()}
            row["logit_norm"] = logits.detach().norm(dim=1).mean().item()
            row["train_accuracy"] = right(logits, labels).mean().item()
            for name, value in row.items():
                totals[name] = totals.get(name, 0.0) + len(index) / seen * value
        optimizer.step()
    return totals


def _batches(config: Training, labels: Tensor, defenses: Sequence[Defense], dice: torch.Generator) -> Sequence[Tensor]:
    """Which images form the batches of an epoch."""
    if sampler := compose.replacing(defenses, "batches"):
        return sampler.batches(labels, config.batch, dice)
    # Near-equal batches: no image is dropped and no batch is too small for batch norm.
    count = max(1, min(math.ceil(len(labels) / config.batch), len(labels) // 2))
    return torch.randperm(len(labels), generator=dice).tensor_split(count)


def _augmented(config: Training, images: Tensor, dice: torch.Generator) -> Tensor:
    return augment(images, dice, flip=config.flip, shift=config.shift, crop=config.crop, jitter=config.jitter, cutout=config.cutout)


def accuracy(target: Target, images: Images) -> float:
    """Share of images the target labels right (or of their attributes), in evaluation mode; NaN if it puts out NaN or infinity. Nothing of the target is changed."""
    device = device_of(target.module)
    answers = wanted(target, images)
    hits = 0.0
    with frozen(target.module), torch.no_grad():
        for index in torch.arange(len(images)).split(256):
            logits = target.module(images.floats(index).to(device))
            if not logits.isfinite().all():
                return math.nan
            hits += right(logits.cpu(), answers[index]).double().sum().item()
    return hits / len(images)


def optimizer_of(config: Training, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(trainable, lr=config.lr, weight_decay=config.weight_decay)
    if config.optimizer == "adam":
        return torch.optim.Adam(trainable, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        trainable,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
        weight_decay=config.weight_decay,
    )


def _lr_factor(config: Training, moment: Moment) -> float:
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * moment.progress))
    if config.schedule == "milestones":
        return config.decay ** sum(moment.progress >= share for share in config.milestones)
    return 1.0
