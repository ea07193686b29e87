"""A simulated attacker: a decoder trained on public images while the network is trained."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape, Target
from frostglass.defenses.base import Batch, Defense, Opponent, Term, TrainingProgress
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
from frostglass.runtime.hooks import output_of
from frostglass.runtime.seeding import generator_for, seeded

WINDOW, FALL = 20, 0.01  # steps whose mean loss is compared, and the least fall that counts
COMPARED = 256  # public images on which two decoders are compared
WORSE = 1.25  # error of the opponent relative to a fresh decoder's, above which it is warned of
log = logging.getLogger(__name__)

Decode = Callable[[Tensor], Tensor]
Terms = Callable[[Batch, Decode], dict[str, Term]]


def released(target: Target, images: Tensor) -> Tensor:
    """Return the features of images at the cut, in evaluation mode; the target is unchanged."""
    with frozen(target.module), torch.no_grad():
        return output_of(target.module, target.cut, images)


def released_shape(target: Target) -> tuple[int, ...]:
    """Return the shape of one feature at the cut."""
    images = noise_images(target.module, target.image_shape, 2)
    return tuple(released(target, images).shape[1:])


def settled(losses: Sequence[float]) -> bool:
    """Return whether the mean of the last losses is hardly below that of those before."""
    if len(losses) < 2 * WINDOW or len(losses) % WINDOW:
        return False
    before, last = sum(losses[-2 * WINDOW : -WINDOW]), sum(losses[-WINDOW:])
    return last > (1 - FALL) * before


@parameters
class DecoderDefense(Defense):
    """Base of defenses that train the features at the cut against a simulated decoder."""

    reduction: Literal["mean", "crafter"] = "mean"
    decoder_form: DecoderForm = "mirrored"
    decoder_width: Annotated[int, Field(ge=1)] = 64
    decoder_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    decoder_steps: Annotated[int, Field(ge=1)] = 2
    head_start: Annotated[int, Field(ge=0)] = 50
    epoch_turn: bool = False
    restart_every: Annotated[int, Field(ge=0)] = 0
    fresh_share: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    public_batch: Annotated[int, Field(ge=2)] = 64

    takes_attributes = True
    needs_cut = True

    @property
    def norm(self) -> DecoderNorm:
        """How the decoder's loss reduces the difference of images."""
        return "mean_square" if self.reduction == "mean" else "batch_norm"

    def brief(self) -> Self:
        # A fresh decoder takes as many steps again in the end; far fewer where decoders restart.
        again = 0.0 if self.restart_every else self.fresh_share
        return replace(self, decoder_steps=round(self.decoder_steps * (1 + again)), head_start=0)

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        # In the first half the network has met only a decoder that has learned little.
        return not self.couples_samples() or 2 * (progress.epoch + 1) > progress.epochs


class SimulatedDecoder(Opponent):
    """Trains a decoder on the features of public images.

    It sees the features that the target releases in evaluation mode, standardised over the batch,
    so that scaling them does not help the network. `terms(batch, decode)` returns the terms that
    the network is trained on; `decode` maps features to images by the fixed decoder. The decoder
    takes `decoder_steps` steps per turn and `head_start` more when it is new. With `epoch_turn` it
    also trains at the start of each epoch until its loss settles, at most on as many images as are
    public. Every `restart_every` epochs (0: never) it starts anew, because a network that fools one
    decoder need not withstand another. `game` are further options of `DecoderGame`.
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
        self.game = self._new_game("init", 0)
        self._taken = 0  # steps of this decoder

    def turn(self, progress: TrainingProgress, number: int) -> None:
        defense, every = self._defense, self._defense.restart_every
        new = number == 0 and (progress.epoch == 0 or (every and progress.epoch % every == 0))
        if new and progress.epoch:
            self.game, self._taken = self._new_game("init", progress.epoch), 0
        steps = defense.decoder_steps + (defense.head_start if new else 0)
        self._taken += self._train(self.game, steps, "simulated", progress.epoch, number)
        if defense.epoch_turn and number == 0:
            most = math.ceil(len(self._public) / defense.public_batch)
            path = ("epoch turn", progress.epoch)
            self._taken += self._train(self.game, most, *path, settling=True)

    def _train(
        self, game: DecoderGame, steps: int, *path: str | int, settling: bool = False
    ) -> int:
        """Take steps on public images and count them; `settling` ends them when the loss has."""
        losses: list[float] = []
        for step in range(steps):
            rng = generator_for(self._seed, *path, step)
            size = (self._defense.public_batch,)
            images = self._floats(torch.randint(len(self._public), size, generator=rng))
            losses.append(game.step(self._features(images), images))
            if settling and settled(losses):
                break
        return len(losses)

    def _floats(self, index: Tensor) -> Tensor:
        return self._public.floats(index).to(device_of(self._target.module))

    def _features(self, images: Tensor) -> Tensor:
        return standardised(released(self._target, images), self._target.image_shape)

    def facts(self) -> dict[str, Any]:
        """Compare the opponent with a fresh decoder of the trained network; warn if it is worse."""
        steps = round(self._defense.fresh_share * self._taken)
        if not steps or self._public.pixels.is_meta:
            return {}
        fresh = self._new_game("fresh")
        self._train(fresh, steps, "fresh")
        own, other = self._error(self.game), self._error(fresh)
        converged = own <= WORSE * other
        if not converged:
            log.warning(
                "%s: its decoder ends at an error of %.4f, where a fresh one reaches %.4f in %d "
                "steps: the game has not converged; try pretrain, epoch_turn, more decoder_steps "
                "or a larger decoder_lr",
                self._defense.name, own, other, steps,
            )  # fmt: skip
        return {"opponent_error": own, "fresh_error": other, "converged": converged}

    def _error(self, game: DecoderGame) -> float:
        """Return a decoder's mean squared error on some public images."""
        rng = generator_for(self._seed, "simulated", "error")
        index = torch.randperm(len(self._public), generator=rng)[:COMPARED]
        images = self._floats(index)
        with torch.no_grad():
            return (game.decoder(self._features(images)) - images).square().mean().item()

    def losses(self, batch: Batch) -> dict[str, Term]:
        return self._terms(
            batch,
            lambda features: self.game.decoder(standardised(features, self._target.image_shape)),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"taken": torch.tensor(self._taken), **self.game.tensors()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._taken = int(tensors["taken"])
        self.game.restore(tensors)

    def _new_game(self, *path: str | int) -> DecoderGame:
        with seeded(self._seed, "simulated", *path):
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
