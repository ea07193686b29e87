"""The contract of analyses: experiments of a config go in, tables and figures come out."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from frostglass.analyses._result import Analysis
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
from frostglass.core.errors import ConfigError
from frostglass.core.method import Method
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Split, Target
from frostglass.store.store import Store

SURFACES = frozenset({"model", "features"})


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
