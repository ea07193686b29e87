"""The contract of analyses: experiments of a config go in, tables and figures come out."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.pipeline import (
    attacker_prior,
    audit,
    audited_target,
    public_classifier,
    split_of,
)
from frostglass.auditing.products import ModelExposure
from frostglass.auditing.results import Audit
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import Method
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Split, Target
from frostglass.store.store import Store

Cell = str | int | float | None
LARGEST = 1e30  # more cannot be drawn
SURFACES = frozenset({"model", "features"})


@dataclass(frozen=True)
class Axis:
    """What an axis shows; values may be shares, shown in percent, or need a log scale."""

    title: str
    log: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Curve:
    """Named points of a figure, joined by a line or not; `low` and `high` are intervals of y."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    joined: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), len(self.low or self.x), len(self.high or self.x)}
        if len(lengths) > 1 or not self.x or bool(self.low) != bool(self.high):
            raise RunError(
                f"curve {self.name!r}: expected as many x as y and intervals, got {len(self.x)} x, "
                f"{len(self.y)} y, {len(self.low)} low and {len(self.high)} high"
            )
        _check_finite(f"curve {self.name!r}", (*self.x, *self.y, *self.low, *self.high))


@dataclass(frozen=True)
class Figure:
    """Curves over common axes."""

    title: str
    across: Axis
    upward: Axis
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        if not self.curves:
            raise RunError(f"figure {self.title!r}: expected at least one curve, got none")
        for axis, name in ((self.across, "x"), (self.upward, "y")):
            values = [value for curve in self.curves for value in getattr(curve, name)]
            if axis.log and min(values) <= 0:
                raise RunError(
                    f"figure {self.title!r}: a log scale needs values above 0, got {min(values)}"
                )


@dataclass(frozen=True)
class Table:
    """Rows of numbers and names; a missing number is None."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if odd := [row for row in self.rows if len(row) != len(self.head)]:
            raise RunError(
                f"table {self.title!r}: expected {len(self.head)} cells a row, got {len(odd[0])}"
            )
        cells = [cell for row in self.rows for cell in row if isinstance(cell, float)]
        _check_finite(f"table {self.title!r}", cells)


@dataclass(frozen=True)
class Analysis:
    """What an analysis found. It holds no name and no image of a person."""

    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """One experiment of a config; its products are made, or read from the store, when asked for."""

    label: str
    experiment: Experiment
    store: Store

    @cached_property
    def split(self) -> Split:
        return split_of(self.experiment, self.store)

    @cached_property
    def target(self) -> Target:
        return audited_target(self.experiment, self.store, self.split)

    @cached_property
    def prior(self) -> Prior:
        """The attacker's prior, as an audit of this experiment uses it."""
        found = attacker_prior(self.experiment, self.store, self.split, ModelExposure(self.target))
        if found is None:
            raise ConfigError("prior: this analysis searches the latents of a prior: set one")
        return found

    @cached_property
    def perceptual(self) -> Target:
        """The network whose layers compare images, trained on public people."""
        exp = self.experiment
        return public_classifier(self.store, exp.perceptual, self.split, exp.seed, "perceptual")

    @cached_property
    def audit(self) -> Audit:
        """The whole audit: attack, prior-only baseline, scores and controls."""
        return audit(self.experiment, self.store)


@dataclass(frozen=True)
class Context:
    """What an analysis may use: the experiments of the config, in grid order."""

    subjects: tuple[Subject, ...]

    @property
    def seed(self) -> int:
        return self.subjects[0].experiment.seed if self.subjects else 0


class AnalysisMethod(Method):
    """A frozen set of parameters that analyses the experiments of a config.

    `surfaces` are those of the experiments it can analyse; an analysis without any needs no
    config. Names and images of people do not belong into what it returns.
    """

    surfaces: ClassVar[frozenset[str]] = SURFACES

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        """List what makes experiments unfit for this analysis, before anything is computed."""
        return []

    @abstractmethod
    def run(self, context: Context) -> Analysis:
        """Analyse."""


analyses = Registry(
    "analysis", "frostglass.analyses", contract=AnalysisMethod, group="frostglass.analyses"
)


def analyze(
    method: AnalysisMethod, settings: Mapping[str, Any] | None = None, store: Store | None = None
) -> Analysis:
    """Run an analysis on the experiments of a config, with steps of the store."""
    subjects: tuple[Subject, ...] = ()
    if method.surfaces:
        if settings is None or store is None:
            raise ConfigError(f"{method.name} analyses experiments: give a config and a store")
        chosen = experiments(settings)
        if problems := unfit(method, [experiment for _, experiment in chosen]):
            raise ConfigError(problems)
        subjects = tuple(Subject(label, experiment, store) for label, experiment in chosen)
    return method.run(Context(subjects))


def unfit(method: AnalysisMethod, chosen: Sequence[Experiment]) -> list[str]:
    """List what makes experiments unfit for an analysis."""
    surfaces = sorted({experiment.surface for experiment in chosen} - method.surfaces)
    fix = {"features": "remove target.cut", "model": "set target.cut and target.attributes"}
    if surfaces:
        return [
            f"{method.name} analyses {' and '.join(sorted(method.surfaces))}, and this config "
            f"exposes {surfaces[0]}: {fix[surfaces[0]]}, or use another config"
        ]
    return [f"{method.name}: {problem}" for problem in method.problems(chosen)]


def _check_finite(name: str, values: Iterable[float]) -> None:
    if broken := sum(not math.isfinite(value) or abs(value) > LARGEST for value in values):
        raise RunError(f"{name}: {broken} values are not finite or above {LARGEST:g}")
