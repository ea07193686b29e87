"""What the command `audit` does before it runs: read options, show the cost, ask."""

import sys
from pathlib import Path
from typing import Any

import typer

from frostglass.auditing.config_file import parse_settings
from frostglass.auditing.experiment import experiments
from frostglass.auditing.own_model import FASTER, OwnModel, has_gpu
from frostglass.cli.run import checked, prepare
from frostglass.cli.tables import duration, print_advice, print_costs
from frostglass.core.errors import ConfigError
from frostglass.plan.cheaper import LONG, cheaper
from frostglass.plan.estimate import estimate
from frostglass.store.store import Store


def effort_of(quick: bool, thorough: bool) -> str:
    """Return how much is spent."""
    if quick and thorough:
        raise ConfigError("--quick and --thorough exclude each other: give one of them")
    return "quick" if quick else "thorough" if thorough else "usual"


def class_names(path: Path | None) -> tuple[str, ...]:
    """Read the names of classes, one in a line."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--classes: cannot read {path} ({error}): give a text file with a name in each line"
        ) from None
    return tuple(line.strip() for line in lines if line.strip())


def agree(
    values: dict[str, Any],
    own: OwnModel,
    store: Path,
    threads: int | None,
    *,
    yes: bool,
    quiet: bool,
) -> None:
    """Show what will run and what it costs, and ask; raise if the answer is no."""
    prepare(threads)
    chosen = checked(experiments(values), store)
    steps = Store(store)
    costs = estimate(chosen, steps)
    if not quiet:
        print_costs(costs)
        print_advice([*_levels(values, own, steps, costs["seconds"]), *cheaper(costs, chosen)])
        if costs["seconds"] >= LONG and not has_gpu():
            print("  a GPU: most of this is training and searching, which one does much faster")
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"this takes about {duration(costs['seconds'])}: nobody can be asked here; repeat the "
            "command with --yes"
        )
    if not typer.confirm("Run it?", default=True):
        raise ConfigError("nothing was run: repeat the command with other options, or with --yes")


def _levels(
    values: dict[str, Any], own: OwnModel, store: Store, seconds: float
) -> list[tuple[str, float]]:
    """Return what the next smaller effort would take, if this one takes long."""
    if seconds < LONG or own.effort not in FASTER:
        return []
    smaller = OwnModel(**{**vars(own), "effort": FASTER[own.effort]}).settings()
    kept = {key: values[key] for key in ("data", "target") if key in values}
    costs = estimate(experiments(parse_settings(smaller | kept, [])), store)
    words = {"quick": "with --quick", "usual": "without --thorough"}
    return [(words[FASTER[own.effort]], costs["seconds"])]
