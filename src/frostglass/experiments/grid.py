"""Many experiments as one run: a folder with every number, every setting and the pictures, from which a report is made."""

import csv
import io
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from frostglass.errors import RunError
from frostglass.experiments.config import experiments
from frostglass.experiments.controls import worst_identities
from frostglass.experiments.pipeline import Audit, run
from frostglass.experiments.store import Store
from frostglass.files import full_disk_reported, write_bytes
from frostglass.metrics.accuracy import conventions
from frostglass.metrics.base import Rows, Score

RUN_FORMAT = 3
PACKAGES = ("frostglass", "torch", "torchvision", "timm", "lightning-fabric", "numpy", "scikit-learn", "pydantic", "safetensors")


@dataclass(frozen=True)
class Run:
    """The audits of one config, in grid order; `failed` says which are missing, and why."""

    name: str
    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    audits: tuple[Audit, ...]
    failed: tuple[str, ...] = ()

    @property
    def vacuous(self) -> list[str]:
        """Why audits of this run prove nothing; empty for a believable run."""
        return [
            f"{label}: {audit.controls.vacuous}" for label, audit in zip(self.labels, self.audits, strict=True) if audit.controls.vacuous
        ]


def run_all(settings: Mapping[str, Any], store: Store) -> Run:
    """Run every experiment of a config; steps they share run once. One that fails does not take the others along, unless there are none."""
    chosen = experiments(settings)
    done: dict[str, Audit] = {}
    failed: list[str] = []
    for label, experiment in chosen:
        try:
            done[label] = run(experiment, store)
        except RunError as error:
            if len(chosen) == 1:
                raise
            failed.append(f"{label}: {error}")
    if not done:
        raise RunError("; ".join(failed))
    return Run(chosen[0][1].name, settings, tuple(done), tuple(done.values()), tuple(failed))


def versions() -> dict[str, str]:
    """The packages that results depend on, and those of the extras that are installed."""
    installed = {name: metadata.version(name) for name in PACKAGES}
    with suppress(metadata.PackageNotFoundError):
        installed["opacus"] = metadata.version("opacus")
    return installed


def write_run(result: Run, folder: Path) -> Path:
    """Write run.json, rows.csv and pictures.safetensors; every number of a report comes from these."""
    with full_disk_reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "pictures.safetensors", save(_pictures(result.audits)))
        write_bytes(folder / "rows.csv", _csv(result).encode())
        write_bytes(folder / "run.json", (json.dumps(summary(result), indent=1) + "\n").encode())
    return folder


def summary(result: Run) -> dict[str, Any]:
    """Everything measured, as plain values."""
    first = result.audits[0]
    return {
        "format": RUN_FORMAT,
        "name": result.name,
        "settings": dict(result.settings),
        "versions": {"python": platform.python_version()} | versions(),
        "threads": torch.get_num_threads(),
        "data": {"split": first.split.key, "image_shape": first.split.train.shape, "manifest": dict(first.split.manifest)},
        "identities": [first.split.classes[label] for label in first.found.labels.tolist()],
        "evaluators": [target_facts(evaluator) for evaluator in first.evaluators],
        "audits": [_audit(label, audit) for label, audit in zip(result.labels, result.audits, strict=True)],
        "vacuous": result.vacuous,
        "failed": list(result.failed),
    }


def _audit(label: str, audit: Audit) -> dict[str, Any]:
    exp = audit.experiment
    return {
        "label": label,
        "case": exp.case,
        "seed": exp.seed,
        "defenses": [{"name": defense.name, **asdict(defense)} for defense in exp.defenses],  # type: ignore[call-overload]
        "attack": {"name": exp.attack.name, **asdict(exp.attack)},  # type: ignore[call-overload]
        "prior": dict(audit.prior.info),
        "target": target_facts(audit.target),
        "training": _training(audit),
        "split": audit.split.key,
        "evaluators": [target_facts(evaluator) for evaluator in audit.evaluators],
        "scores": _scores(audit.rows),
        "prior_only": _scores(audit.prior_rows),
        "conventions": {f"evaluator {number}": conventions(audit.rows, number) for number in range(1, len(audit.evaluators) + 1)},
        "controls": asdict(audit.controls)
        | {"lift": plain_scores(audit.controls.lift), "control_lift": plain_scores(audit.controls.control_lift)},
        "worst": [{"identity": name, "recognised": value} for name, value in worst_identities(audit.rows, audit.split.classes)],
        "queries": audit.found.queries,
        "steps": None if audit.found.steps is None else audit.found.steps.double().mean().item(),
        "partial": []
        if audit.found.partial is None
        else [audit.split.classes[i] for i in audit.found.labels[audit.found.partial].tolist()],
        "seconds": audit.found.seconds,
        "keys": {"target": audit.target.key, "prior": audit.prior.key, "attack": audit.found.key, "scores": audit.rows.key},
    }


def target_facts(target: Any) -> dict[str, Any]:
    facts = ("model", "parameters", "accuracy", "selected_epoch", "history")
    return {name: target.info[name] for name in facts} | {"key": target.key}


def _training(audit: Audit) -> dict[str, Any]:
    """The recipe of the target, what its defenses tell of it, and how long it took beside the undefended one."""
    info, plain = audit.target.info, audit.undefended
    recipe = {**asdict(audit.experiment.target), "seed": audit.experiment.seed}  # type: ignore[call-overload]
    seconds = None if audit.experiment.target.weights else info["seconds"]
    return {
        "recipe": recipe,
        "trainable": info.get("trainable"),
        "facts": info.get("facts", {}),
        "first_stage": info.get("first_stage"),
        "seconds": seconds,
        "first_stage_seconds": info.get("stage_seconds"),
        "times_undefended": seconds / plain.info["seconds"] if seconds and plain and plain.info["seconds"] else None,
    }


def _scores(rows: Rows) -> dict[str, Any]:
    """All scores; the judges' verdicts also person by person, so that two models can be compared on the same people."""
    scores = [rows.score(name) for name in rows.columns]
    plain = plain_scores(scores)
    return plain | {score.name: plain[score.name] | {"by_identity": score.values} for score in scores if score.name.startswith("top1_")}


def plain_scores(scores: Sequence[Score]) -> dict[str, Any]:
    return {score.name: {"value": score.value, "low": score.low, "high": score.high} for score in scores}


def _pictures(audits: Sequence[Audit]) -> dict[str, torch.Tensor]:
    """The first training picture of each attacked person, and what each audit rebuilt, as bytes."""
    first = audits[0]
    train, labels = first.split.train, first.found.labels
    reference = torch.stack([train.pixels[(train.labels == label).nonzero()[0, 0]] for label in labels])
    rebuilt = {f"audit.{number}": audit.found.images.mul(255).round().to(torch.uint8).contiguous() for number, audit in enumerate(audits)}
    return {"private": reference, **rebuilt}


def _csv(result: Run) -> str:
    """One line per (audit, identity, candidate)."""
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
