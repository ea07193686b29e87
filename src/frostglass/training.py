"""The only classifier loop: it trains targets and evaluators, undefended or with any defenses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.checks import parameters
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, Moment
from frostglass.errors import ConfigError, ModelError, RunError
from frostglass.files import Work
from frostglass.models.build import build, source
from frostglass.models.checkpoint import load_weights
from frostglass.models.taps import find_head, find_taps
from frostglass.runtime import (
    capture,
    default_device,
    device_of,
    frozen,
    generator_for,
    optimizer_tensors,
    restore_optimizer,
    seeded,
    under_prefix,
    with_prefix,
)
from frostglass.types import Images, Shape, Split, Target


@parameters
class Training:
    """How a classifier is built and trained.

    Args:
        model: a built-in name, `timm:NAME`, `torchvision:NAME` or `package.module:function`.
        options: keyword arguments of the model's builder.
        mean, std: normalisation inside the model, one number per channel; none by default (images stay in [0, 1]).
        weights: a checkpoint to load instead of training.
        epochs, batch, optimizer, lr, momentum, weight_decay: the usual; momentum (Nesterov) is SGD's.
        schedule: "constant", "cosine" to zero, or "milestones": ×0.1 after 75 % and 90 % of the epochs.
        flip: mirror half of the training images. shift: move training images by up to this many pixels.
        keep: "best" keeps the epoch with the best validation accuracy (the later of equals), "last" the last.
    """

    model: str = "cnn"
    options: dict[str, Any] = Field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    weights: str | None = None
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 64
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    schedule: Literal["constant", "cosine", "milestones"] = "cosine"
    flip: bool = True
    shift: Annotated[int, Field(ge=0)] = 0
    keep: Literal["best", "last"] = "best"

    def files(self) -> list[str]:
        """Files this configuration reads."""
        return [path for path in (self.weights, source(self.model)) if path]


def untrained(config: Training, classes: tuple[str, ...], image_shape: Shape, defenses: Sequence[Defense], *, seed: int) -> Target:
    """The network a training run starts from, with the defenses' changes applied; the same for the same seed."""
    module = build(
        config.model, classes=len(classes), image_shape=image_shape, mean=config.mean, std=config.std, seed=seed, **config.options
    )
    bare = Target(module=module, classes=classes, image_shape=image_shape, head=find_head(module, image_shape))
    ready = compose.prepare(defenses, bare, seed=seed)
    return replace(ready, taps=find_taps(ready.module, image_shape))


def check_strength(config: Training, defenses: Sequence[Defense]) -> None:
    """Refuse a training that ends before its defenses are at full strength: it would hand out a half-defended model."""
    weak = [defense.name for defense in defenses if not defense.settled(Moment(config.epochs - 1, config.epochs))]
    if weak and not config.weights:
        raise ConfigError(
            f"no epoch of {config.epochs} is at full defense strength ({', '.join(weak)}): raise target.epochs, or let the defense begin earlier"
        )


def train_target(config: Training, split: Split, defenses: Sequence[Defense] = (), *, seed: int = 0, work: Work | None = None) -> Target:
    """Train a classifier on the private training images (or load `config.weights`); selection sees validation images only.

    Resumes from the last finished epoch in `work` with the same result as an uninterrupted run.
    """
    compose.check_composition(defenses)
    check_strength(config, defenses)
    if len(split.train) < 2:
        raise ModelError(f"training needs at least 2 images, got {len(split.train)}")
    target = untrained(config, split.classes, split.train.shape, defenses, seed=seed)
    if config.weights:
        load_weights(target.module, config.weights)
        history: list[dict[str, float]] = []
        chosen = None
    else:
        history, chosen = _fit(config, target, split, defenses, seed=seed, work=work or Work.scratch())
    target.module.eval()
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    info = {
        "model": config.model,
        "parameters": sum(p.numel() for p in target.module.parameters()),
        "accuracy": {name: accuracy(target, images) for name, images in parts.items()},
        "history": history,
        "selected_epoch": chosen,
    }
    return replace(target, info=info)


