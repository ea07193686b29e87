"""Queries for as many people recognised as by the published GMI settings, on embedded faces.

All attack the same undefended model, with one search per person: GMI as published, with its default
early stopping, and with the settings of the demo (starts from a pool, margin loss, Adam, early
stopping). Recognised means accepted by the embedded face verifier at a false-accept rate of 1 %.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.measured import Measured
from frostglass.auditing.config_file import demo_config
from frostglass.auditing.run import run_all
from frostglass.store.store import Store

LEAST = 3.0  # times fewer queries
PEOPLE = 24
ONE = {"candidates": 1, "keep": 1}
DEFAULT = {"name": "gmi", **ONE}
CASES = {
    "published": DEFAULT | {"variant": "published"},
    "default": DEFAULT,
    "demo": demo_config()["attack"] | ONE,
}
SETTINGS: dict[str, Any] = {
    "name": "early stopping",
    "data": {
        "name": "faces",
        "identities": PEOPLE,
        "images": 60,
        "public_identities": 200,
        "public_images": 1,
    },
    "target": {"model": "cnn", "options": {"width": 32}, "epochs": 20, "lr": 2e-3},
    "evaluators": [
        {"model": "cnn", "options": {"width": 8}, "epochs": 1},  # required, but not used
        {"kind": "embedder"},
    ],
    "prior": {"name": "pretrained", "weights": "faces32"},
    "metrics": [{"name": "verification"}, {"name": "accuracy"}],
    "judging": {"positive_control": False},
}


def measure() -> Iterator[Measured]:
    cases = [{"case": case, "attack": attack} for case, attack in CASES.items()]
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(SETTINGS | {"grid": {"case": cases}}, Store(folder))
    audits = dict(zip(CASES, result.audits, strict=True))
    queries = {case: audit.reconstructions.queries for case, audit in audits.items()}
    shares = {case: audit.rows.score("verified_2").value for case, audit in audits.items()}
    for case in ("default", "demo"):
        goal = case == "demo"  # the published form may lose a little by stopping early
        yield Measured(
            f"people recognised by GMI, {case} minus published",
            shares[case] - shares["published"],
            f"{shares[case]:.1%} against {shares['published']:.1%} of {PEOPLE} people",
            least=0 if goal else None,
        )
        yield Measured(
            f"queries of GMI, published over {case}",
            queries["published"] / queries[case],
            f"{queries['published']:,} against {queries[case]:,}",
            least=LEAST if goal else None,
        )
