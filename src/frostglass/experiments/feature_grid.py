"""Many audits of split models as one run: a folder with every number, every setting and the pictures, from which a report is made."""

import csv
import io
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from frostglass.errors import RunError
from frostglass.experiments.feature_pipeline import FeatureAudit, run_features
from frostglass.experiments.features import feature_experiments
from frostglass.experiments.grid import plain_scores, target_facts, versions
from frostglass.experiments.store import Store
from frostglass.files import full_disk_reported, write_bytes
from frostglass.metrics.base import Rows

FEATURE_RUN_FORMAT = 1


@dataclass(frozen=True)
class FeatureRun:
    """The audits of one config, in grid order; `failed` says which are missing, and why."""

    name: str
    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    audits: tuple[FeatureAudit, ...]
    failed: tuple[str, ...] = ()

    @property
    def vacuous(self) -> list[str]:
        """Why audits of this run prove nothing; empty for a believable run."""
        return [
            f"{label}: {audit.controls.vacuous}" for label, audit in zip(self.labels, self.audits, strict=True) if audit.controls.vacuous
        ]


def run_all_features(settings: Mapping[str, Any], store: Store) -> FeatureRun:
    """Run every experiment of a config; steps they share run once. One that fails does not take the others along, unless there are none."""
    chosen = feature_experiments(settings)
    done: dict[str, FeatureAudit] = {}
    failed: list[str] = []
    for label, experiment in chosen:
        try:
            done[label] = run_features(experiment, store)
        except RunError as error:
            if len(chosen) == 1:
                raise
            failed.append(f"{label}: {error}")
    if not done:
        raise RunError("; ".join(failed))
    return FeatureRun(chosen[0][1].name, settings, tuple(done), tuple(done.values()), tuple(failed))


def write_feature_run(result: FeatureRun, folder: Path) -> Path:
    """Write run.json, rows.csv and pictures.safetensors; every number of a report comes from these."""
    with full_disk_reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "pictures.safetensors", save(_pictures(result)))
        write_bytes(folder / "rows.csv", _csv(result).encode())
        write_bytes(folder / "run.json", (json.dumps(feature_summary(result), indent=1) + "\n").encode())
    return folder


def feature_summary(result: FeatureRun) -> dict[str, Any]:
    """Everything measured, as plain values."""
    first = result.audits[0]
    return {
        "format": FEATURE_RUN_FORMAT,
        "kind": "features",
        "name": result.name,
        "settings": dict(result.settings),
        "versions": {"python": platform.python_version()} | versions(),
        "threads": torch.get_num_threads(),
        "data": {"split": first.split.key, "image_shape": first.split.train.shape, "manifest": dict(first.split.manifest)},
        "identities": [first.split.classes[label] for label in first.found.labels.tolist()],
        "pictures": first.experiment.judging.pictures,
        "evaluators": [target_facts(evaluator) for evaluator in first.evaluators],
        "embedder": target_facts(first.embedder),
        "references": dict(first.controls.references),
        "audits": [_audit(label, audit) for label, audit in zip(result.labels, result.audits, strict=True)],
        "vacuous": result.vacuous,
        "failed": list(result.failed),
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
        "blind": "public pictures" if (prior := exp.attacker_prior or exp.prior) is None else f"draws of {prior.name}",  # type: ignore[attr-defined]
        "target": target_facts(audit.target),
        "utility": dict(audit.utility),
        "plain_utility": dict(audit.plain),
        "facts": dict(audit.facts),
        "released": [dict(row) for row in audit.released.facts],
        "scores": _scores(audit.rows),
        "prior_only": _scores(audit.prior_rows),
        "explained": audit.found.confidence.double().mean().item(),
        "controls": asdict(audit.controls)
        | {"lift": plain_scores(audit.controls.lift), "control_lift": plain_scores(audit.controls.control_lift)},
        "queries": audit.found.queries,
        "seconds": audit.found.seconds,
        "keys": {"target": audit.target.key, "released": audit.released.key, "attack": audit.found.key, "scores": audit.rows.key},
    }


def _scores(rows: Rows) -> dict[str, Any]:
    return plain_scores([rows.score(name) for name in rows.columns])


def _pictures(result: FeatureRun) -> dict[str, torch.Tensor]:
    """The victims' pictures, person by person, and what each audit rebuilt of them, as bytes."""
    first = result.audits[0]
    victims = first.victims.pixels.unflatten(0, (len(first.found.labels), -1)).contiguous()
    rebuilt = {
        f"audit.{number}": audit.found.images.mul(255).round().to(torch.uint8).contiguous() for number, audit in enumerate(result.audits)
    }
    return {"victims": victims, **rebuilt}


def _csv(result: FeatureRun) -> str:
    """One line per (audit, person, candidate)."""
    text = io.StringIO()
    writer = csv.writer(text)
    names = list(result.audits[0].rows.columns)
    writer.writerow(["audit", "identity", "candidate", *names])
    for label, audit in zip(result.labels, result.audits, strict=True):
        for row, identity in enumerate(audit.rows.labels.tolist()):
            for candidate in range(audit.found.images.shape[1]):
                values = [f"{audit.rows.columns[name][row, candidate].item():.6g}" for name in names]
                writer.writerow([label, audit.split.classes[identity], candidate, *values])
    return text.getvalue()
