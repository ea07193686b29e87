"""Many experiments as one run."""

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from frostglass.auditing.experiment import experiments
from frostglass.auditing.pipeline import audit
from frostglass.auditing.results import Audit
from frostglass.auditing.steps import ATTACK, SCORES
from frostglass.auditing.thresholds import (
    Fixed,
    fixed_before,
    other_thresholds,
    record_thresholds,
)
from frostglass.core.display import table
from frostglass.core.duration import EXAMPLES, in_words, parse_duration
from frostglass.core.errors import BudgetReached, ConfigError, FrostglassError, RunError
from frostglass.store.store import Store
from frostglass.store.timing import finished_at
from frostglass.workers.processes import worker_processes
from frostglass.workers.schedule import results


@dataclass(frozen=True)
class Run:
    """The audits of one config, in grid order.

    `failed` says which are missing, and why; `not_run` those that a time budget left out. `store`
    is the folder of the store that they are in, `date` when their last step ended, in UTC.
    """

    name: str
    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    audits: tuple[Audit, ...]
    failed: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    store: str = ""
    date: str = ""
    thresholds: Fixed | None = None

    def __repr__(self) -> str:
        missing = f", {len(self.failed)} failed" if self.failed else ""
        missing += f", {len(self.not_run)} not run" if self.not_run else ""
        return f"Run({self.name}: {len(self.audits)} audits{missing})"

    def _repr_html_(self) -> str:
        header = ("audit", "utility", "score", "value", "95 % interval", "prior only", "verdict")
        rows = [(label, *audit._cells()) for label, audit in self._audits()]
        missing = "".join(f"<p>{html.escape(line)}</p>" for line in (*self.failed, *self.not_run))
        return table(header, rows) + missing

    def _audits(self) -> list[tuple[str, Audit]]:
        return list(zip(self.labels, self.audits, strict=True))

    @property
    def vacuous(self) -> list[str]:
        """Say why audits of this run prove nothing; empty for a believable run."""
        return [
            f"{label}: {audit.controls.vacuous}"
            for label, audit in self._audits()
            if audit.controls.vacuous
        ]


def run_all(
    settings: Mapping[str, Any], store: Store, *, workers: int = 1, time_budget: str | None = None
) -> Run:
    """Run every experiment of a config; shared steps run once, a failure leaves the others.

    With several `workers`, as many processes make its steps, and the people of its attacks.
    After `time_budget`, such as "30m", nothing more is computed: audits whose steps are finished
    are returned, the others are named in `not_run`, and a later call goes on from there.
    """
    check = within(time_budget)
    chosen = experiments(settings)
    name, thresholds = chosen[0][1].name, chosen[0][1].thresholds
    recorded = record_thresholds(store.root, name, thresholds)  # before anything is computed
    jobs = {label: partial(audit, experiment) for label, experiment in chosen}
    done: dict[str, Audit] = {}
    failed: list[str] = []
    not_run: list[str] = []
    with worker_processes(store, workers), store.interrupted_by(check):
        for label, result in results(jobs, store):
            if not isinstance(result, Exception):
                done[label] = result
                if store.log:
                    store.record(f"audit {label}", 0, audit_values(result))
            elif isinstance(result, BudgetReached):
                not_run.append(f"{label}: {result}")
            elif len(chosen) == 1:
                raise result
            else:
                failed.append(f"{label}: {result}")
    if not done:
        raise _nothing(failed, not_run)
    if differences := store.mixed_conditions():
        done = {label: _warned(each, differences) for label, each in done.items()}
    attacks = [store.root / ATTACK.name / each.reconstructions.key for each in done.values()]
    scores = [store.root / SCORES.name / each.rows.key for each in done.values()]
    fixed = None
    if thresholds is not None:
        others = other_thresholds(store.root, name, thresholds)
        fixed = Fixed(thresholds.limits, recorded, fixed_before(recorded, attacks), others)
    return Run(
        name,
        settings,
        tuple(done),
        tuple(done.values()),
        failed=tuple(failed),
        not_run=tuple(not_run),
        store=str(store.root.resolve()),
        date=max(map(finished_at, scores)),  # not now: a run that is repeated is the same run
        thresholds=fixed,
    )


def audit_values(audit: Audit) -> dict[str, float]:
    """Return the numbers of an audit for a log: scores, their baselines, and the accuracy."""
    ours, drawn = audit.trial.rows, audit.trial.baseline_rows
    values = {name: ours.score(name).value for name in ours.columns}
    values |= {f"prior-only {name}": drawn.score(name).value for name in drawn.columns}
    accuracy = audit.target.info.get("accuracy") or {}
    return values | {f"accuracy {part}": value for part, value in accuracy.items()}


def within(time_budget: str | None) -> Callable[[], None]:
    """Return a function that raises `BudgetReached` once a time such as "30m" is over."""
    if time_budget is None:
        return lambda: None
    if (seconds := parse_duration(time_budget)) is None:
        raise ConfigError(f"time budget: expected a time, {EXAMPLES}; got {time_budget!r}")
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() >= end:
            raise BudgetReached(f"time budget of {in_words(seconds)} reached")

    return check


def _nothing(failed: list[str], not_run: list[str]) -> FrostglassError:
    """Return the error of a run without a single audit."""
    if failed:
        return RunError("; ".join([*failed, *not_run]))
    return BudgetReached(
        f"not run: {'; '.join(not_run)}. No audit was finished: run the same command again to go on"
    )


def _warned(result: Audit, differences: str) -> Audit:
    """Add to an audit the warning that the steps of its run do not belong to one machine."""
    warning = (
        f"steps of this run were made under different conditions ({differences}): its last bits "
        "may not repeat; to make all steps under one, give a new --store"
    )
    warnings = (*result.controls.warnings, warning)
    return replace(result, controls=replace(result.controls, warnings=warnings))
