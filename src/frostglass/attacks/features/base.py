"""An attack on features rebuilds the pictures they were made of, one victim picture at a time."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.registry import Registry
from frostglass.core.types import Reconstructions
from frostglass.core.views import Ability, FeatureView
from frostglass.runtime.freezing import frozen
from frostglass.store.files import Work

feature_attacks = Registry("feature attack", "frostglass.attacks.features")
ALIKE = 1e-10  # of its own size: a feature that differs from the mean by less is the same as everybody's


@dataclass(frozen=True)
class Rebuilt:
    """Pictures (N, K, C, H, W) in [0, 1] for N victim pictures, K tries each.

    `latents` (N, K, ...) is what they were made of, None if of nothing else; `broken` (N, K) marks those whose search broke off.
    """

    images: Tensor
    latents: Tensor | None = None
    broken: Tensor | None = None


@dataclass(frozen=True)
class Effort:
    """What an attack does besides its lesson: pictures it has `encoded`, pictures it follows gradients through, once for each step, by way of the prior
    (`through_prior`) or of pixels alone (`pixels`), and `steps` in which a network learns."""

    encoded: int = 0
    through_prior: int = 0
    pixels: int = 0
    steps: int = 0


class Ledger:
    """The checkpoints of an attack, and how much each part of its work has asked.

    Every checkpoint holds the counts of all parts up to then, and what is read back is told apart by the names of the parts: an attack that
    was stopped, or is handed a part that was done elsewhere, counts everything once.
    """

    def __init__(self, work: Work, view: FeatureView):
        self.progress = work.progress
        self._work = work
        self._view = view
        self._asked: dict[str, int] = {}
        self._open = [""]  # parts that are under way, the innermost last
        self._seen = view.queries

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is asked inside the block is put down to this part; a part inside another has its own count."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    @property
    def queries(self) -> int:
        self._settle()
        return sum(self._asked.values())

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        self._settle()
        self._work.save(name, tensors, {**values, "asked": dict(self._asked)})

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        self._settle()
        if saved := self._work.load(name):
            for part, asked in saved[1][
                "asked"
            ].items():  # a part that was under way at one checkpoint has gone further at another
                self._asked[part] = max(asked, self._asked.get(part, 0))
        return saved

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, made once and read back after a restart."""
        if saved := self.load(name):
            return saved[0]["made"].to(self._view.device)
        with self.part(name):
            made = make()
        self.save(name, {"made": made})
        return made

    def _settle(self) -> None:
        """Put what has been asked since the last time down to the part that is under way."""
        part = self._open[-1]
        self._asked[part] = self._asked.get(part, 0) + self._view.queries - self._seen
        self._seen = self._view.queries


@parameters
class FeatureAttack:
    """Base of all attacks on features: parameters are fields; `rebuild` turns what a view shows into pictures.

    `access` is what it must be granted, `needs` what it must know of the world. `tries` is how many pictures it makes of each victim; all
    count. `variants` names sets of parameters with the reason for each.

    Args:
        averaged: the victims' features are the mean of so many releases, which takes random noise out of them; above 1 the attack must see
            them released again.
    """

    averaged: Annotated[int, Field(ge=1)] = 1

    name: ClassVar[str]
    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {}
    embeds: ClassVar[bool] = (
        False  # whether its latents are embeddings of people, by which it is judged
    )

    @property
    def tries(self) -> int:
        return 1

    @property
    def access(self) -> tuple[Ability, ...]:
        raise TypeError(f"{type(self).__name__} must define access")

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset()

    @property
    def granted(self) -> tuple[Ability, ...]:
        """All that the attack must be granted."""
        return tuple(sorted({*self.access, *(["protection"] if self.averaged > 1 else [])}))  # type: ignore[arg-type]

    @property
    def lesson(self) -> "FeatureAttack | None":
        """What of this attack learns from plain features alone, as an attack of its own: the same for all protections of an encoder. None if nothing does."""
        return None

    @property
    def learned(self) -> tuple[str, ...]:
        """The checkpoints in which a lesson is kept; an attack that finds them has had it."""
        return ()

    @property
    def protects(self) -> int:
        """How many public pictures the device is asked to protect, to learn from what it makes of them."""
        return 0

    def effort(self, victims: int) -> Effort:
        """How much there is to do for so many victim pictures, for whoever wants to know how long it will take."""
        raise TypeError(f"{type(self).__name__} must define effort()")

    def problems(self, view: FeatureView, assets: Assets) -> list[str]:
        """Everything that keeps this attack from running with this view and assets; nothing is computed."""
        return assets.missing(self.needs, self.name)

    def rebuild(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: Ledger
    ) -> Rebuilt:
        """Pictures for `features` (N, ...), those that were released or a mean of several releases; what is finished is kept in `ledger`."""
        raise TypeError(f"{type(self).__name__} must define rebuild()")


