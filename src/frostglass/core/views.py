"""Views: what an attacker may ask of a target, or of features that left a device."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.types import CAPABILITIES, Capability, Halves, Shape, Target, match_shape
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.device import device_of
from frostglass.runtime.hooks import (
    SeparatesUnits,
    answered,
    changes_answers,
    noise_drawn,
    straight_through,
)
from frostglass.runtime.tensors import weights_digest

Make = Callable[[int], Tensor]


def one_by_one(count: int, make: Make) -> list[Tensor]:
    """Return `make(0)`, `make(1)` and so on."""
    return [make(number) for number in range(count)]


@dataclass
class _Common:
    """What all views of one target have in common: the count of queries, and who makes parts."""

    queries: int = 0
    parts: Callable[[int, Make], list[Tensor]] = one_by_one


class ModelView:
    """Restricted access to a target; each image shown to it is counted in `queries`.

    `labels` grants hard labels, `scores` probabilities, `gradients` differentiable logits and
    features. `gradients` includes `scores`, and `scores` includes `labels`. Where the owner changes
    answers, labels and scores are the changed ones, except for who has gradients.
    """

    def __init__(
        self,
        target: Target,
        access: frozenset[Capability],
        samples: int = 1,
        common: _Common | None = None,
        *,
        straight: bool = False,
    ):
        unknown = sorted(set(access) - set(CAPABILITIES))
        if unknown or not access:
            raise ConfigError(
                f"access must name some of {', '.join(CAPABILITIES)}; "
                f"got {', '.join(unknown) or 'nothing'}"
            )
        self._target = target
        self.access = access
        self._samples = samples
        self._straight = straight
        self._common = common or _Common()
        averaged = f"×{samples}" if samples > 1 else ""
        self.key = f"{target.key}:{'+'.join(sorted(access))}{averaged}"

    def __repr__(self) -> str:
        return f"ModelView({', '.join(sorted(self.access))}; {self.queries:,} queries)"

    def averaged(self, samples: int) -> "ModelView":
        """Return this view through the mean logits (or most frequent label) of several passes.

        For targets that add noise. Both views share one counter of queries.
        """
        if not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"samples must be a whole number of at least 1, got {samples!r}")
        samples *= self._samples
        return ModelView(self._target, self.access, samples, self._common, straight=self._straight)

    def straightened(self) -> "ModelView":
        """Return this view with straight-through gradients at saturating layers; outputs stay."""
        return ModelView(self._target, self.access, self._samples, self._common, straight=True)

    def copied(self) -> "ModelView":
        """Return a view of a copy of the target, whose weights may be changed.

        Both views count queries together, and neither changes the other's network.
        """
        self._require("gradients")  # who has the weights can copy them
        target = replace(self._target, module=deepcopy(self.module).eval(), key="")
        return ModelView(target, self.access, self._samples, self._common, straight=self._straight)

    def by_unit(self) -> "tuple[ModelView, int]":
        """Return a view of a copy whose classes are the units of the head, and units per class.

        The units of class y are y · units, y · units + 1 and so on; an ordinary head has one for
        each class.
        """
        view = self.copied()
        heads = [part for part in view.module.modules() if isinstance(part, SeparatesUnits)]
        if not heads:
            return view, 1
        (head,) = heads
        head.separate, units = True, head.units_per_class
        names = tuple(f"{name}, unit {k}" for name in self._target.classes for k in range(units))
        view._target = replace(view._target, classes=names)
        return view, units

    def grants(self, access: str) -> bool:
        """Return whether this access is granted, by itself or as part of a stronger one."""
        included = CAPABILITIES[CAPABILITIES.index(access) :] if access in CAPABILITIES else ()
        return bool(self.access.intersection(included))

    @property
    def target_key(self) -> str:
        """The key of the target alone, or a hash of its weights if no store produced it."""
        if self._target.key:
            return self._target.key
        return f"weights {weights_digest(self.module).hex()[:24]}"

    @property
    def queries(self) -> int:
        return self._common.queries

    @queries.setter
    def queries(self, number: int) -> None:
        self._common.queries = number

    def in_parts(self, count: int, make: Make) -> list[Tensor]:
        """Return `make(0)`, `make(1)` and so on: work for all people that does not depend on order.

        While an attack chooses its starts, the processes of a run share it, and each part is made
        once. The count must follow from the attack's parameters alone.
        """
        return self._common.parts(count, make)

    @contextmanager
    def parts_from(self, parts: Callable[[int, Make], list[Tensor]]) -> Iterator[None]:
        """Get what `in_parts` returns from somewhere else, such as another process."""
        before, self._common.parts = self._common.parts, parts
        try:
            yield
        finally:
            self._common.parts = before

    @property
    def module(self) -> nn.Module:
        """The network, for freezing and counting; attacks must query it through the view."""
        return self._target.module

    @property
    def classes(self) -> int:
        return len(self._target.classes)

    @property
    def image_shape(self) -> Shape:
        return self._target.image_shape

    def labels(self, images: Tensor) -> Tensor:
        """Return the predicted classes, (N,)."""
        with torch.no_grad():
            labels = [scores.argmax(1) for scores in self._answers("labels", images)]
            return torch.stack(labels).mode(0).values

    def scores(self, images: Tensor) -> Tensor:
        """Return class probabilities, (N, K), without gradients."""
        with torch.no_grad():
            if self._changed:
                return torch.stack(list(self._answers("scores", images))).mean(0)
            return self._query("scores", images)[0].softmax(1)

    def logits(self, images: Tensor) -> Tensor:
        """Return logits, (N, K), differentiable with respect to the images."""
        return self._query("gradients", images)[0]

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and penultimate features, differentiable with respect to the images."""
        return self._query("gradients", images)

    @property
    def _changed(self) -> bool:
        """Whether the owner changes the answers; who has the weights computes them alone."""
        return not self.grants("gradients") and changes_answers(self.module)

    def _answers(self, needed: Capability, images: Tensor) -> Iterator[Tensor]:
        """Return what the target says of images, (N, K), in each pass; the largest is its label."""
        for draw, (logits, _) in enumerate(self._passes(needed, images)):
            yield answered(self.module, logits, draw) if self._changed else logits

    def _query(self, needed: Capability, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and features, averaged over the passes."""
        passes = self._passes(needed, images)
        logits, features = next(passes)
        for more_logits, more_features in passes:
            logits, features = logits + more_logits, features + more_features
        if self._samples == 1:
            return logits, features
        return logits / self._samples, features / self._samples

    def _require(self, needed: Capability) -> None:
        if not self.grants(needed):
            raise AccessError(
                f"this view grants {', '.join(sorted(self.access))}, not {needed}: ask for it with "
                f"target.view([{needed!r}])"
            )

    def _passes(self, needed: Capability, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        self._require(needed)
        for draw in range(self._samples):
            self._common.queries += len(images)
            with (
                noise_drawn(self.module, draw),
                straight_through(self.module) if self._straight else nullcontext(),
            ):
                outputs = self._target.outputs(images)
            yield outputs


Ability = Literal["encode", "encoder", "protection"]
ABILITIES: tuple[Ability, ...] = ("encode", "encoder", "protection")
CHUNK = 64  # images encoded together; a multiple of BATCH_MULTIPLE


class FeatureView:
    """The features that left a device, `released` (N, ...), and restricted access to the device.

    Each image shown is counted in `queries`. `encode` grants plain features of own images,
    `encoder` the network itself, differentiable, `protection` the features that the device would
    release for own images, and further releases of the same victims. `encoder` includes `encode`.
    `protect(images, number)` is the device's protection; each number has its own random draws.
    `again(number)` releases the victims once more. Images are converted to `image_shape`.
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
            raise ConfigError(
                f"expected released features of shape {halves.feature_shape}, the encoder's, got "
                f"{tuple(released.shape[1:])}: cut the same model at the same layer"
            )
        if not len(released):
            raise ConfigError("no released features to attack, got 0: process at least one image")
        self.queries = 0
        self._halves = halves
        self._protect = protect
        self._again = again
        self.released = self._checked(released, len(released))

    def __repr__(self) -> str:
        shape, access = "×".join(map(str, self.feature_shape)), ", ".join(sorted(self.access))
        return f"FeatureView({len(self.released)} features of {shape}; {access or 'no access'})"

    @property
    def module(self) -> nn.Module:
        """The encoder, for freezing alone; attacks must use it through the view."""
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

    def grants(self, access: str) -> bool:
        """Return whether this access is granted, by itself or as part of a stronger one."""
        return access in self.access or (access == "encode" and "encoder" in self.access)

    def fit(self, images: Tensor) -> Tensor:
        """Convert images to the encoder's size and colours, differentiably."""
        if images.ndim != 4 or not len(images):
            raise ConfigError(
                f"expected images (N, C, H, W), at least one, got the shape {tuple(images.shape)}"
            )
        return match_shape(images.to(self.device), self.image_shape)

    def encode(self, images: Tensor) -> Tensor:
        """Return plain features of images, without gradients."""
        self._require("encode")
        self.queries += len(images)
        return self.encode_uncounted(images)

    def features(self, images: Tensor) -> Tensor:
        """Return plain features of images, differentiable with respect to the images."""
        self._require("encoder")
        self.queries += len(images)
        return self.module(self.fit(images))

    def protected(self, images: Tensor, number: int = 0) -> Tensor:
        """Return what the device releases for images, without gradients."""
        self._require("protection")
        self.queries += len(images)
        if self._protect is None:
            return self.encode_uncounted(images)
        return self._checked(self._protect(self.fit(images), number), len(images))

    def again(self, number: int) -> Tensor:
        """Release the victims' features once more; number 0 is `released` and costs no query."""
        self._require("protection")
        if number == 0:
            return self.released
        self.queries += len(self.released)
        if self._again is None:
            return self.released
        return self._checked(self._again(number), len(self.released))

    def encode_uncounted(self, images: Tensor) -> Tensor:
        """Return plain features for the records of a run; not for attacks: nothing is counted."""
        return batch_invariant(lambda part: self.module(self.fit(part)), images)

    def _checked(self, features: Tensor, count: int) -> Tensor:
        """Return released features; a broken protection must not pass for one that protects."""
        expected = (count, *self.feature_shape)
        if features.shape != expected:
            raise RunError(
                f"the device released features of shape {tuple(features.shape)} for {count} "
                f"images, expected {expected}: check its protection"
            )
        if not features.isfinite().all():
            raise RunError(
                "the device released features that are not finite: check its protection and the "
                "network"
            )
        return features.detach().to(self.device)

    def _require(self, access: Ability) -> None:
        if not self.grants(access):
            granted = ", ".join(sorted(self.access)) or "the released features alone"
            raise AccessError(
                f"this view grants {granted}, not {access}: name it in the view's access"
            )


def batch_invariant(network: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a network to rows in padded chunks, so that a row's result depends on no other row."""
    with torch.no_grad():
        return torch.cat(
            [network(part[padded_rows(len(part))])[: len(part)] for part in rows.split(CHUNK)]
        )
