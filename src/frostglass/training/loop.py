"""The only classifier training: of targets and evaluators, undefended or with any defenses."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError, ModelError, RunError
from frostglass.core.pixels import shown_together
from frostglass.core.ranks import Ranks, default_devices, together
from frostglass.core.types import Images, Split, Target
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, TrainingProgress
from frostglass.models.answers import described, labels_only
from frostglass.models.checkpoint import load_weights
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import answered, changes_answers
from frostglass.runtime.layout import lay_out
from frostglass.runtime.seeding import seed_for
from frostglass.runtime.tensors import under_prefix, with_prefix
from frostglass.store.files import Work
from frostglass.training.build import check_devices, check_recipe, check_training, untrained
from frostglass.training.examine import examine
from frostglass.training.settings import (
    FirstStage,
    Training,
    classes_of,
    first_stage,
    size_of,
    stage_split,
    targets_for,
)
from frostglass.training.strangers import strangers_accepted
from frostglass.training.trainer import Trainer, correct

History = list[dict[str, float]]


def train_target(
    config: Training,
    split: Split,
    defenses: Sequence[Defense] = (),
    *,
    start: Target | None = None,
    perceptual: Target | None = None,
    seed: int = 0,
    work: Work | None = None,
    device: torch.device | None = None,
    devices: int | None = None,
) -> Target:
    """Train a classifier on the private training images, or load `config.weights`.

    Loaded weights are examined on all private images (`examine`), and refused if these show that
    it is not the model that was meant.
    The epoch is selected by validation images only. A first stage that a defense or `config.start`
    asks for is trained too, unless its result is given as `start`. `perceptual` is a network whose
    layers compare images, for defenses that need one. A training interrupted in `work` resumes
    after its last finished epoch, with the same result. `devices` processes train together, each on
    its part of every batch: as one does, but for rounding and for noise inside the network, so that
    a training may be resumed with another number of them.
    """
    device, devices = device or default_device(), devices or default_devices()
    _check(config, split, defenses, start)
    check_devices(devices, config, defenses)
    classes, shape, size = classes_of(config, split), split.train.shape, size_of(config, split)
    first = first_stage(config, defenses)
    if first:
        plain = untrained(config, classes, shape, defenses, seed=seed)
        check_training(config, plain, defenses, size)  # before hours of the first stage
        if start is None:
            own_seed = seed_for(seed, "stage")
            images = stage_split(split, first.data, seed=own_seed)
            start = train_target(
                first.config, images, first.defenses, seed=own_seed, device=device, devices=devices
            )
    source = start or config.starting_file
    target = untrained(config, classes, shape, defenses, seed=seed, start=source)
    check_training(config, target, defenses, size)
    learned: dict[str, Any] = {"history": [], "selected_epoch": None}
    opponents: dict[str, dict[str, Any]] = {}
    if config.weights:
        target = _given(config, target, split, device)
    else:
        task = (split, defenses, perceptual, seed, device)
        learned, opponents = _learn(config, target, task, devices, work or Work.scratch())
    target.module.eval()
    info = _info(config, target, split, defenses, seed, opponents) | learned
    if not config.weights:  # measured in the layout of training, which is faster
        lay_out(target.module, torch.contiguous_format)
    if first and start:
        info["first_stage"] = _stage_facts(first, start)
    return replace(target, info=info)


def _learn(
    config: Training, target: Target, task: tuple[Any, ...], devices: int, work: Work
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Train a target and complete it; return what was recorded, and facts of the opponents."""
    split, defenses, _, _, device = task
    devices = 1 if device.type == "meta" else devices
    # A copy for other processes, which share its memory.
    start_from = copy.deepcopy(target) if devices > 1 else target
    with together(devices, device, _train_along, config, start_from, *task) as ranks:
        trainer = _trainer(ranks, config, target, *task)
        learned = _fit(trainer, split.validation, work)
    target.module.zero_grad(set_to_none=True)
    for defense in defenses:
        defense.complete(target, split)
    return learned | {"numerics": trainer.numerics}, trainer.opponent_facts()


def _stage_facts(stage: FirstStage, start: Target) -> dict[str, Any]:
    return {
        "data": stage.data,
        "epochs": stage.config.epochs,
        "classes": len(start.classes),
        "accuracy": start.info["accuracy"],
        "before": start.info.get("first_stage"),
    }


def _given(config: Training, target: Target, split: Split, device: torch.device) -> Target:
    """Load weights that were not trained here, and examine them on the private images."""
    if not config.whole:
        load_weights(target.module, str(config.weights))
    target.module.to(device)
    if split.train.pixels.is_meta:  # a dry run has no content to examine
        return target
    return _limited(examine(target, split, config.classes))


def _limited(target: Target) -> Target:
    """Note that a given model answers with labels alone, if the examination saw that."""
    if not labels_only(target.module):
        return target
    return replace(target, info={**target.info, "labels_only": True})


