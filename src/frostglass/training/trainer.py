"""One epoch of training, undefended or with any defenses."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from frostglass.core.errors import RunError
from frostglass.core.types import Split, Target
from frostglass.data._augment import augment
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Defense, TrainingProgress
from frostglass.models.base import as_seen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.training.build import check_training
from frostglass.training.images import TrainingImages
from frostglass.training.settings import Training, size_of, targets_for


class Accelerator(Protocol):
    """The part of Lightning Fabric that training uses."""

    def setup(self, module: nn.Module, optimizer: Any, /) -> tuple[nn.Module, Any]: ...
    def to_device(self, tensor: Tensor, /) -> Tensor: ...
    def backward(self, loss: Tensor, /) -> None: ...


class MetaAccelerator:
    """Train on the meta device, which Fabric does not support, for dry runs."""

    def setup(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return module, optimizer

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def accelerator_for(device: torch.device) -> Accelerator:
    """Return Fabric on one device; the meta device has its own accelerator."""
    if device.type == "meta":
        return MetaAccelerator()
    from lightning_fabric import Fabric  # takes seconds

    return Fabric(accelerator=device.type, devices=1 if device.index is None else [device.index])


class Trainer:
    """A training in progress: network, optimiser, defenses and their opponents on one device.

    `epoch` trains the network in place. `tensors` and `restore` make it resumable.
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
    ):
        self.config, self.target, self.defenses = config, target, defenses
        images, self._seed = split.train, seed
        self._shown = TrainingImages.of(split, targets_for(target, images), defenses, seed=seed)
        module = target.module.to(device)
        before = _trainable(module)
        for defense in defenses:
            defense.begin(target, images, seed=seed)
        trainable = _trainable(module)
        if trainable.keys() != before.keys():  # frozen layers may be what another defense needs
            check_training(config, target, defenses, size_of(config, split))
        rule = optimizer_of(config, list(trainable.values()))
        for defense in defenses:
            rule = defense.optimizer(module, rule, size_of(config, split))
        self._accelerator = accelerator_for(device)
        self._module, self._optimizer = self._accelerator.setup(module, rule)
        self._taps = [defense.taps(target) for defense in defenses]
        opponents = (
            each.opponent(target, split.public, perceptual, seed=seed) for each in defenses
        )
        self._opponents = [opponent for opponent in opponents if opponent]

    def epoch(self, progress: TrainingProgress) -> dict[str, float]:
        """Train on all images once; return mean loss terms, logit norm and training accuracy."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.lr * lr_factor(self.config, progress)
        self._module.train()
        for defense in self.defenses:
            defense.modes(self.target)
        rng = generator_for(self._seed, "order", progress.epoch)
        batches = self._batches(rng)
        total = sum(map(len, batches))
        means: dict[str, float] = {}
        with seeded(self._seed, "epoch", progress.epoch):  # dropout and noise inside the network
            for number, index in enumerate(batches):
                for opponent in self._opponents:
                    opponent.turn(progress, number)
                self._optimizer.zero_grad(set_to_none=True)
                row = self._backward(index, rng, progress, number) if len(index) else {}
                for name, value in row.items():
                    means[name] = means.get(name, 0.0) + len(index) / total * value
                self._optimizer.step()
        return means

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of network, optimiser and opponents for a checkpoint."""
        tensors = with_prefix("module", self.target.module.state_dict())
        tensors |= with_prefix("optimizer", optimizer_tensors(self._optimizer))
        for number, opponent in enumerate(self._opponents):
            tensors |= with_prefix(f"opponent{number}", opponent.tensors())
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what `tensors` returned."""
        for number, opponent in enumerate(self._opponents):
            opponent.restore(under_prefix(f"opponent{number}", tensors))
        self.target.module.load_state_dict(under_prefix("module", tensors))
        restore_optimizer(self._optimizer, under_prefix("optimizer", tensors))

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

    def _backward(
        self, index: Tensor, rng: torch.Generator, progress: TrainingProgress, number: int
    ) -> dict[str, float]:
        """Compute the gradients of one batch; return its loss terms and other measurements."""
        images = self._accelerator.to_device(
            augmented(self.config, self._shown.images.floats(index), rng)
        )
        labels = self._accelerator.to_device(self._shown.labels[index])
        with capture(self.target.module, tuple(dict.fromkeys(chain(*self._taps)))) as tapped:
            logits = self._module(images)
        inputs = as_seen(self.target.module, images)
        batch = Batch(images, labels, logits, tapped, progress, inputs, *self._whose(index))
        terms = compose.losses(self.defenses, batch, self._taps, self._opponents)
        loss = sum(
            (term.weight * term.value for term in terms.values()),
            start=torch.zeros((), device=logits.device),
        )
        if not loss.isfinite():
            values = ", ".join(f"{name} {term.value.item()}" for name, term in terms.items())
            raise RunError(
                f"{self.config.model}: the loss is not finite at epoch {progress.epoch}, batch "
                f"{number} ({values}): lower the learning rate or the defense's strength; the "
                "last finished epoch is kept and the same command resumes there"
            )
        self._accelerator.backward(loss)
        row = {name: term.weight * term.value.item() for name, term in terms.items()}
        row["logit_norm"] = logits.detach().norm(dim=1).mean().item()
        row["train_accuracy"] = correct(logits, labels).mean().item()
        return row

    def _whose(self, index: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return which images a defense added, and whom each shows, if one adds images."""
        added, people = self._shown.added(index), self._shown.people
        if added is None or people is None:
            return None, None
        return self._accelerator.to_device(added), self._accelerator.to_device(people[index])


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how correct each prediction is: 1 or 0 for a class, else the share of attributes."""
    if labels.ndim == 1:
        return (logits.argmax(1) == labels).float()
    return ((logits > 0) == (labels > 0)).float().mean(1)


def augmented(config: Training, images: Tensor, rng: torch.Generator) -> Tensor:
    """Return randomly augmented copies of images."""
    return augment(
        images,
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