def _fit(config: Training, target: Target, split: Split, defenses: Sequence[Defense], *, seed: int, work: Work) -> tuple[list, int]:
    from lightning_fabric import Fabric  # imported here: it takes seconds

    fabric = Fabric(accelerator=default_device().type, devices=1)
    trainable = [p for p in target.module.parameters() if p.requires_grad]
    module, optimizer = fabric.setup(target.module, _optimizer(config, trainable))
    names = compose.taps(defenses, target)
    history: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    chosen = -1
    if saved := work.load("training"):
        tensors, values = saved
        history, chosen = values["history"], values["chosen"]
        target.module.load_state_dict(under_prefix("module", tensors))
        restore_optimizer(optimizer, under_prefix("optimizer", tensors))
        best = under_prefix("best", tensors)
    for epoch in range(len(history), config.epochs):
        moment = Moment(epoch, config.epochs)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _lr_factor(config.schedule, moment)
        with seeded(seed, "epoch", epoch):  # dropout and noise inside the network
            row = _epoch(config, fabric, module, optimizer, target, split.train, defenses, names, moment, seed=seed)
        row["validation_accuracy"] = accuracy(target, split.validation)
        if math.isnan(row["validation_accuracy"]):
            raise RunError(f"{config.model}: NaN or infinity after epoch {epoch}: lower the learning rate or the defense's strength")
        history.append(row)
        ready = config.keep == "last" or compose.settled(defenses, moment)
        if ready and (chosen < 0 or config.keep == "last" or row["validation_accuracy"] >= history[chosen]["validation_accuracy"]):
            chosen, best = epoch, {name: t.detach().clone() for name, t in target.module.state_dict().items()}
        if epoch + 1 < config.epochs:
            tensors = with_prefix("module", target.module.state_dict()) | with_prefix("optimizer", optimizer_tensors(optimizer))
            work.save("training", tensors | with_prefix("best", best), {"history": history, "chosen": chosen})
        work.progress(epoch + 1, config.epochs, f"accuracy {row['validation_accuracy']:.3f}")
    target.module.load_state_dict(best)
    return history, chosen


def _epoch(
    config: Training, fabric: Any, module: nn.Module, optimizer: Any, target: Target, images: Images,
    defenses: Sequence[Defense], taps: tuple[str, ...], moment: Moment, *, seed: int,
) -> dict[str, float]:  # fmt: skip
    """One pass over the training images; returns the mean of each loss term and the training accuracy."""
    module.train()
    dice = generator_for(seed, "order", moment.epoch)
    # Near-equal batches: no image is dropped and no batch is too small for batch norm.
    count = max(1, min(math.ceil(len(images) / config.batch), len(images) // 2))
    batches = torch.randperm(len(images), generator=dice).tensor_split(count)
    totals: dict[str, float] = {}
    for number, index in enumerate(batches):
        pictures = fabric.to_device(augment(images.floats(index), config.flip, config.shift, dice))
        labels = fabric.to_device(images.labels[index])
        with capture(target.module, taps) as tapped:
            logits = module(pictures)
        terms = compose.losses(defenses, Batch(pictures, labels, logits, tapped, moment))
        loss = sum((term.weight * term.value for term in terms.values()), start=torch.zeros((), device=logits.device))
        if not loss.isfinite():
            worst = ", ".join(f"{name} {term.value.item()}" for name, term in terms.items())
            raise RunError(
                f"{config.model}: the loss is not finite at epoch {moment.epoch}, batch {number} ({worst}): lower the learning rate or the defense's strength; "
                "the last finished epoch is kept and the same command resumes there"
            )
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(loss)
        optimizer.step()
        share = len(index) / len(images)
        for name, term in terms.items():
            totals[name] = totals.get(name, 0.0) + share * term.weight * term.value.item()
        correct = (logits.argmax(1) == labels).float().mean().item()
        totals["train_accuracy"] = totals.get("train_accuracy", 0.0) + share * correct
    return totals


def augment(images: Tensor, flip: bool, shift: int, dice: torch.Generator) -> Tensor:
    """Mirror half of the images and move each by up to `shift` pixels, drawn per image."""
    if flip:
        mirrored = torch.rand(len(images), 1, 1, 1, generator=dice) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
    if shift:
        height, width = images.shape[2:]
        padded = nn.functional.pad(images, (shift,) * 4, mode="replicate")
        top, left = torch.randint(2 * shift + 1, (2, len(images)), generator=dice)
        rows = (top[:, None] + torch.arange(height))[:, None, :, None]
        columns = (left[:, None] + torch.arange(width))[:, None, None, :]
        images = padded[torch.arange(len(images))[:, None, None, None], torch.arange(images.shape[1])[None, :, None, None], rows, columns]
    return images


def accuracy(target: Target, images: Images) -> float:
    """Share of images the target labels right, in evaluation mode; NaN if it puts out NaN or infinity. Nothing of the target is changed."""
    device = device_of(target.module)
    right = 0
    with frozen(target.module), torch.no_grad():
        for index in torch.arange(len(images)).split(256):
            logits = target.module(images.floats(index).to(device))
            if not logits.isfinite().all():
                return math.nan
            right += int((logits.argmax(1).cpu() == images.labels[index]).sum())
    return right / len(images)


def _optimizer(config: Training, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(trainable, lr=config.lr, weight_decay=config.weight_decay)
    if config.optimizer == "adam":
        return torch.optim.Adam(trainable, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        trainable, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, weight_decay=config.weight_decay
    )


def _lr_factor(schedule: str, moment: Moment) -> float:
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * moment.progress))
    if schedule == "milestones":
        return 0.1 ** sum(moment.progress >= share for share in (0.75, 0.9))
    return 1.0
