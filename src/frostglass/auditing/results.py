"""What an experiment produces: trials, their verdict, and how a notebook shows them."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frostglass.auditing.controls import Controls
from frostglass.auditing.expand import GIVEN, UNDEFENDED
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.products import Exposure
from frostglass.auditing.trusted import deciding_evaluator, exclusions
from frostglass.core.display import MAX_ROWS, image_tag, table
from frostglass.core.prior import Prior
from frostglass.core.types import Reconstructions, Split, Target
from frostglass.evaluators.verifier import Verifier
from frostglass.metrics.base import Rows


@dataclass(frozen=True)
class Trial:
    """One model under one attack: what was exposed, reconstructed and scored.

    `baseline` are prior-only draws, scored in the same way.
    """

    exposure: Exposure
    prior: Prior | None
    reconstructions: Reconstructions
    baseline: Reconstructions
    rows: Rows
    baseline_rows: Rows

    @property
    def target(self) -> Target:
        return self.exposure.target


@dataclass(frozen=True, kw_only=True)
class Products:
    """What the steps of one experiment made; `control` is the trial of the undefended model."""

    split: Split
    evaluators: tuple[Target, ...]
    verifiers: tuple[Verifier, ...]
    embedder: Target | None
    trial: Trial
    control: Trial | None
    more_draws: Reconstructions | None = None  # another baseline: the noise between sets


@dataclass(frozen=True, kw_only=True)
class Audit(Products):
    """What one experiment found: its trial, that of the positive control, and the verdict.

    `facts` describe released features (utility, deviation, distances). For a model they hold the
    `agreement` of target and evaluators on draws of the prior.
    """

    experiment: Experiment
    controls: Controls
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return self.trial.target

    @property
    def reconstructions(self) -> Reconstructions:
        return self.trial.reconstructions

    @property
    def rows(self) -> Rows:
        return self.trial.rows

    @property
    def verified(self) -> str:
        """The column of the evaluator whose verification decides, on either surface."""
        pairs = list(zip(self.evaluators, self.verifiers, strict=True))
        return f"verified_{deciding_evaluator(pairs, exclusions(pairs, self.experiment.judging))}"

    def _verdict(self) -> str:
        return f"VACUOUS: {self.controls.vacuous}" if self.controls.vacuous else "believable"

    def __repr__(self) -> str:
        exp = self.experiment
        scores = ", ".join(str(score) for score in self.controls.headline)
        plain = GIVEN if self.target.info.get("given") else UNDEFENDED
        defenses = " + ".join(d.name for d in exp.defenses) or plain
        return f"Audit({exp.attack.name} on {defenses}: {scores}; {self._verdict()})"

    def _cells(self) -> tuple[str, ...]:
        """Utility, the score that decides with its interval and baseline, and the verdict."""
        (score, *_) = self.controls.headline
        base = self.trial.baseline_rows.score(score.name)
        name, value, between = score._cells()
        return (self._utility(), name, value, between, base._cells()[1], self._verdict())

    def _utility(self) -> str:
        if "utility" in self.facts:
            return f"MCC {self.facts['utility']['mean_mcc']:.2f}"
        accuracy = self.target.info.get("accuracy", {}).get("test")
        return "" if accuracy is None else f"{accuracy:.1%} accurate"

    def _repr_html_(self) -> str:
        rows = [
            (name, f"{score.value:.3f}", f"{score.low:.3f} to {score.high:.3f}", f"{base:.3f}")
            for name in self.rows.columns
            for score in (self.rows.score(name),)
            for base in (self.trial.baseline_rows.score(name).value,)
        ]
        header = ("metric", "value", "95 % interval", "prior-only baseline")
        images = image_tag(self.reconstructions.grid(MAX_ROWS))
        return f"<p>{html.escape(repr(self))}</p>{table(header, rows)}{images}"
