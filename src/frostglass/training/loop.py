"""The only classifier loop: it trains targets and evaluators, undefended or with any defenses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, ModelError, RunError
from frostglass.core.types import Images, Split, Target
from frostglass.data._augment import augment
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, Opponent, Size, TrainingProgress
from frostglass.models.base import as_seen
from frostglass.models.checkpoint import load_weights
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seed_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work
from frostglass.training.build import check_recipe, check_training, untrained
from frostglass.training.settings import Training, classes_of, first_stage, stage_split, targets_for


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
    if isinstance(defenses, Defense) or not all(
        isinstance(defense, Defense) for defense in defenses
    ):
        raise ConfigError(
            f"expected a list of defenses such as [Mid(weight=0.01)], got {defenses!r}"
        )
    compose.check_composition(defenses)
    check_recipe(config, defenses)
    if len(split.train) < 2:
        raise ModelError(f"training needs at least 2 images, got {len(split.train)}")
    classes = classes_of(config, split)
    if first := first_stage(config, defenses):
        check_training(
            config,
            untrained(config, classes, split.train.shape, defenses, seed=seed),
            defenses,
            len(split.train),
        )
        if start is None:
            before = seed_for(seed, "stage")
            start = train_target(
                first.config,
                stage_split(split, first.data, seed=before),
                first.defenses,
                seed=before,
            )
    elif start is not None:
        raise ConfigError(
            "a first stage was given, and neither target.start nor a defense asks for one: leave it out"
        )
    target = untrained(
        config, classes, split.train.shape, defenses, seed=seed, start=start or config.starting_file
    )
    check_training(config, target, defenses, len(split.train))
    if config.weights:
        load_weights(target.module, config.weights)
        history: list[dict[str, float]] = []
        chosen = None
    else:
        history, chosen = _fit(
            config, target, split, defenses, perceptual, seed=seed, work=work or Work.scratch()
        )
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
        info["facts"] = compose.facts(
            defenses, target, Size(len(split.train), config.batch, config.epochs)
        )
    if first and start:
        info["first_stage"] = {
            "data": first.data,
            "epochs": first.config.epochs,
            "classes": len(start.classes),
            "accuracy": start.info["accuracy"],
            "before": start.info.get("first_stage"),
        }
    return replace(target, info=info)


def right(logits: Tensor, answers: Tensor) -> Tensor:
    """How right logits are, picture by picture: 1 or 0 for a class, the share of attributes otherwise."""
    return (
        (logits.argmax(1) == answers).float()
        if answers.ndim == 1
        else ((logits > 0) == (answers > 0)).float().mean(1)
    )


def _fit(
    config: Training,
    target: Target,
    split: Split,
    defenses: Sequence[Defense],
    perceptual: Target | None,
    *,
    seed: int,
    work: Work,
) -> tuple[list, int]:
    from lightning_fabric import Fabric  # imported here: it takes seconds

    fabric = Fabric(accelerator=default_device().type, devices=1)
    compose.begin(defenses, target, split.train, seed=seed)
    check_training(
        config, target, defenses, len(split.train)
    )  # again: a boundary chosen by data may have frozen what another defense needs
    trainable = [p for p in target.module.parameters() if p.requires_grad]
    rule = compose.optimizer(
        defenses,
        target.module,
        optimizer_of(config, trainable),
        Size(len(split.train), config.batch, config.epochs),
    )
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
        progress = TrainingProgress(epoch, config.epochs)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _lr_factor(config, progress)
        with seeded(seed, "epoch", epoch):  # dropout and noise inside the network
            row = train_epoch(
                config,
                fabric,
                module,
                optimizer,
                target,
                split.train,
                defenses,
                names,
                progress,
                opponents,
                seed=seed,
            )
        row["validation_accuracy"] = accuracy(target, split.validation)
        if math.isnan(row["validation_accuracy"]):
            raise RunError(
                f"{config.model}: NaN or infinity after epoch {epoch}: lower the learning rate or the defense's strength"
            )
        history.append(row)
        ready = config.keep == "last" or compose.at_full_strength(defenses, progress)
        if ready and (
            chosen < 0
            or config.keep == "last"
            or row["validation_accuracy"] >= history[chosen]["validation_accuracy"]
        ):
            chosen, best = (
                epoch,
                {name: t.detach().clone() for name, t in target.module.state_dict().items()},
            )
        if epoch + 1 < config.epochs:
            tensors = with_prefix("module", target.module.state_dict()) | with_prefix(
                "optimizer", optimizer_tensors(optimizer)
            )
            for number, opponent in enumerate(opponents):
                tensors |= with_prefix(f"opponent{number}", opponent.tensors())
            work.save(
                "training",
                tensors | with_prefix("best", best),
                {"history": history, "chosen": chosen},
            )
        work.progress(epoch + 1, config.epochs, f"accuracy {row['validation_accuracy']:.3f}")
    target.module.load_state_dict(best)
    return history, chosen


def train_epoch(
    config: Training, fabric: Any, module: nn.Module, optimizer: Any, target: Target, images: Images,
    defenses: Sequence[Defense], taps: Sequence[tuple[str, ...]], progress: TrainingProgress, opponents: Sequence[Opponent] = (), *, seed: int,
) -> dict[str, float]:  # fmt: skip
    """One pass over the training images; returns the mean of each loss term, of the logits' length and of the training accuracy."""
    module.train()
    compose.modes(defenses, target)
    rng = generator_for(seed, "order", progress.epoch)
    batches = _batches(config, images.labels, defenses, rng)
    seen = sum(map(len, batches))
    answers = targets_for(target, images)
    totals: dict[str, float] = {}
    for number, index in enumerate(batches):
        for opponent in opponents:
            opponent.turn(progress, number)
        optimizer.zero_grad(set_to_none=True)
        if len(index):
            pictures = fabric.to_device(_augmented(config, images.floats(index), rng))
            labels = fabric.to_device(answers[index])
            with capture(target.module, tuple(dict.fromkeys(chain(*taps)))) as tapped:
                logits = module(pictures)
            batch = Batch(
                pictures, labels, logits, tapped, progress, as_seen(target.module, pictures)
            )
            terms = compose.losses(defenses, batch, taps, opponents)
            loss = sum(
                (term.weight * term.value for term in terms.values()),
                start=torch.zeros((), device=logits.device),
            )
            if not loss.isfinite():
                worst = ", ".join(f"{name} {term.value.item()}" for name, term in terms.items())
                raise RunError(
                    f"{config.model}: the loss is not finite at epoch {progress.epoch}, batch {number} ({worst}): lower the learning rate or "
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


def _batches(
    config: Training, labels: Tensor, defenses: Sequence[Defense], rng: torch.Generator
) -> Sequence[Tensor]:
    """Which images form the batches of an epoch."""
    if sampler := compose.replacing(defenses, "batches"):
        return sampler.batches(labels, config.batch, rng)
    # Near-equal batches: no image is dropped and no batch is too small for batch norm.
    count = max(1, min(math.ceil(len(labels) / config.batch), len(labels) // 2))
    return torch.randperm(len(labels), generator=rng).tensor_split(count)


def _augmented(config: Training, images: Tensor, rng: torch.Generator) -> Tensor:
    return augment(
        images,
        rng,
        flip=config.flip,
        shift=config.shift,
        crop=config.crop,
        jitter=config.jitter,
        cutout=config.cutout,
    )


def accuracy(target: Target, images: Images) -> float:
    """Share of images the target labels right (or of their attributes), in evaluation mode; NaN if it puts out NaN or infinity. Nothing of the target is changed."""
    device = device_of(target.module)
    answers = targets_for(target, images)
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


def _lr_factor(config: Training, progress: TrainingProgress) -> float:
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress.fraction))
    if config.schedule == "milestones":
        return config.decay ** sum(progress.fraction >= share for share in config.milestones)
    return 1.0