def _check(
    config: Training, split: Split, defenses: Sequence[Defense], start: Target | None
) -> None:
    if isinstance(defenses, Defense) or not all(isinstance(each, Defense) for each in defenses):
        raise ConfigError(
            f"expected a list of defenses such as [Mid(weight=0.01)], got {defenses!r}"
        )
    if conflicts := compose.conflicts(defenses):
        raise ConfigError(conflicts)
    check_recipe(config, defenses)
    if len(split.train) < 2:
        raise ModelError(f"training needs at least 2 images, got {len(split.train)}")
    if start is not None and not first_stage(config, defenses):
        raise ConfigError(
            "a first stage was given, and neither target.start nor a defense asks for one: "
            "leave it out"
        )


def _trainer(
    ranks: Ranks,
    config: Training,
    target: Target,
    split: Split,
    defenses: Sequence[Defense],
    perceptual: Target | None,
    seed: int,
    device: torch.device,
) -> Trainer:
    return Trainer(
        config, target, split, defenses, perceptual, seed=seed, device=device, ranks=ranks
    )


def _train_along(ranks: Ranks, config: Training, target: Target, *task: Any) -> None:
    """Train with the first process, which alone validates, selects and saves."""
    trainer, done = _trainer(ranks, config, copy.deepcopy(target), *task), 0
    if saved := ranks.broadcast(None):
        trainer.restore(saved[0])
        done = len(saved[1]["history"])
    for epoch in range(done, config.epochs):
        trainer.epoch(TrainingProgress(epoch, config.epochs))


def _fit(trainer: Trainer, validation: Images, work: Work) -> dict[str, Any]:
    """Train all epochs, load the selected weights, and return the history and their epoch."""
    config, module = trainer.config, trainer.target.module
    history, best, chosen = History(), dict[str, Tensor](), -1
    opponents: dict[str, Tensor] = {}  # of the chosen epoch, as `best` is
    if saved := trainer.ranks.broadcast(work.load("training")):
        tensors, values = saved
        history, chosen = values["history"], values["chosen"]
        trainer.restore(tensors)
        best = under_prefix("best", tensors)
        opponents = under_prefix("best_opponents", tensors)
    for epoch in range(len(history), config.epochs):
        progress = TrainingProgress(epoch, config.epochs)
        row = trainer.epoch(progress)
        row["validation_accuracy"] = score = accuracy(trainer.target, validation)
        if math.isnan(score):
            raise RunError(
                f"{config.model}: NaN or infinity after epoch {epoch}: "
                "lower the learning rate or the defense's strength"
            )
        history.append(row)
        work.record(epoch + 1, row)
        better = chosen < 0 or score >= history[chosen]["validation_accuracy"]
        strong = compose.at_full_strength(trainer.defenses, progress)
        if config.keep == "last" or (better and strong):
            chosen = epoch
            best = _copied(module.state_dict())
            opponents = _copied(trainer.opponent_tensors())
        if epoch + 1 < config.epochs:
            tensors = trainer.tensors() | with_prefix("best", best)
            tensors |= with_prefix("best_opponents", opponents)
            work.save("training", tensors, {"history": history, "chosen": chosen})
        work.progress(epoch + 1, config.epochs, f"accuracy {score:.3f}")
    module.load_state_dict(best)
    trainer.restore_opponents(opponents)
    return {"history": history, "selected_epoch": chosen}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _info(
    config: Training,
    target: Target,
    split: Split,
    defenses: Sequence[Defense],
    seed: int,
    opponents: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Describe a trained or loaded target."""
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    weights = list(target.module.parameters())
    info: dict[str, Any] = {
        "model": _model_name(config, target),
        "parameters": sum(weight.numel() for weight in weights),
        "strangers_accepted": strangers_accepted(target, split),
        **target.info,  # of an examination, which measured the accuracy
    }
    if "accuracy" not in info:
        info["accuracy"] = {name: accuracy(target, images) for name, images in parts.items()}
    if not config.weights:
        size = size_of(config, split)
        info["trainable"] = sum(weight.numel() for weight in weights if weight.requires_grad)
        facts = {
            defense.name: defense.facts(target, size)
            | defense.measurements(target, split, seed=seed)
            | opponents.get(defense.name, {})
            for defense in defenses
        }
        info["facts"] = {name: values for name, values in facts.items() if values}
    return info


def _model_name(config: Training, target: Target) -> str:
    if config.weights and config.whole:
        return described(target.module, config.weights)
    return config.model


def accuracy(target: Target, images: Images) -> float:
    """Return the share of images (or of their attributes) that the target predicts correctly.

    It is that of the answers it gives away, if a defense changes them. The target is left
    unchanged. Returns NaN if its outputs are not finite.
    """
    device = device_of(target.module)
    labels = targets_for(target, images)
    hits, changed = 0.0, changes_answers(target.module)
    with frozen(target.module), torch.no_grad():
        for index in shown_together(torch.arange(len(images)), images.shape):
            logits = target.module(images.floats(index).to(device))
            if not logits.isfinite().all():
                return math.nan
            if changed:
                logits = answered(target.module, logits)
            hits += correct(logits.cpu(), labels[index]).double().sum().item()
    return hits / len(images)
