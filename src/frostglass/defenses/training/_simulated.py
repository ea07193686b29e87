"""A simulated attacker: a decoder trained on public images while the network is trained."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape, Target
from frostglass.defenses.base import Batch, Defense, Term, TrainingProgress
from frostglass.models.base import noise_images, probe
from frostglass.models.cut import SQUARE
from frostglass.models.taps import live_taps
from frostglass.networks.decoder import (
    DecoderForm,
    DecoderGame,
    DecoderNorm,
    Residual,
    channels_first,
    standardised,
)
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seeded

Decode = Callable[[Tensor], Tensor]
Terms = Callable[[Batch, Decode], dict[str, Term]]


def released(target: Target, images: Tensor) -> Tensor:
    """Return the features of images at the cut, in evaluation mode; the target is unchanged."""
    with frozen(target.module), torch.no_grad(), capture(target.module, (target.cut,)) as seen:
        target.module(images)
    return seen[target.cut]


def released_shape(target: Target) -> tuple[int, ...]:
    """Return the shape of one feature at the cut."""
    images = noise_images(target.module, target.image_shape, 2)
    return tuple(released(target, images).shape[1:])


@parameters
class DecoderDefense(Defense):
    """Base of defenses that train the features at the cut against a simulated decoder."""

    reduction: Literal["mean", "crafter"] = "mean"
    decoder_form: DecoderForm = "mirrored"
    decoder_width: Annotated[int, Field(ge=1)] = 64
    decoder_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    decoder_steps: Annotated[int, Field(ge=1)] = 2
    head_start: Annotated[int, Field(ge=0)] = 50
    restart_every: Annotated[int, Field(ge=0)] = 0
    public_batch: Annotated[int, Field(ge=2)] = 64

    takes_attributes = True
    needs_cut = True

    @property
    def norm(self) -> DecoderNorm:
        """How the decoder's loss reduces the difference of images."""
        return "mean_square" if self.reduction == "mean" else "batch_norm"

    def brief(self) -> Self:
        return replace(self, decoder_steps=1, head_start=0)

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        # In the first half the network has met only a decoder that has learned little.
        return not self.couples_samples() or 2 * (progress.epoch + 1) > progress.epochs


class SimulatedDecoder:
    """An `Opponent` that trains a decoder on the features of public images.

    It sees the features that the target releases in evaluation mode, standardised over the batch,
    so that scaling them does not help the network. `terms(batch, decode)` returns the terms that
    the network is trained on; `decode` maps features to images by the fixed decoder. The decoder
    takes `decoder_steps` steps per turn and `head_start` more when it is new. Every
    `restart_every` epochs (0: never) it starts anew, because a network that fools one decoder need
    not withstand another. `game` are further options of `DecoderGame`.
    """

    def __init__(
        self,
        defense: DecoderDefense,
        target: Target,
        public: Images,
        terms: Terms,
        *,
        seed: int,
        **game: Any,
    ):
        if len(public) < 2:
            raise ConfigError(
                f"a simulated attacker needs at least 2 public images, got {len(public)}: "
                "use data with public people"
            )
        self._defense, self._target, self._public = defense, target, public
        self._terms, self._seed, self._options = terms, seed, game
        self._shape = released_shape(target)
        self.game = self._new_game(0)

    def turn(self, progress: TrainingProgress, number: int) -> None:
        defense, every = self._defense, self._defense.restart_every
        new = number == 0 and (progress.epoch == 0 or (every and progress.epoch % every == 0))
        if new and progress.epoch:
            self.game = self._new_game(progress.epoch)
        for step in range(defense.decoder_steps + (defense.head_start if new else 0)):
            rng = generator_for(self._seed, "simulated", progress.epoch, number, step)
            index = torch.randint(len(self._public), (defense.public_batch,), generator=rng)
            images = self._public.floats(index).to(device_of(self._target.module))
            features = standardised(released(self._target, images), self._target.image_shape)
            self.game.step(features, images)

    def losses(self, batch: Batch) -> dict[str, Term]:
        return self._terms(
            batch,
            lambda features: self.game.decoder(standardised(features, self._target.image_shape)),
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.game.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.game.restore(tensors)

    def _new_game(self, epoch: int) -> DecoderGame:
        with seeded(self._seed, "simulated", "init", epoch):
            return DecoderGame(
                self._shape,
                self._target.image_shape,
                width=self._defense.decoder_width,
                form=self._defense.decoder_form,
                lr=self._defense.decoder_lr,
                norm=self._defense.norm,
                device=device_of(self._target.module),
                **self._options,
            )


def build_reader(
    feature_shape: tuple[int, ...], outputs: int, *, width: int, image_shape: Shape = SQUARE
) -> nn.Sequential:
    """Build a network that maps features to numbers (N, outputs).

    For maps it is ResNet-18 from its second stage on, `width` channels wide there (128 in the
    original); for other features it has two linear layers.
    """
    if len(feature_shape) != 3:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(feature_shape), width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )
    stages, (channels, _, _) = channels_first(feature_shape, image_shape)
    for before, after in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
        stages += [Residual(before, after, stride=2), Residual(after, after)]
    return nn.Sequential(
        *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, outputs)
    )


def cut_problems(target: Target) -> list[str]:
    """List what keeps a defense from training the features at the cut."""
    if not target.cut:
        return ["needs to know where the network is cut: set target.cut"]
    if not live_taps(target.module, target.image_shape, (target.cut,)):
        return [
            f"no weight before {target.cut} is trained, so the released features cannot change: "
            "freeze fewer layers, or cut after a later one"
        ]
    if _overwritten(target):
        return [
            f"the layer after {target.cut} works in place and overwrites the released features: "
            "cut after that layer"
        ]
    return []


def _overwritten(target: Target) -> bool:
    outputs: list[tuple[Tensor, int]] = []
    layer = target.module.get_submodule(target.cut)
    handle = layer.register_forward_hook(
        lambda _, args, output: outputs.append((output, output._version))
    )
    try:
        probe(target.module, noise_images(target.module, target.image_shape, 2))
    finally:
        handle.remove()
    return any(output._version != version for output, version in outputs)
