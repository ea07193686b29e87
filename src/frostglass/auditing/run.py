"""Many experiments as one run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from frostglass.auditing.experiment import experiments
from frostglass.auditing.pipeline import audit
from frostglass.auditing.results import Audit
from frostglass.core.errors import DataError, RunError
from frostglass.store.store import Store


@dataclass(frozen=True)
class Run:
    """The audits of one config, in grid order; `failed` says which are missing, and why.

    `store` is the folder of the store that they are in.
    """

    name: str
    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    audits: tuple[Audit, ...]
    failed: tuple[str, ...] = ()
    store: str = ""

    @property
    def vacuous(self) -> list[str]:
        """Say why audits of this run prove nothing; empty for a believable run."""
        return [
            f"{label}: {audit.controls.vacuous}"
            for label, audit in zip(self.labels, self.audits, strict=True)
            if audit.controls.vacuous
        ]


def run_all(settings: Mapping[str, Any], store: Store) -> Run:
    """Run every experiment of a config; shared steps run once, a failure leaves the others."""
    chosen = experiments(settings)
    done: dict[str, Audit] = {}
    failed: list[str] = []
    for label, experiment in chosen:
        try:
            done[label] = audit(experiment, store)
        except (RunError, DataError) as error:
            if len(chosen) == 1:
                raise
            failed.append(f"{label}: {error}")
    if not done:
        raise RunError("; ".join(failed))
    if differences := store.mixed_conditions():
        done = {label: _warned(each, differences) for label, each in done.items()}
    name = chosen[0][1].name
    root = str(store.root.resolve())
    return Run(name, settings, tuple(done), tuple(done.values()), tuple(failed), root)


def _warned(result: Audit, differences: str) -> Audit:
    """Add to an audit the warning that the steps of its run do not belong to one machine."""
    warning = (
        f"steps of this run were made under different conditions ({differences}): its last bits "
        "may not repeat; to make all steps under one, give a new --store"
    )
    warnings = (*result.controls.warnings, warning)
    return replace(result, controls=replace(result.controls, warnings=warnings))
