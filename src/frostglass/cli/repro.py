"""The command `repro`: check, call the library, print ours beside theirs."""

import gc
import json
from pathlib import Path
from typing import Any

from frostglass.cli.progress import progress
from frostglass.cli.run import check_machine, check_writable, prepare
from frostglass.cli.tables import Row, duration, print_table
from frostglass.core.errors import RunError
from frostglass.published.compare import Comparison, Line
from frostglass.published.grids import Grid, grids, part_of
from frostglass.published.metrics import METRICS
from frostglass.published.reading import Table, table
from frostglass.published.reproduce import check_grids, estimates, run_grids
from frostglass.published.scaling import scaled
from frostglass.report.seeds import Share
from frostglass.store.store import Store


def repro_table(
    name: str,
    scale: str,
    store: Path,
    out: Path | None,
    *,
    check: bool,
    seeds: int | None,
    configs: Path | None,
    part: int | None,
    as_json: bool,
    threads: int | None,
) -> None:
    """Check a published table's grids, or run them and print the comparison."""
    chosen = table(name)
    built = part_of(grids(chosen, scale, seeds=seeds, configs=configs), part)
    prepare(threads)
    check_machine(store)
    check_grids(built)
    notes = {grid.settings["name"]: scaled(chosen, grid, configs) for grid in built}
    left_out = [*chosen.entry.left_out, *(line for grid in built for line in grid.missing)]
    if check:
        _print_costs(chosen, scale, built, store, notes, left_out, as_json=as_json)
        return
    folder = out or Path("runs") / f"{name}-{scale}"
    check_writable("--out", folder)
    with progress() as listener:
        steps = Store(store, listener=listener)
        comparison, failures, folders = run_grids(chosen, built, steps, folder)
    if as_json:
        facts = _facts(chosen, scale, comparison, notes, left_out)
        print(json.dumps(facts | {"runs": [str(each) for each in folders]}))
    else:
        _print(chosen, scale, comparison, notes, left_out)
        print(f"runs: {', '.join(map(str, folders))}")
    if failures:
        raise RunError("; ".join(failures))


def _print_costs(
    chosen: Table,
    scale: str,
    built: list[Grid],
    store: Path,
    notes: dict[str, list[str]],
    left_out: list[str],
    *,
    as_json: bool,
) -> None:
    gc.freeze()  # as for `check`: collections would search the objects of imported packages
    try:
        costs = estimates(built, Store(store))
    finally:
        gc.unfreeze()
    names = [str(grid.settings["name"]) for grid in built for _ in grid.runs]
    total = sum(cost["seconds"] for cost in costs)
    memory = max(cost["memory_mib"] for cost in costs)
    if as_json:
        parts = [{"name": name, **cost} for name, cost in zip(names, costs, strict=True)]
        facts = {"table": chosen.name, "scale": scale, "seconds": total, "memory_mib": memory}
        print(json.dumps(facts | {"runs": parts, "scaled": notes, "left_out": left_out}))
        return
    rows = [
        {
            "run": name,
            "audits": next(row["work"] for row in cost["steps"] if row["step"] == "controls"),
            "about": duration(cost["seconds"]),
            "memory": f"{cost['memory_mib'] / 1024:.1f} GiB",
        }
        for name, cost in zip(names, costs, strict=True)
    ]
    print_table(f"{chosen.name} at the {scale} scale", rows, left=["run"])
    _print_notes(notes, left_out)
    print(
        f"no problems; about {duration(total)} on this machine, about {memory / 1024:.1f} GiB of "
        "memory; nothing was trained"
    )


def _print(
    chosen: Table,
    scale: str,
    comparison: Comparison,
    notes: dict[str, list[str]],
    left_out: list[str],
) -> None:
    rows = [_row(line, comparison) for line in comparison.lines]
    title = f"{chosen.name} ({chosen.paper.name}, {chosen.entry.number}) at the {scale} scale"
    print_table(title, rows, left=["attack", "published row", "our audit"])
    print(f"leakage: {METRICS[comparison.leak].meaning}; ours with its 95% interval")
    if comparison.utility != comparison.leak:
        print(f"utility: {METRICS[comparison.utility].meaning}")
    print(
        "direction: does the defense change leakage as published, compared with the undefended "
        "model? open: our intervals overlap"
    )
    print(f"direction: {_counts(comparison.directions)}")
    print(f"order of two rows: {_counts(comparison.order)}")
    _print_notes(notes, left_out)


def _print_notes(notes: dict[str, list[str]], left_out: list[str]) -> None:
    for name, lines in notes.items():
        print(f"scaled ({name}):")
        for line in lines:
            print(f"  {line}")
    for line in left_out:
        print(f"left out: {line}")


def _counts(found: Any) -> str:
    total = sum(found.values())
    if not total:
        return "nothing to compare"
    return (
        f"{found['agrees']} of {total} agree, {found['disagrees']} disagree, {found['open']} open"
    )


def _row(line: Line, comparison: Comparison) -> Row:
    row = {"attack": line.attack or "–", "published row": line.row.title, "our audit": line.label}
    row |= {"theirs": _number(line.leak), "ours": _ours(line.our_leak, comparison.leak)}
    if comparison.utility != comparison.leak:
        row |= {"utility": _number(line.utility)}
        row |= {"our utility": _ours(line.our_utility, comparison.utility, interval=False)}
        recognised = next(
            (s for n, s in (line.ours.shares if line.ours else {}).items() if "verified" in n), None
        )
        row |= {"our recognised": _ours(recognised, "attack_acc1", interval=False)}
    return row | {"direction": line.direction or "–"}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _ours(share: Share | None, metric: str, *, interval: bool = True) -> str:
    """Return our value in the unit of the paper."""
    if share is None:
        return "–"
    factor, form = (100, ".1f") if METRICS[metric].unit == "percent" else (1, ".2f")
    value, low, high = (format(factor * x, form) for x in (share.value, share.low, share.high))
    return f"{value} ({low} to {high})" if interval else value


def _facts(
    chosen: Table,
    scale: str,
    comparison: Comparison,
    notes: dict[str, list[str]],
    left_out: list[str],
) -> dict[str, Any]:
    """Return the comparison as plain values; ours are shares, theirs as printed."""
    return {
        "table": chosen.name,
        "source": chosen.source,
        "scale": scale,
        "leak": comparison.leak,
        "utility": comparison.utility,
        "rows": [
            {
                "attack": line.attack,
                "defense": line.row.defense,
                "setting": line.row.setting,
                "audit": line.label,
                "theirs": line.leak,
                "their_utility": line.utility,
                "ours": vars(line.our_leak) if line.our_leak else None,
                "our_utility": vars(line.our_utility) if line.our_utility else None,
                "seeds": list(line.ours.seeds) if line.ours else [],
                "notes": list(line.ours.notes) if line.ours else ["failed"],
                "direction": line.direction,
            }
            for line in comparison.lines
        ],
        "directions": dict(comparison.directions),
        "order": dict(comparison.order),
        "scaled": notes,
        "left_out": left_out,
    }
