"""The nouns every part of the package shares: images, splits, targets, views, reconstructions."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.types import CAPABILITIES, Capability, Halves, Shape, Target, match_shape
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.device import device_of
from frostglass.runtime.hooks import noise_drawn, straight_through
from frostglass.runtime.tensors import weights_digest



class ModelView:
    """A target behind a counter: each use must be granted, each picture shown is counted in `queries`.

    `labels` grants hard labels, `scores` probabilities, `gradients` everything a white-box attacker reads: differentiable logits and
    features. `gradients` includes `scores`, and `scores` includes `labels`.
    """

    def __init__(
        self,
        target: Target,
        access: frozenset[Capability],
        samples: int = 1,
        counter: "list[int] | None" = None,
        *,
        straight: bool = False,
    ):
        unknown = sorted(set(access) - set(CAPABILITIES))
        if unknown or not access:
            raise ConfigError(
                f"access must name some of {', '.join(CAPABILITIES)}; got {', '.join(unknown) or 'nothing'}"
            )
        self._target = target
        self.access = access
        self._samples = samples
        self._straight = straight
        self._counter = [0] if counter is None else counter
        self.key = f"{target.key}:{'+'.join(sorted(access))}" + (
            f"×{samples}" if samples > 1 else ""
        )

    def averaged(self, samples: int) -> "ModelView":
        """This view through the mean logits (or the commonest label) of several passes, for targets that add noise; its queries count here too."""
        if not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"samples must be a whole number of at least 1, got {samples!r}")
        return ModelView(
            self._target,
            self.access,
            self._samples * samples,
            self._counter,
            straight=self._straight,
        )

    def straightened(self) -> "ModelView":
        """This view with gradients that pass saturating layers as if they were not there; what comes out stays the same."""
        return ModelView(self._target, self.access, self._samples, self._counter, straight=True)

    @property
    def target_key(self) -> str:
        """What names the target alone, whatever is granted of it: its key, or for one that no store made a hash of its weights."""
        if self._target.key:
            return self._target.key
        return f"weights {weights_digest(self.module).hex()[:24]}"

    @property
    def queries(self) -> int:
        return self._counter[0]

    @queries.setter
    def queries(self, number: int) -> None:
        self._counter[0] = number

    @property
    def module(self) -> nn.Module:
        """The network, for freezing and counting; attacks query it through this view alone."""
        return self._target.module

    @property
    def classes(self) -> int:
        return len(self._target.classes)

    @property
    def image_shape(self) -> Shape:
        return self._target.image_shape

    def labels(self, images: Tensor) -> Tensor:
        """The class the target says, (N,)."""
        with torch.no_grad():
            return (
                torch.stack([logits.argmax(1) for logits, _ in self._passes("labels", images)])
                .mode(0)
                .values
            )

    def scores(self, images: Tensor) -> Tensor:
        """Class probabilities, (N, K), without gradients."""
        with torch.no_grad():
            return self._query("scores", images)[0].softmax(1)

    def logits(self, images: Tensor) -> Tensor:
        """Logits, (N, K), differentiable with respect to the images."""
        return self._query("gradients", images)[0]

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and penultimate features, differentiable with respect to the images."""
        return self._query("gradients", images)

    def _query(self, needed: Capability, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features, averaged over the passes."""
        passes = self._passes(needed, images)
        logits, features = next(passes)
        for more_logits, more_features in passes:
            logits, features = logits + more_logits, features + more_features
        return (
            (logits, features)
            if self._samples == 1
            else (logits / self._samples, features / self._samples)
        )

    def _passes(self, needed: Capability, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if not any(
            CAPABILITIES.index(granted) >= CAPABILITIES.index(needed) for granted in self.access
        ):
            raise AccessError(
                f"this view grants {', '.join(sorted(self.access))} and not {needed}: ask for it with target.view([{needed!r}])"
            )
        for draw in range(self._samples):
            self._counter[0] += len(images)
            with (
                noise_drawn(self.module, draw),
                straight_through(self.module) if self._straight else nullcontext(),
            ):
                made = self._target.outputs(images)
            yield made


Ability = Literal["encode", "encoder", "protection"]
ABILITIES: tuple[Ability, ...] = ("encode", "encoder", "protection")
CHUNK = 64  # pictures that are encoded together; a multiple of the batch_multiple, so that a picture's feature is the same in any company


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
            raise ConfigError(
                f"access must name some of {', '.join(ABILITIES)}; got {', '.join(unknown)}"
            )
        if released.shape[1:] != halves.feature_shape:
            shapes = tuple(released.shape[1:]), halves.feature_shape
            raise ConfigError(
                "released features have the shape {}, and this encoder makes {}: cut the same model at the same layer".format(
                    *shapes
                )
            )
        if not len(released):
            raise ConfigError(
                "no feature was released: at least one picture must be processed to attack anything"
            )
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
            raise ConfigError(
                f"expected pictures (N, C, H, W), at least one, got the shape {tuple(images.shape)}"
            )
        return match_shape(images.to(self.device), self.image_shape)

    def encode(self, images: Tensor) -> Tensor:
        """Plain features of pictures, without gradients."""
        self._grant("encode", "encoder")
        self.queries += len(images)
        return self.encode_uncounted(images)

    def features(self, images: Tensor) -> Tensor:
        """Plain features of pictures, differentiable with respect to the pictures."""
        self._grant("encoder")
        self.queries += len(images)
        return self.module(self.fit(images))

    def protected(self, images: Tensor, number: int = 0) -> Tensor:
        """What the device releases for pictures, without gradients; the plain features where it protects none."""
        self._grant("protection")
        self.queries += len(images)
        return (
            self.encode_uncounted(images)
            if self._protect is None
            else self._sound(self._protect(self.fit(images), number), len(images))
        )

    def again(self, number: int) -> Tensor:
        """The victims' features, released once more; number 0 is what was `released` anyway, and asks for nothing."""
        self._grant("protection")
        if number == 0:
            return self.released
        self.queries += len(self.released)
        return (
            self.released
            if self._again is None
            else self._sound(self._again(number), len(self.released))
        )

    def encode_uncounted(self, images: Tensor) -> Tensor:
        """Plain features for the records of a run: neither granted nor counted, so nothing for an attack to learn from."""
        return batch_invariant(lambda part: self.module(self.fit(part)), images)

    def _sound(self, features: Tensor, count: int) -> Tensor:
        """What a device let out, if it can be that: a protection that breaks must not pass for one that protects."""
        if features.shape != (count, *self.feature_shape):
            raise RunError(
                f"the device released {tuple(features.shape)} for {count} pictures, expected {(count, *self.feature_shape)}"
            )
        if not features.isfinite().all():
            raise RunError(
                "the device released features that are not finite: look at its protection, or at the network itself"
            )
        return features.detach().to(self.device)

    def _grant(self, *any_of: Ability) -> None:
        if not self.access & set(any_of):
            granted = ", ".join(sorted(self.access)) or "the released features alone"
            raise AccessError(
                f"this view grants {granted} and not {any_of[0]}: name it in the view's access"
            )


def batch_invariant(network: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What a network makes of rows, a chunk at a time and without gradients; a row's result is the same whatever the others are."""
    with torch.no_grad():
        return torch.cat(
            [network(part[padded_rows(len(part))])[: len(part)] for part in rows.split(CHUNK)]
        )
