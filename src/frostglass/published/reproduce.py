"""Checks or runs the grids of a published table, and compares what they find."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frostglass.auditing.experiment import experiments
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import write_run
from frostglass.core.errors import ConfigError
from frostglass.plan.estimate import estimate
from frostglass.plan.problems import problems
from frostglass.published.compare import Comparison, compare
from frostglass.published.grids import Grid, preparation
from frostglass.published.reading import Table
from frostglass.report.load import read_run
from frostglass.report.seeds import seed_rows
from frostglass.store.store import Store


def check_grids(built: Sequence[Grid]) -> None:
    """Raise every problem of the grids; missing data is explained by the config's preparation."""
    lines: list[str] = []
    known: set[str] = set()
    for grid in built:
        found = [line for line in problems(experiments(grid.settings)) if line not in known]
        known |= set(found)
        if found and grid.config is not None and (steps := preparation(grid.config)):
            found[-1] += f"; to prepare: {steps}"
        lines += found
    if lines:
        raise ConfigError(lines)


def estimates(built: Sequence[Grid], store: Store) -> list[dict[str, Any]]:
    """Return what each grid would cost, one run of it at a time."""
    return [estimate(experiments(run), store) for grid in built for run in grid.runs]


def run_grids(
    table: Table, built: Sequence[Grid], store: Store, folder: Path
) -> tuple[Comparison, list[str], list[Path]]:
    """Run the grids of a table into a folder of runs; return the comparison and what went wrong.

    `built` has been checked. A failed audit leaves the others.
    """
    results, failures, folders = [], [], []
    for grid in built:
        runs = []
        for number, settings in enumerate(grid.runs):
            result = run_all(settings, store)
            name = str(settings["name"]) + (f"-seed{number}" if len(grid.runs) > 1 else "")
            folders.append(write_run(result, folder / name))
            runs.append(read_run(folders[-1]))
            failures += [f"FAILED: {name}: {reason}" for reason in result.failed]
            failures += [f"VACUOUS: {name}: {reason}" for reason in result.vacuous]
        results.append((grid, seed_rows(runs)))
    return compare(table, results), failures, folders
