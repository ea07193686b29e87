"""The command `analyze`: check, call the library, draw, print."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frostglass.analyses._files import FOLDER, write_analysis
from frostglass.analyses._result import Analysis, Cell
from frostglass.analyses.base import AnalysisMethod, analyses, analyze, unfit
from frostglass.auditing.config_file import parse_settings, read_config
from frostglass.auditing.experiment import experiments
from frostglass.cli.progress import progress
from frostglass.cli.run import check_writable, checked, default_folder, prepare
from frostglass.cli.tables import print_table
from frostglass.core.errors import ConfigError, RunError
from frostglass.report.figures import standalone
from frostglass.store.files import write_bytes
from frostglass.store.store import Store

SECTION = "analysis"  # of a config: the parameters of the analysis


def analyze_config(
    name: str,
    config: Path | None,
    settings: Sequence[str],
    store: Path,
    out: Path | None,
    *,
    as_json: bool,
    threads: int | None,
    devices: int | None,
) -> None:
    """Run an analysis, write its numbers and figures, print its tables."""
    prepare(threads)
    values = parse_settings({}, settings) if config is None else read_config(config, settings)
    method = _method(name, values.pop(SECTION, {}))
    if method.surfaces and config is None:
        raise ConfigError(f"{name} analyses experiments, got no config: name one after {name}")
    if not method.surfaces and (config is not None or values):
        raise ConfigError(f"{name} uses no config: leave it out, and set only {SECTION}.NAME=VALUE")
    label = name
    if method.surfaces:
        # What cannot be read, then what does not suit the analysis, then what `run` would refuse.
        chosen = experiments(values)
        if problems := unfit(method, [experiment for _, experiment in chosen]):
            raise ConfigError(problems)
        checked(chosen, store, devices)
        label = chosen[0][1].name
    folder = out or default_folder(label)
    check_writable("--out", folder)
    with progress() as listener:
        result = analyze(method, values, Store(store, listener=listener, devices=devices))
    try:
        files = _write(result, method, values, folder)
    except OSError as error:
        raise RunError(f"cannot write {folder} ({error.strerror}): give another --out") from error
    if as_json:
        print(json.dumps(asdict(result) | {"files": [str(file) for file in files]}))
        return
    for table in result.tables:
        rows = [dict(zip(table.head, map(_text, row), strict=True)) for row in table.rows]
        words = [
            column
            for place, column in enumerate(table.head)
            if any(isinstance(row[place], str) for row in table.rows)
        ]
        print_table(table.title, rows, words)
    for line in (*result.notes, *(f"wrote {file}" for file in files)):
        print(line)


def _method(name: str, table: Any) -> AnalysisMethod:
    if not isinstance(table, dict) or "name" in table:
        raise ConfigError(f"{SECTION}: expected a table of parameters of {name}, without a name")
    return analyses.build({**table, "name": name})


def _write(
    result: Analysis, method: AnalysisMethod, values: dict[str, Any], folder: Path
) -> list[Path]:
    numbers = write_analysis(result, method, values, folder)
    drawings = []
    for place, figure in enumerate(result.figures, 1):
        drawings.append(folder / FOLDER / f"{numbers.stem}-{place}.svg")
        write_bytes(drawings[-1], standalone(figure).encode())
    return [numbers, *drawings]


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