def intercept(
    attack: FeatureAttack,
    view: FeatureView,
    assets: Assets,
    labels: Tensor,
    *,
    seed: int = 0,
    work: Work | None = None,
) -> Reconstructions:
    """Run an attack on all released features; `labels` (I,) say whose they are, person by person, as many pictures of each.

    The candidates of a person are the tries of each of their pictures, picture by picture. `confidence` is how much of the released feature
    a rebuilt picture explains: 1 - ‖F - Enc(x̂)‖² / ‖F - mean F‖², which may be negative; 0 where all features are the same, and there is
    nothing to explain. Networks are left exactly as they were, also after an exception.
    """
    problems = [*attack.problems(view, assets), *_problems(attack, view, labels)]
    if problems:
        raise ConfigError(problems)
    began, ledger = time.perf_counter(), Ledger(work or Work.scratch(), view)
    prior = assets.prior.modules if assets.prior else []
    helpers = [target.module for target in (assets.embedder, assets.perceptual) if target]
    amortizer = [assets.amortizer] if assets.amortizer is not None else []
    with frozen(view.module, *prior, *helpers, *amortizer):
        features = view.released
        if attack.averaged > 1:
            features = ledger.once("averaged", lambda: _averaged(view, attack.averaged))
        made = attack.rebuild(view, features, assets, seed=seed, ledger=ledger)
        queries, seconds = ledger.queries, time.perf_counter() - began
        if not made.images.isfinite().all():
            raise RunError(f"{attack.name} put out pictures that are not finite: lower its lr")
        explained = _explained(view, made.images)
    return _packed(attack, made, explained, labels, queries, seconds)


def _packed(
    attack: FeatureAttack,
    made: Rebuilt,
    explained: Tensor,
    labels: Tensor,
    queries: int,
    seconds: float,
) -> Reconstructions:
    """The pictures of all victims, person by person."""
    rows = made.images.shape[:2]
    broken = torch.zeros(rows, dtype=torch.bool) if made.broken is None else made.broken
    if broken.all():
        raise RunError(
            f"{attack.name}: no search came to its end, because the loss was not finite: lower its lr"
        )
    latents = made.images.new_zeros(*rows, 0) if made.latents is None else made.latents
    images, latents, confidence, broken = (
        tensor.detach().cpu().unflatten(0, (len(labels), -1)).flatten(1, 2).contiguous()
        for tensor in (made.images, latents, explained, broken)
    )
    return Reconstructions(
        images=images, labels=labels, latents=latents, confidence=confidence, queries=queries, seconds=seconds,
        broken=broken, partial=broken.all(1),
    )  # fmt: skip


def _problems(attack: FeatureAttack, view: FeatureView, labels: Tensor) -> list[str]:
    found = []
    if not len(labels) or len(view.released) % len(labels):
        found.append(
            f"{len(view.released)} released features for {len(labels)} people: as many pictures of each person are needed"
        )
    missing = [
        ability
        for ability in attack.granted
        if ability not in view.access and not (ability == "encode" and "encoder" in view.access)
    ]
    if missing:
        found.append(
            f"{attack.name} must be granted {', '.join(missing)}: this view grants {', '.join(sorted(view.access)) or 'nothing'}"
        )
    return found


def _averaged(view: FeatureView, times: int) -> Tensor:
    """The mean of so many releases; exactly the first where all are the same."""
    return (
        view.released
        + sum(
            (view.again(number) - view.released for number in range(1, times)),
            torch.zeros_like(view.released),
        )
        / times
    )


def _explained(view: FeatureView, images: Tensor) -> Tensor:
    """How much of each released feature a rebuilt picture explains, (N, K); looked up for the record, so not counted as queries."""
    made = view.encode_uncounted(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    spread = (view.released - view.released.mean(0)).flatten(1).square().sum(1)
    told_apart = spread > ALIKE * view.released.flatten(1).square().sum(1)
    missed = (made - view.released[:, None]).flatten(2).square().sum(2)
    return torch.where(told_apart[:, None], 1 - missed / spread[:, None].clamp(min=1e-30), 0.0)


def spread_evenly(count: int, wanted: int) -> Tensor:
    """`wanted` places of a set of `count`, from its beginning to its end."""
    return torch.linspace(0, count - 1, wanted).round().long()


def cannot_adapt(name: str, adapt: int, assets: Assets) -> list[str]:
    """What keeps an attack from having so many public pictures protected."""
    there = 0 if assets.public is None else len(assets.public)
    return (
        [f"{name}.adapt asks for {adapt} public pictures, and there are {there}: lower it"]
        if adapt > there
        else []
    )
