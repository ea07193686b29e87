"""Published tables on stdout."""

import json
from typing import Any

from frostglass.cli.tables import Row, print_table
from frostglass.published.metrics import METRICS
from frostglass.published.reading import WORLD, Cell, Table


def show_table(table: Table, *, as_json: bool) -> None:
    """Print a published table with its source, its ambiguities and how to run it."""
    if as_json:
        print(json.dumps(_facts(table)))
        return
    title = f"{table.name} ({table.paper.name}, {table.entry.number}): {table.entry.about}"
    worlds = {name: {getattr(cell, name) for cell in table.cells} for name in WORLD}
    varied = [name for name, values in worlds.items() if len(values) > 1]
    print_table(title, _rows(table, varied), left=[*varied, "defense", "setting"])
    for name, values in worlds.items():
        if name not in varied and values != {""}:
            print(f"{name}: {values.pop()}")
    print(f"source: {table.source}")
    for metric in table.metrics:
        if metric in METRICS:
            unit = f", {METRICS[metric].unit}" if METRICS[metric].unit else ""
            print(f"{metric}: {METRICS[metric].meaning}{unit}")
    for note, cells in table.notes.items():
        print(f"note ({_place(cells)}): {note}")
    print(_how(table))


def _rows(table: Table, varied: list[str]) -> list[Row]:
    if table.entry.kind == "settings" or table.entry.repeats:
        return [
            {name: getattr(cell, name) for name in (*varied, "defense", "setting", "metric")}
            | {"value": _text(cell)}
            for cell in table.cells
        ]
    return [
        {name: getattr(row, name) for name in (*varied, "defense", "setting")}
        | {metric: _text(row.cells.get(metric)) for metric in table.metrics}
        for row in table.rows()
    ]


def _text(cell: Cell | None) -> str:
    """Return a number as printed, with a star where there is a note."""
    if cell is None:
        return ""
    value = f"{cell.value:g}" if isinstance(cell.value, float) else cell.value or "–"
    spread = "" if cell.std is None else f" ± {cell.std:g}"
    return f"{value}{spread}{'*' * bool(cell.note)}"


def _place(cells: list[Cell]) -> str:
    if len(cells) > 3:
        return f"{len(cells)} cells"
    return "; ".join(" ".join(filter(None, (c.defense, c.setting, c.metric))) for c in cells)


def _how(table: Table) -> str:
    if table.entry.nothing:
        return f"nothing to run: {table.entry.nothing}"
    return f"run: frostglass repro {table.name} --scale small (or published); --check first"


def _facts(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "paper": table.paper.name,
        "number": table.entry.number,
        "source": table.source,
        "kind": table.entry.kind,
        "about": table.entry.about,
        "nothing_to_run": table.entry.nothing,
        "left_out": table.entry.left_out,
        "cells": [cell.model_dump() for cell in table.cells],
    }
