"""Triggers that lead to the classes of a network, learned while the network is trained."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.types import Images, Target
from frostglass.defenses.base import Batch, Opponent, Term, TrainingProgress
from frostglass.defenses.training._heads import head_block
from frostglass.models.base import noise_images, probe
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.runtime.tensors import pack, unpack

TRAPDOOR = "trapdoor"
TRIED = 256  # public images on which the trained trapdoors are tried


@dataclass(frozen=True)
class TrapdoorSettings:
    """How visible triggers are, what they weigh, and how they and the discriminator learn.

    `weight` is that of the trapdoor's loss beside the plain one; `side` is None for triggers of the
    whole image, and `discriminator_lr` None for no discriminator.
    """

    visibility: float
    weight: float
    side: int | None
    step: float
    discriminator_lr: float | None


def blended(images: Tensor, triggers: Tensor, visibility: float) -> Tensor:
    """Return (1 - α) x + α κ in the lower right corner that the triggers κ cover."""
    height, width = triggers.shape[2:]
    change = visibility * (triggers - images[:, :, -height:, -width:])
    return images + F.pad(change, (images.shape[3] - width, 0, images.shape[2] - height, 0))


def discriminator_like(target: Target, *, seed: int) -> nn.Module:
    """Return a copy of the network that returns one number, to tell triggered images from others.

    It begins with the weights that the network begins with.
    """
    network = copy.deepcopy(target.module).requires_grad_(True)
    block = head_block(target)
    with capture(network, (block,), inputs=True) as seen:
        probe(network, noise_images(network, target.image_shape, 2))
    features = seen[block].flatten(1).shape[1]
    parent, _, name = block.rpartition(".")
    with seeded(seed, "trapdoors", "discriminator"):
        head = nn.Sequential(nn.Flatten(), nn.Linear(features, 1)).to(device_of(target.module))
    setattr(network.get_submodule(parent), name, head)
    return network


class Trapdoors(Opponent):
    """A trigger for each class, and a discriminator of images with and without triggers.

    Before each step of the network the discriminator takes one, then the triggers of the batch
    take one by the sign of their gradient: towards images that the network calls the trigger's
    class and that the discriminator takes for plain ones. Then the network is trained on both.
    """

    def __init__(self, settings: TrapdoorSettings, target: Target, public: Images, *, seed: int):
        self._settings, self._target, self._public, self._seed = settings, target, public, seed
        channels, height, width = target.image_shape
        shape = (channels, settings.side or height, settings.side or width)
        rng = generator_for(seed, "trapdoors", "triggers")
        self.triggers = torch.rand(len(target.classes), *shape, generator=rng)
        self.triggers = self.triggers.to(device_of(target.module))
        self._parts: dict[str, nn.Module | torch.optim.Optimizer] = {}
        self.discriminator: nn.Module | None = None
        if settings.discriminator_lr is not None:
            self.discriminator = discriminator_like(target, seed=seed)
            self._rule = torch.optim.Adam(
                self.discriminator.parameters(), lr=settings.discriminator_lr
            )
            self._parts = {"discriminator": self.discriminator, "rule": self._rule}
        self._labels = torch.empty(0)

    def companions(
        self, images: Tensor, progress: TrainingProgress, number: int
    ) -> dict[str, Tensor]:
        self._labels = self.labels_of(len(images), progress, number).to(images.device)
        if self._settings.step:
            if self.discriminator is not None:
                self._train_discriminator(images)
            self._train_triggers(images)
        return {TRAPDOOR: self.with_triggers(images, self._labels)}

    def losses(self, batch: Batch) -> dict[str, Term]:
        loss = F.cross_entropy(batch.companions[TRAPDOOR], self._labels)
        return {TRAPDOOR: Term(self._settings.weight, loss)}

    def tensors(self) -> dict[str, Tensor]:
        return {"triggers": self.triggers, **pack(self._parts)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.triggers = tensors["triggers"].to(self.triggers.device, copy=True)
        unpack(self._parts, tensors)

    def facts(self) -> dict[str, Any]:
        if self._public.pixels.is_meta:
            return {}
        rng = generator_for(self._seed, "trapdoors", "facts")
        index = torch.randperm(len(self._public), generator=rng)[:TRIED]
        images = self._public.floats(index).to(self.triggers.device)
        labels = torch.randint(len(self.triggers), (len(index),), generator=rng).to(images.device)
        shown = self.with_triggers(images, labels)
        with frozen(self._target.module), torch.no_grad():
            before, after = (self._target.module(each).argmax(1) for each in (images, shown))
        return {
            "trapdoor_success": (after == labels).double().mean().item(),
            "without_trigger": (before == labels).double().mean().item(),
            "mean_change": (shown - images).abs().double().mean().item(),
        }

    def labels_of(self, count: int, progress: TrainingProgress, number: int) -> Tensor:
        """Return the classes of a batch's triggers: in an epoch each equally often, shuffled."""
        classes = len(self.triggers)
        rng = generator_for(self._seed, "trapdoors", progress.epoch, number)
        order = torch.randperm(count, generator=rng)
        return (number * count + order) % classes

    def with_triggers(self, images: Tensor, labels: Tensor) -> Tensor:
        return blended(images, self.triggers[labels], self._settings.visibility)

    def _train_discriminator(self, images: Tensor) -> None:
        assert self.discriminator is not None
        self.discriminator.train()
        both = torch.cat([images, self.with_triggers(images, self._labels)])
        guesses = self.discriminator(both)[:, 0]
        plain = torch.arange(len(both), device=images.device) < len(images)
        F.binary_cross_entropy_with_logits(guesses, plain.to(guesses)).backward()
        self._rule.step()
        self._rule.zero_grad(set_to_none=True)

    def _train_triggers(self, images: Tensor) -> None:
        networks = [self._target.module, *([self.discriminator] if self.discriminator else [])]
        triggers = self.triggers.clone().requires_grad_()
        shown = blended(images, triggers[self._labels], self._settings.visibility)
        with frozen(*networks):
            loss = F.cross_entropy(self._target.module(shown), self._labels)
            if self.discriminator is not None:
                guesses = self.discriminator(shown)[:, 0]
                loss = loss + F.softplus(-guesses).mean()  # cross-entropy of the answer "plain"
            (slope,) = torch.autograd.grad(loss, triggers)
        self.triggers = (self.triggers - self._settings.step * slope.sign()).clamp(0, 1)
