"""The contract of attacks on released features, and the ledger that counts their queries."""

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks.base import Attack, Surface, View
from frostglass.core.assets import Assets
from frostglass.core.parameters import parameters
from frostglass.core.types import Reconstructions
from frostglass.core.views import Ability, FeatureView
from frostglass.store.files import Checkpoint, Work

MIN_DEVIATION = 1e-10  # relative to the feature's own size; below it, a feature equals the mean


@dataclass(frozen=True)
class RawReconstructions:
    """Images (N, K, C, H, W) in [0, 1] for N attacked images, K reconstructions each.

    `latents` (N, K, ...) are what the images were generated from, if anything. `broken` (N, K)
    marks reconstructions whose search failed.
    """

    images: Tensor
    latents: Tensor | None = None
    broken: Tensor | None = None


class QueryLedger:
    """Checkpoints of an attack, together with the number of queries of each part of its work.

    Every checkpoint holds the counts of all parts so far. Counts are merged by part when a
    checkpoint is loaded, so an attack that resumes, or starts from a pretrained part, counts every
    query once.
    """

    def __init__(self, work: Work, view: FeatureView):
        self.progress = work.progress
        self._work = work
        self._view = view
        self._counts: dict[str, int] = {}
        self._open = [""]  # names of the open parts, the innermost last
        self._counted = view.queries

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count queries inside the block for this part; a nested part has its own count."""
        self._update()
        self._open.append(name)
        try:
            yield
        finally:
            self._update()
            self._open.pop()

    @property
    def queries(self) -> int:
        self._update()
        return sum(self._counts.values())

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        self._update()
        self._work.save(name, tensors, {**values, "queries": dict(self._counts)})

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        self._update()
        if checkpoint := self._work.load(name):
            self._merge(checkpoint[1]["queries"])
        return checkpoint

    def share(
        self, names: Sequence[str], make: Callable[[int], dict[str, Tensor]], note: str
    ) -> list[dict[str, Tensor]]:
        """Return the tensors of independent parts, some perhaps made by other processes."""

        def counted(number: int) -> Checkpoint:
            with self.part(names[number]):
                tensors = make(number)
            return tensors, {"queries": dict(self._counts)}

        parts = list(self._work.share(names, counted, lambda done: note))
        for _, values in parts:
            self._merge(values["queries"])
        return [tensors for tensors, _ in parts]

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, computed once and read back after a restart."""
        if checkpoint := self.load(name):
            return checkpoint[0]["value"].to(self._view.device)
        with self.part(name):
            value = compute()
        self.save(name, {"value": value})
        return value

    def _merge(self, counts: Mapping[str, int]) -> None:
        for part, count in counts.items():
            # A part may have continued after an older checkpoint was written.
            self._counts[part] = max(count, self._counts.get(part, 0))

    def _update(self) -> None:
        """Count the queries since the last update for the innermost open part."""
        part = self._open[-1]
        self._counts[part] = self._counts.get(part, 0) + self._view.queries - self._counted
        self._counted = self._view.queries


@parameters
class FeatureAttack(Attack):
    """Base of all attacks on features: `reconstruct` turns released features into images.

    `encoder_access` is what the attack uses of the encoder: "encode" (query it) or "encoder"
    (gradients through it). Access to the protection follows from `releases` and
    `protected_images`.

    Args:
        averaged: attack the mean of this many releases of the same images, which removes random
            noise; above 1 the attack needs access to the protection.
    """

    averaged: Annotated[int, Field(ge=1)] = 1

    surface: ClassVar[Surface] = "features"
    encoder_access: ClassVar[Ability] = "encode"

    @property
    def access(self) -> tuple[str, ...]:
        protection = self.releases > 1 or self.protected_images > 0
        return (self.encoder_access, *(("protection",) if protection else ()))

    @property
    def kept(self) -> int:
        return 1

    @property
    def checkpoint(self) -> str:
        """Prefix of checkpoint names: the name, with "_" for what file names cannot hold."""
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.name)

    @property
    def releases(self) -> int:
        return self.averaged

    @abstractmethod
    def reconstruct(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        """Reconstruct images from `features` (N, ...), one release or the mean of several.

        Finished parts are kept in `ledger`.
        """

    def run(
        self, view: View, assets: Assets, people: Tensor, *, seed: int, work: Work
    ) -> Reconstructions:
        """Attack all released features; `people` (I,) own equally many of them each, in order.

        The candidates of a person are the reconstructions of each of their images, image by image.
        `confidence` is the share of the released feature that a reconstruction explains,
        1 - ‖F - Enc(x̂)‖² / ‖F - mean F‖². It may be negative; it is 0 if all features are equal.
        """
        assert isinstance(view, FeatureView)  # checked by invert()
        began, ledger = time.perf_counter(), QueryLedger(work, view)
        features = view.released
        if self.averaged > 1:
            features = ledger.once("averaged", lambda: _mean_release(view, self.averaged))
        result = self.reconstruct(view, features, assets, seed=seed, ledger=ledger)
        queries, seconds = ledger.queries, time.perf_counter() - began
        rows = result.images.shape[:2]
        images, latents, confidence, broken = (
            tensor.detach().cpu().unflatten(0, (len(people), -1)).flatten(1, 2).contiguous()
            for tensor in (
                result.images,
                result.images.new_zeros(*rows, 0) if result.latents is None else result.latents,
                _explained(view, result.images),
                torch.zeros(rows, dtype=torch.bool) if result.broken is None else result.broken,
            )
        )
        return Reconstructions(
            images,
            people,
            latents,
            confidence,
            queries,
            seconds,
            broken=broken,
            partial=broken.all(1),
        )


def _mean_release(view: FeatureView, times: int) -> Tensor:
    """Return the mean of `times` releases; exactly the first one if all are equal."""
    first = view.released
    differences = (view.again(number) - first for number in range(1, times))
    return first + sum(differences, torch.zeros_like(first)) / times


def _explained(view: FeatureView, images: Tensor) -> Tensor:
    """Return the explained share of each released feature, (N, K); not counted as queries."""
    features = view.encode_uncounted(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    spread = (view.released - view.released.mean(0)).flatten(1).square().sum(1)
    distinct = spread > MIN_DEVIATION * view.released.flatten(1).square().sum(1)
    error = (features - view.released[:, None]).flatten(2).square().sum(2)
    return torch.where(distinct[:, None], 1 - error / spread[:, None].clamp(min=1e-30), 0.0)


def spread_evenly(count: int, chosen: int) -> Tensor:
    """Return `chosen` evenly spaced indices of `count` rows, first and last included."""
    return torch.linspace(0, count - 1, chosen).round().long()


def too_few_public(name: str, adapt: int, assets: Assets) -> list[str]:
    """Describe a shortage of public images for adaptation."""
    public = 0 if assets.public is None else len(assets.public)
    if adapt <= public:
        return []
    return [f"{name}.adapt must be at most {public} (the public images), got {adapt}. Lower it."]
