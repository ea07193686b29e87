"""What differs between a published table and its grid: data, size, network, steps, strengths."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frostglass.auditing.expand import expand
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.core.errors import ConfigError
from frostglass.published.grids import Grid, configs_folder, grids
from frostglass.published.reading import Row, Table
from frostglass.report.seeds import without_seed

STEPS = ("steps", "max_queries", "epochs")


def scaled(table: Table, grid: Grid, configs: Path | None = None) -> list[str]:
    """Return a line for everything that was scaled in a grid; published sizes where known."""
    if grid.config is not None:
        return ["nothing was scaled; configs/README.md lists what is assumed or different"]
    chosen = dict(experiments(grid.settings))
    published = _published_sizes(table, grid, configs)
    rows = [row for found in grid.rows.values() for row in found]
    lines = [f"data: {_joined(rows, 'dataset_private')} → {grid.world}"]
    if any(row.pretrain not in ("", "none") for row in rows):
        lines.append(f"pre-training: {_joined(rows, 'pretrain')} → none")
    first = next(iter(chosen.values()))
    lines.append(f"network: {_joined(rows, 'architecture')} → {_network(first)}")
    seen: dict[str, None] = {}
    for experiment in chosen.values():
        ours, theirs = _sizes(experiment), published.get(experiment.case, {})
        for name, value in ours.items():
            text = f"{name}: {theirs[name]} → {value}" if name in theirs else f"{name}: {value}"
            if theirs.get(name) != value:
                seen[text if name in _SHARED else f"{experiment.case}, {text}"] = None
    lines += seen
    lines += _strengths(grid)
    return [*lines, f"seeds: {grid.seeds}"]


_SHARED = ("image size", "target epochs")


def _joined(rows: list[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(getattr(row, name) for row in rows)) or "not stated"


def _network(experiment: Experiment) -> str:
    options = ", ".join(f"{name} {value}" for name, value in experiment.target.options.items())
    return f"{experiment.target.model} ({options})" if options else experiment.target.model


def _sizes(experiment: Experiment) -> dict[str, str]:
    """Return the sizes of an experiment that cost time."""
    sizes = {
        "image size": f"{experiment.data.image_shape[-1]} px",
        "target epochs": f"{experiment.target.epochs}",
        **_steps("attack", experiment.attack),
        **(_steps("prior", experiment.prior) if experiment.prior else {}),
    }
    people = experiment.judging.identities
    return sizes | {"people attacked": "all" if people is None else f"{people}"}


def _steps(part: str, method: Any) -> dict[str, str]:
    found = {name: value for name, value in vars(method).items() if name in STEPS and value}
    return {f"{part} {name.replace('_', ' ')}": f"{value:,}" for name, value in found.items()}


def _published_sizes(
    table: Table, grid: Grid, configs: Path | None
) -> Mapping[str, Mapping[str, str]]:
    """Return the published sizes by attack; {} without the folder of published settings."""
    try:
        built = grids(table, "published", configs=configs_folder(configs))
    except ConfigError:
        return {}
    same = [other.settings for other in built if other.part is grid.part]
    every = [experiment for settings in same for _, experiment in experiments(settings)]
    return {experiment.case: _sizes(experiment) for experiment in reversed(every)}


def _strengths(grid: Grid) -> list[str]:
    """Return published strengths that a smaller network cannot take, and what replaced them."""
    lines = []
    for rows, methods in zip(grid.rows.values(), _methods(grid), strict=True):
        for row in rows:
            setting = grid.part.strengths.get(row.defense, row.setting)
            changed = [
                f"{each['name']} {name} {each[name]}"
                for each in methods
                for name in ("rank", "ratio")
                if name in each and not re.search(rf"\b{name}={each[name]}\b", setting)
            ]
            if changed and "freeze ratio" not in setting:
                what = f"{row.defense} {setting or 'without a stated strength'}"
                lines.append(f"strength: {what} → {', '.join(changed)}")
    return list(dict.fromkeys(lines))


def _methods(grid: Grid) -> list[list[dict[str, Any]]]:
    by_label = {
        without_seed(label, config.get("seed")): config["defenses"]
        for label, config in expand(grid.settings)
    }
    return [by_label[label] for label in grid.rows]
