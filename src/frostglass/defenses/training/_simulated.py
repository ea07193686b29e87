"""The attacker that a protector imagines: a decoder that learns on public pictures while the network learns on private ones."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Images, Shape, Target
from frostglass.defenses.base import Batch, Term, TrainingProgress
from frostglass.models.base import noise_images, probe
from frostglass.models.cut import SQUARE
from frostglass.models.taps import live_taps
from frostglass.networks.decoder import DecoderGame, Residual, channels_first, standardised
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seeded

NewGame = Callable[[tuple[int, ...]], DecoderGame]
Rebuild = Callable[[Tensor], Tensor]


def released(target: Target, images: Tensor) -> Tensor:
    """The features that a target lets out for pictures in evaluation mode; nothing of it is changed."""
    with frozen(target.module), torch.no_grad(), capture(target.module, (target.cut,)) as seen:
        target.module(images)
    return seen[target.cut]


class SimulatedDecoder:
    """An `Opponent` that trains a decoder on the features of public pictures, as a target releases them in evaluation mode.

    `new_game` makes a decoder for features of a shape, under a seed. `felt(batch, rebuild)` gives the terms that the network feels;
    `rebuild` makes pictures of features by the decoder, which stands still. The decoder sees features standardised over the batch, so that
    scaling them wins nothing. It takes `steps` steps at each turn, `head_start` more when it is new, and every `restart_every` epochs (0:
    never) it begins anew: a network that learns to fool one decoder need not withstand another.
    """

    def __init__(
        self,
        target: Target,
        public: Images,
        new_game: NewGame,
        felt: Callable[[Batch, Rebuild], dict[str, Term]],
        *,
        steps: int,
        batch: int,
        head_start: int,
        restart_every: int,
        seed: int,
    ):
        if len(public) < 2:
            raise ConfigError(
                f"a simulated attacker learns on public pictures, and there are {len(public)}: use data with public people"
            )
        self._target, self._public, self._new_game, self._felt = target, public, new_game, felt
        self._steps, self._batch, self._head_start, self._restart_every, self._seed = (
            steps,
            batch,
            head_start,
            restart_every,
            seed,
        )
        self._shape = tuple(
            released(target, noise_images(target.module, target.image_shape, 2)).shape[1:]
        )
        self.game = self._fresh(0)

    def turn(self, progress: TrainingProgress, number: int) -> None:
        due = number == 0 and (
            progress.epoch == 0
            or (self._restart_every > 0 and progress.epoch % self._restart_every == 0)
        )
        if due and progress.epoch:
            self.game = self._fresh(progress.epoch)
        for step in range(self._steps + (self._head_start if due else 0)):
            rng = generator_for(self._seed, "simulated", progress.epoch, number, step)
            images = self._public.floats(
                torch.randint(len(self._public), (self._batch,), generator=rng)
            ).to(device_of(self._target.module))
            self.game.step(
                standardised(released(self._target, images), self._target.image_shape), images
            )

    def losses(self, batch: Batch) -> dict[str, Term]:
        return self._felt(
            batch,
            lambda features: self.game.decoder(standardised(features, self._target.image_shape)),
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.game.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.game.restore(tensors)

    def _fresh(self, epoch: int) -> DecoderGame:
        with seeded(self._seed, "simulated", "init", epoch):
            return self._new_game(self._shape)


def build_reader(
    feature_shape: tuple[int, ...], outputs: int, *, width: int, image_shape: Shape = SQUARE
) -> nn.Sequential:
    """A network that reads numbers (N, outputs) off features of pictures of a shape.

    For maps it is ResNet-18 from its second stage on, `width` channels wide there (128 in the original); else two linear layers.
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
    """What keeps a defense from training the features that a target releases."""
    if not target.cut:
        return ["needs to know where the network is cut: set target.cut"]
    if not live_taps(target.module, target.image_shape, (target.cut,)):
        return [
            f"no weight before {target.cut} learns, so what is released there cannot change: freeze fewer layers, or cut behind a later one"
        ]
    if _overwritten(target):
        return [
            f"the layer behind {target.cut} works in place, so what is released cannot be read any more: cut behind that layer"
        ]
    return []


def _overwritten(target: Target) -> bool:
    noted: list[tuple[Tensor, int]] = []
    layer = target.module.get_submodule(target.cut)
    handle = layer.register_forward_hook(
        lambda _, args, output: noted.append((output, output._version))
    )
    try:
        probe(target.module, noise_images(target.module, target.image_shape, 2))
    finally:
        handle.remove()
    return any(output._version != version for output, version in noted)
