"""Queries of GMI with its default early stopping over the published settings, on embedded faces.

Both attack the same undefended model from the same starts. The goal counts only if early stopping
leaves as many people recognised: by the embedded face verifier, at a false-accept rate of 1 %.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.measured import Measured
from frostglass.auditing.run import run_all
from frostglass.store.store import Store

LEAST = 3.0  # times fewer queries
PEOPLE = 16
DEFAULT = {"name": "gmi", "candidates": 1, "keep": 1}
CASES = {"published": DEFAULT | {"variant": "published"}, "default": DEFAULT}
SETTINGS: dict[str, Any] = {
    "name": "early stopping",
    "data": {
        "name": "faces",
        "identities": 20,
        "images": 40,
        "public_identities": 200,
        "public_images": 1,
    },
    "target": {"model": "cnn", "options": {"width": 16}, "epochs": 16, "lr": 2e-3},
    "evaluators": [
        {"model": "cnn", "options": {"width": 16}, "epochs": 1},
        {"kind": "embedder"},
    ],
    "prior": {"name": "pretrained", "weights": "faces32"},
    "metrics": [{"name": "verification"}, {"name": "accuracy"}],
    "judging": {"identities": PEOPLE, "positive_control": False},
}


def measure() -> Iterator[Measured]:
    cases = [{"case": case, "attack": attack} for case, attack in CASES.items()]
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(SETTINGS | {"grid": {"case": cases}}, Store(folder))
    queries = [audit.reconstructions.queries for audit in result.audits]
    verified = [audit.rows.score("verified_2").value for audit in result.audits]
    yield Measured(
        "people recognised, GMI with patience minus published",
        verified[1] - verified[0],
        f"{verified[1]:.1%} against {verified[0]:.1%} of {PEOPLE} people",
        least=0,
    )
    yield Measured(
        "queries of published GMI, over those with patience",
        queries[0] / queries[1],
        f"{queries[0]:,} against {queries[1]:,}",
        least=LEAST,
    )
