"""Many audits of split models as one run: a folder with every number, every setting and the pictures, from which a report is made."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from frostglass.audit.feature_pipeline import FeatureAudit, run_features
from frostglass.audit.features import feature_experiments
from frostglass.audit.grid import (
    Run,
    outline,
    plain_scores,
    rebuilt_pictures,
    run_each,
    target_facts,
    write_files,
)
from frostglass.metrics.base import Rows
from frostglass.store.store import Store

FEATURE_RUN_FORMAT = 1
FeatureRun = Run[FeatureAudit]


def run_all_features(settings: Mapping[str, Any], store: Store) -> FeatureRun:
    """Run every experiment of a config about split models; steps they share run once."""
    return run_each(settings, feature_experiments(settings), run_features, store)


def write_feature_run(result: FeatureRun, folder: Path) -> Path:
    """Write run.json, rows.csv and pictures.safetensors; every number of a report comes from these."""
    return write_files(folder, result, feature_summary(result), _pictures(result))


def feature_summary(result: FeatureRun) -> dict[str, Any]:
    """Everything measured, as plain values."""
    first = result.audits[0]
    return {
        "format": FEATURE_RUN_FORMAT,
        "kind": "features",
        "pictures": first.experiment.judging.pictures,
        "embedder": target_facts(first.embedder),
        "references": dict(first.controls.references),
        **outline(result, _audit),
    }


def _audit(label: str, audit: FeatureAudit) -> dict[str, Any]:
    exp = audit.experiment
    return {
        "label": label,
        "case": exp.case,
        "seed": exp.seed,
        "cut": audit.target.cut,
        "attributes": list(audit.target.classes),
        "defenses": [{"name": defense.name, **asdict(defense)} for defense in exp.defenses],  # type: ignore[call-overload]
        "attack": {"name": exp.attack.name, **asdict(exp.attack)},  # type: ignore[call-overload]
        "granted": list(exp.attack.granted),
        "blind": "public pictures"
        if (prior := exp.attacker_prior or exp.prior) is None
        else f"draws of {prior.name}",  # type: ignore[attr-defined]
        "target": target_facts(audit.target),
        "utility": dict(audit.utility),
        "plain_utility": dict(audit.plain),
        "facts": dict(audit.facts),
        "released": [dict(row) for row in audit.released.facts],
        "scores": _scores(audit.rows),
        "prior_only": _scores(audit.prior_rows),
        "explained": audit.found.confidence.double().mean().item(),
        "controls": asdict(audit.controls)
        | {
            "lift": plain_scores(audit.controls.lift),
            "control_lift": plain_scores(audit.controls.control_lift),
        },
        "queries": audit.found.queries,
        "seconds": audit.found.seconds,
        "keys": {
            "target": audit.target.key,
            "released": audit.released.key,
            "attack": audit.found.key,
            "scores": audit.rows.key,
        },
    }


def _scores(rows: Rows) -> dict[str, Any]:
    return plain_scores([rows.score(name) for name in rows.columns])


def _pictures(result: FeatureRun) -> dict[str, torch.Tensor]:
    """The victims' pictures, person by person, and what each audit rebuilt of them, as bytes."""
    first = result.audits[0]
    victims = first.victims.pixels.unflatten(0, (len(first.found.labels), -1)).contiguous()
    return {"victims": victims, **rebuilt_pictures(result.audits)}
