"""One epoch of training, undefended or with any defenses."""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.core.ranks import ALONE, Ranks, joint_batch_norm
from frostglass.core.types import Shape, Split, Target
from frostglass.data._augment import Changes, draw_changes
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, TrainingProgress
from frostglass.models.base import as_seen
from frostglass.runtime.arithmetic import denormals_flushed
from frostglass.runtime.device import device_of
from frostglass.runtime.fused import fuse
from frostglass.runtime.hooks import capture
from frostglass.runtime.layout import fastest_layout, gradients_laid_out, lay_out
from frostglass.runtime.memory import trimming
from frostglass.runtime.processes import cores
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.training.accelerator import accelerator_for, compiled, supported_precision
from frostglass.training.batches import computed_ahead, prepared
from frostglass.training.build import check_training
from frostglass.training.images import TrainingImages
from frostglass.training.record import BatchRecord, EpochRecord
from frostglass.training.settings import Training, size_of, targets_for

log = logging.getLogger(__name__)


class Trainer:
    """A training in progress: network, optimiser, defenses and their opponents on one device.

    `epoch` trains the network in place, in the memory layout that is faster; `finish` ends that.
    `tensors` and `restore` make it resumable.
    """

    def __init__(
        self,
        config: Training,
        target: Target,
        split: Split,
        defenses: Sequence[Defense] = (),
        perceptual: Target | None = None,
        *,
        seed: int,
        device: torch.device,
        ranks: Ranks = ALONE,
    ):
        self.config, self.target, self.defenses = config, target, defenses
        self.ranks, device = ranks, ranks.device(device)
        images, self._seed = split.train, seed
        self._shown = TrainingImages.of(split, targets_for(target, images), defenses, seed=seed)
        module = target.module.to(device)
        before = _trainable(module)
        for defense in defenses:
            defense.begin(target, images, seed=seed)
        trainable = _trainable(module)
        if trainable.keys() != before.keys():  # frozen layers may be what another defense needs
            check_training(config, target, defenses, size_of(config, split))
        self._layout = fastest_layout(module, target.image_shape)
        lay_out(module, self._layout)
        rule = plain = optimizer_of(config, list(trainable.values()))
        for defense in defenses:
            rule = defense.optimizer(module, rule, size_of(config, split))
        if rule is plain:  # that of a defense may compute gradients in another memory layout
            fuse(rule)
        self._taps = [defense.taps(target) for defense in defenses]
        self._precision = supported_precision(config.precision, device)
        self._accelerator = accelerator_for(device, self._precision)
        faster = self._compiled(device) if config.compile else None
        self._module, self._optimizer = self._accelerator.setup(faster or module, rule)
        opponents = {
            each.name: each.opponent(target, split.public, perceptual, seed=seed)
            for each in defenses
        }
        self._opponents = {name: opponent for name, opponent in opponents.items() if opponent}
        self._threaded = _has_room(device)
        self._batch_numbers = config.batch * math.prod(target.image_shape)
        self.numerics = {"precision": self._precision, "compiled": faster is not None}

    def _compiled(self, device: torch.device) -> nn.Module | None:
        """Return the compiled network; None if it cannot be compiled or layers of it are read."""
        if any(self._taps) or self.ranks.size > 1:
            reader = "a defense reads" if any(self._taps) else "several devices change"
            log.warning("target.compile: training is not compiled: %s its layers", reader)
            return None
        return compiled(self.target.module, self.target.image_shape, device)

    def epoch(self, progress: TrainingProgress) -> dict[str, float]:
        """Train on all images once; return mean loss terms, logit norm and training accuracy."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.lr * lr_factor(self.config, progress)
        self._module.train()
        for defense in self.defenses:
            defense.modes(self.target)
        rng = generator_for(self._seed, "order", progress.epoch)
        batches = self._batches(rng)
        record = EpochRecord(self.config.model, progress, sum(map(len, batches)))
        tasks = (partial(self._prepare, index, rng) for index in batches)
        # Seeded for dropout and noise inside the network, which no two ranks draw alike.
        rank = () if self.ranks.first else (self.ranks.rank,)
        with (
            seeded(self._seed, "epoch", progress.epoch, *rank),
            joint_batch_norm(self.ranks, self.target.module),
            self._faster_batch_norm(),
            denormals_flushed(),
            closing(computed_ahead(tasks, thread=self._threaded)) as prepared_batches,
        ):
            shown = trimming(zip(batches, prepared_batches, strict=True), self._batch_numbers)
            for number, (index, images) in enumerate(shown):
                for opponent in self._opponents.values():
                    opponent.turn(progress, number)
                self._optimizer.zero_grad(set_to_none=True)
                if len(index):
                    record.add(number, self._backward(index, images, progress, number))
                self._optimizer.step()
        return record.means()

    def _faster_batch_norm(self) -> AbstractContextManager[None]:
        # A compiled network has layouts of its own, and hooks would have it compiled anew.
        if self.numerics["compiled"]:
            return nullcontext()
        return gradients_laid_out(self.target.module, self._layout)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of network, optimiser and opponents for a checkpoint."""
        tensors = with_prefix("module", self.target.module.state_dict())
        tensors |= with_prefix("optimizer", optimizer_tensors(self._optimizer))
        tensors |= with_prefix("accelerator", self._accelerator.tensors())
        return tensors | self.opponent_tensors()

    def opponent_tensors(self) -> dict[str, Tensor]:
        """Return the state of the opponents alone."""
        tensors: dict[str, Tensor] = {}
        for number, opponent in enumerate(self._opponents.values()):
            tensors |= with_prefix(f"opponent{number}", opponent.tensors())
        return tensors

    def restore_opponents(self, tensors: dict[str, Tensor]) -> None:
        """Load what `opponent_tensors` returned."""
        for number, opponent in enumerate(self._opponents.values()):
            opponent.restore(under_prefix(f"opponent{number}", tensors))

    def opponent_facts(self) -> dict[str, dict[str, Any]]:
        """Return what the opponents say of the trained network, by the names of the defenses."""
        return {name: opponent.facts() for name, opponent in self._opponents.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what `tensors` returned."""
        self.restore_opponents(tensors)
        self.target.module.load_state_dict(under_prefix("module", tensors))
        restore_optimizer(self._optimizer, under_prefix("optimizer", tensors))
        self._accelerator.restore(under_prefix("accelerator", tensors))

    def _batches(self, rng: torch.Generator) -> Sequence[Tensor]:
        """Return the image indices of each batch of an epoch."""
        shown = self._shown.of_epoch(rng)
        if sampler := compose.replacing(self.defenses, "batches"):
            classes = self._shown.images.labels[shown]
            return [shown[part] for part in sampler.batches(classes, self.config.batch, rng)]
        count = len(shown)
        # Near-equal batches: no image is dropped and no batch is too small for batch norm.
        batches = max(1, min(math.ceil(count / self.config.batch), count // 2))
        return shown[torch.randperm(count, generator=rng)].tensor_split(batches)

    def _prepare(self, index: Tensor, rng: torch.Generator) -> Tensor:
        """Return the augmented images of this process's part of a batch.

        All processes draw for the whole batch, as one does alone.
        """
        part, shape = self.ranks.part(len(index)), self._shown.images.shape
        drawn = [changes_of(self.config, len(index), shape, rng)]
        drawn += [more for each in self.defenses if (more := each.changes(len(index), shape, rng))]
        changes = [change.rows(part) for change in drawn]
        batch = prepared(self._shown.images, index[part], changes, self._layout)
        # Only from pinned memory does a copy to a GPU leave the network running.
        return batch.pin_memory() if device_of(self.target.module).type == "cuda" else batch

    def _backward(
        self, index: Tensor, images: Tensor, progress: TrainingProgress, number: int
    ) -> BatchRecord:
        """Compute the gradients of one batch; return its loss terms and other measurements."""
        images = self._accelerator.to_device(images)
        labels = self._accelerator.to_device(self._shown.labels[index])
        # Losses see the whole batch, that of all processes; the plain one reads no images.
        count, own, everything = len(index), len(images), self.ranks.gathered
        whole = everything(images, count) if self.defenses else images
        further = self._companions(whole, progress, number)
        shown, part = images, self.ranks.part(count)
        if further:
            shown = torch.cat([images, *(more[part] for more in further.values())])
        with capture(self.target.module, tuple(dict.fromkeys(chain(*self._taps)))) as tapped:
            logits, *others = self._module(shown).tensor_split(1 + len(further))
        logits = everything(logits, count)
        inputs = as_seen(self.target.module, whole) if self.defenses else images
        # At least single precision: layers in mixed precision return half, which no loss expects.
        tapped = {name: everything(_wide(out[:own]), count) for name, out in tapped.items()}
        batch = Batch(whole, labels, logits, tapped, progress, inputs, *self._whose(index))
        if further:
            named = zip(further, others, strict=True)
            more = {name: everything(other, count) for name, other in named}
            batch = replace(batch, companions=more)
        terms = compose.losses(self.defenses, batch, self._taps, list(self._opponents.values()))
        loss = sum(
            (term.weight * term.value for term in terms.values()),
            start=torch.zeros((), device=logits.device),
        )
        self._accelerator.backward(loss)
        self.ranks.average(self.target.module.parameters())
        known = logits.detach()
        measured = {
            "logit_norm": known.norm(dim=1).mean(),
            "train_accuracy": correct(known, labels).mean(),
        }
        return BatchRecord(len(index), loss, terms, measured)

    def _companions(
        self, images: Tensor, progress: TrainingProgress, number: int
    ) -> dict[str, Tensor]:
        """Return the images that opponents show together with those of a batch."""
        further: dict[str, Tensor] = {}
        for opponent in self._opponents.values():
            further |= opponent.companions(images, progress, number)
        return further

    def _whose(self, index: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return which images a defense added, and whom each shows, if one adds images."""
        added, people = self._shown.added(index), self._shown.people
        if added is None or people is None:
            return None, None
        return self._accelerator.to_device(added), self._accelerator.to_device(people[index])


def _wide(output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32))


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how correct each prediction is: 1 or 0 for a class, else the share of attributes."""
    if labels.ndim == 1:
        return (logits.argmax(1) == labels).float()
    return ((logits > 0) == (labels > 0)).float().mean(1)


def changes_of(config: Training, count: int, image_shape: Shape, rng: torch.Generator) -> Changes:
    """Draw the augmentation of a batch of images."""
    return draw_changes(
        count,
        image_shape,
        rng,
        flip=config.flip,
        shift=config.shift,
        crop=config.crop,
        jitter=config.jitter,
        cutout=config.cutout,
    )


def optimizer_of(config: Training, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimiser that the settings name."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            trainable,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
        )
    rule = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return rule(trainable, lr=config.lr, weight_decay=config.weight_decay)


def lr_factor(config: Training, progress: TrainingProgress) -> float:
    """Return the factor on the learning rate in this epoch."""
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress.fraction))
    if config.schedule == "milestones":
        return config.decay ** sum(progress.fraction >= share for share in config.milestones)
    return 1.0


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def _has_room(device: torch.device) -> bool:
    """Return whether batches should be prepared by another thread.

    Where the network's threads fill all cores, one more makes them wait for each other. A dry run
    sees only what its own thread does.
    """
    if device.type == "cpu":
        return torch.get_num_threads() < cores()
    return device.type != "meta"
