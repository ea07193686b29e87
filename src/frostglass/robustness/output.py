"""The folder of a robustness run: robustness.json, and robustness.csv with a row per person."""

import csv
import io
import json
import platform
from pathlib import Path
from typing import Any

from frostglass.auditing.run_folder import described, plain_settings, versions
from frostglass.robustness.run import Measured
from frostglass.store.files import (
    full_disk_reported,
    ignore_in_git,
    make_private,
    remove_temporaries,
    write_bytes,
)
from frostglass.store.manifest import MANIFEST, seal

FORMAT = 1
NUMBERS = ("robustness.json", "robustness.csv")
FILES = (*NUMBERS, MANIFEST)


def write_measured(result: Measured, folder: Path) -> Path:
    """Write the numbers of a run, and last the manifest of their hashes."""
    with full_disk_reported(folder):
        make_private(folder)
        ignore_in_git(folder)
        remove_temporaries(folder)
        text = json.dumps(summary(result), indent=1) + "\n"
        write_bytes(folder / "robustness.csv", _csv(result).encode())
        write_bytes(folder / "robustness.json", text.encode())
        seal(folder, NUMBERS)
    return folder


def summary(result: Measured) -> dict[str, Any]:
    """Return everything measured as plain values."""
    return {
        "format": FORMAT,
        "name": result.name,
        "settings": plain_settings(result.settings),
        "versions": {"python": platform.python_version()} | versions(),
        "threats": {name: described(threat) for name, threat in result.threats.items()},
        "models": [
            {
                "title": model.title,
                "defenses": list(model.defenses),
                "seeds": list(model.seeds),
                "rates": {
                    name: {
                        "value": rate.value,
                        "low": rate.interval[0],
                        "high": rate.interval[1],
                        "images": rate.images,
                        "queries": rate.queries,
                        "by_seed": (rate.hits.sum(1) / rate.tried.sum(1)).tolist(),
                    }
                    for name, rate in model.table.rates.items()
                },
            }
            for model in result.models
        ],
        "failed": list(result.failed),
    }


def _csv(result: Measured) -> str:
    """Return one line per model, seed, measurement and person with images that were tried."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["model", "seed", "measurement", "identity", "tried", "succeeded"])
    for model in result.models:
        for name, rate in model.table.rates.items():
            for row, seed in enumerate(model.seeds):
                counts = zip(result.people, rate.tried[row], rate.hits[row], strict=True)
                for person, tried, hits in counts:
                    if tried:
                        writer.writerow([model.title, seed, name, person, int(tried), int(hits)])
    return text.getvalue()
