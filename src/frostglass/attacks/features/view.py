"""Split inference as somebody on the wire sees it."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from frostglass.attacks.dice import filled
from frostglass.errors import AccessError, ConfigError, RunError
from frostglass.models.cut import Halves
from frostglass.runtime import device_of
from frostglass.types import Shape, fitted

Ability = Literal["encode", "encoder", "protection"]
ABILITIES: tuple[Ability, ...] = ("encode", "encoder", "protection")
CHUNK = 64  # pictures that are encoded together; a multiple of the lanes, so that a picture's feature is the same in any company


class FeatureView:
    """The features that left the device, `released` (N, ...), and what may be asked of it besides; each picture shown counts in `queries`.

    `encode` grants the plain features of pictures of one's own, `encoder` the network itself, through which gradients pass, `protection`
    the features that the device would release for pictures of one's own, and to see those of the same victims released again. `encoder`
    includes `encode`. `protect(images, number)` is the device's protection; calls with different numbers draw their random numbers apart.
    `again(number)` releases the victims once more. Pictures of another size, or grey ones for a device that takes colour, are brought to
    `image_shape`.
    """

    def __init__(
        self,
        halves: Halves,
        released: Tensor,
        access: Iterable[Ability],
        *,
        protect: Callable[[Tensor, int], Tensor] | None = None,
        again: Callable[[int], Tensor] | None = None,
    ):
        self.access = frozenset(access)
        unknown = sorted(self.access - set(ABILITIES))
        if unknown:
            raise ConfigError(f"access must name some of {', '.join(ABILITIES)}; got {', '.join(unknown)}")
        if released.shape[1:] != halves.feature_shape:
            shapes = tuple(released.shape[1:]), halves.feature_shape
            raise ConfigError(
                "released features have the shape {}, and this encoder makes {}: cut the same model at the same layer".format(*shapes)
            )
        if not len(released):
            raise ConfigError("no feature was released: at least one picture must be processed to attack anything")
        self.queries = 0
        self._halves = halves
        self._protect = protect
        self._again = again
        self.released = self._sound(released, len(released))

    @property
    def module(self) -> nn.Module:
        """The encoder, for freezing alone; attacks ask it through this view."""
        return self._halves.encoder

    @property
    def image_shape(self) -> Shape:
        return self._halves.image_shape

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return self._halves.feature_shape

    @property
    def device(self) -> torch.device:
        return device_of(self.module)

    def fit(self, images: Tensor) -> Tensor:
        """Pictures as this encoder takes them, differentiably."""
        if images.ndim != 4 or not len(images):
            raise ConfigError(f"expected pictures (N, C, H, W), at least one, got the shape {tuple(images.shape)}")
        return fitted(images.to(self.device), self.image_shape)

    def encode(self, images: Tensor) -> Tensor:
        """Plain features of pictures, without gradients."""
        self._grant("encode", "encoder")
        self.queries += len(images)
        return self.looked_up(images)

    def features(self, images: Tensor) -> Tensor:
        """Plain features of pictures, differentiable with respect to the pictures."""
        self._grant("encoder")
        self.queries += len(images)
        return self.module(self.fit(images))

    def protected(self, images: Tensor, number: int = 0) -> Tensor:
        """What the device releases for pictures, without gradients; the plain features where it protects none."""
        self._grant("protection")
        self.queries += len(images)
        return self.looked_up(images) if self._protect is None else self._sound(self._protect(self.fit(images), number), len(images))

    def again(self, number: int) -> Tensor:
        """The victims' features, released once more; number 0 is what was `released` anyway, and asks for nothing."""
        self._grant("protection")
        if number == 0:
            return self.released
        self.queries += len(self.released)
        return self.released if self._again is None else self._sound(self._again(number), len(self.released))

    def looked_up(self, images: Tensor) -> Tensor:
        """Plain features for the records of a run: neither granted nor counted, so nothing for an attack to learn from."""
        return in_company(lambda part: self.module(self.fit(part)), images)

    def _sound(self, features: Tensor, count: int) -> Tensor:
        """What a device let out, if it can be that: a protection that breaks must not pass for one that protects."""
        if features.shape != (count, *self.feature_shape):
            raise RunError(f"the device released {tuple(features.shape)} for {count} pictures, expected {(count, *self.feature_shape)}")
        if not features.isfinite().all():
            raise RunError("the device released features that are not finite: look at its protection, or at the network itself")
        return features.detach().to(self.device)

    def _grant(self, *any_of: Ability) -> None:
        if not self.access & set(any_of):
            granted = ", ".join(sorted(self.access)) or "the released features alone"
            raise AccessError(f"this view grants {granted} and not {any_of[0]}: name it in the view's access")


def in_company(network: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What a network makes of rows, a chunk at a time and without gradients; a row's result is the same whatever the others are."""
    with torch.no_grad():
        return torch.cat([network(part[filled(len(part))])[: len(part)] for part in rows.split(CHUNK)])
