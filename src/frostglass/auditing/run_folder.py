"""The folder of a run: every number, every setting and the images; a report is made from it."""

import csv
import io
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from frostglass.auditing.controls import Controls, worst_identities
from frostglass.auditing.model_file import model_file
from frostglass.auditing.private_facts import attributes_of_people
from frostglass.auditing.products import FeatureExposure
from frostglass.auditing.results import Audit
from frostglass.auditing.run import Run
from frostglass.auditing.run_record import record_run
from frostglass.auditing.trusted import deciding_evaluator, exclusions
from frostglass.core.method import Method
from frostglass.core.pixels import as_bytes
from frostglass.core.types import Target
from frostglass.metrics.accuracy import conventions
from frostglass.metrics.base import Rows, Score
from frostglass.store.files import (
    full_disk_reported,
    ignore_in_git,
    make_private,
    remove_temporaries,
    write_bytes,
)
from frostglass.store.manifest import MANIFEST, seal

RUN_FORMAT = 5
NUMBERS = ("run.json", "rows.csv", "images.safetensors")
FILES = (*NUMBERS, MANIFEST)
PACKAGES = (
    "frostglass", "torch", "torchvision", "timm", "lightning-fabric", "numpy", "scikit-learn",
    "pydantic", "safetensors",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of packages that results depend on, installed extras included."""
    installed = {name: metadata.version(name) for name in PACKAGES}
    with suppress(metadata.PackageNotFoundError):
        installed["opacus"] = metadata.version("opacus")
    return installed


def write_run(result: Run, folder: Path) -> Path:
    """Write run.json, rows.csv and images.safetensors, and last the manifest of their hashes.

    The store that the run used gets a record of them.
    """
    with full_disk_reported(folder):
        make_private(folder)
        ignore_in_git(folder)
        remove_temporaries(folder)
        write_bytes(folder / "images.safetensors", save(_images(result.audits)))
        write_bytes(folder / "rows.csv", _csv(result).encode())
        write_bytes(folder / "run.json", (json.dumps(summary(result), indent=1) + "\n").encode())
        seal(folder, NUMBERS)
        if result.store:
            record_run(result.store, folder, NUMBERS)
    return folder


def summary(result: Run) -> dict[str, Any]:
    """Return everything measured as plain values."""
    first = result.audits[0]
    split, people = first.split, first.reconstructions.labels.tolist()
    return {
        "format": RUN_FORMAT,
        "name": result.name,
        "date": result.date,
        "store": result.store,
        "settings": plain_settings(result.settings),
        "thresholds": None if result.thresholds is None else asdict(result.thresholds),
        "versions": {"python": platform.python_version()} | versions(),
        "threads": torch.get_num_threads(),
        "data": {
            "split": split.key,
            "image_shape": split.train.shape,
            "manifest": dict(split.manifest),
        },
        "identities": [split.classes[label] for label in people],
        "attributes": attributes_of_people(split.train, people),
        # Data without an embedder has fewer; embedders come last, so the others are these.
        "evaluators": _evaluators(max(result.audits, key=lambda audit: len(audit.evaluators))),
        "embedder": _target(first.embedder) if first.embedder else None,
        "audits": [
            _audit(label, audit) | {"file": model_file(audit, result.store)}
            for label, audit in zip(result.labels, result.audits, strict=True)
        ],
        "vacuous": result.vacuous,
        "failed": list(result.failed),
        "not_run": list(result.not_run),
    }


def plain_settings(value: Any) -> Any:
    """Return settings as JSON values; objects given in Python are described as in a config."""
    if isinstance(value, Method):
        return described(value)
    if isinstance(value, dict):
        return {name: plain_settings(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_settings(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def described(method: Method) -> dict[str, Any]:
    """Return a method as a config names it."""
    return {"name": method.name, **asdict(method)}  # type: ignore[call-overload]


def _audit(label: str, audit: Audit) -> dict[str, Any]:
    exp, result, trial = audit.experiment, audit.reconstructions, audit.trial
    prior = exp.attacker_prior or exp.prior
    numbers = range(1, sum(bool(each.classes) for each in audit.evaluators) + 1)
    facts = {
        "label": label,
        "case": exp.case,
        "surface": exp.surface,
        "seed": exp.seed,
        "defenses": [described(defense) for defense in exp.defenses],
        "attack": described(exp.attack),
        "access": list(exp.attack.access),
        "prior": dict(trial.prior.info) if trial.prior else None,
        "baseline": f"draws of {prior.name}" if prior else "public images",
        "target": _target(audit.target),
        "training": _training(audit),
        "split": audit.split.key,
        "evaluators": _evaluators(audit),
        "scores": all_scores(trial.rows),
        "prior_only": all_scores(trial.baseline_rows),
        "summaries": plain_scores(tuple(trial.rows.summaries.values())),
        "prior_only_summaries": plain_scores(tuple(trial.baseline_rows.summaries.values())),
        "conventions": {
            f"evaluator {number}": conventions(trial.rows, number)
            for number in numbers
            if exp.surface == "model"
        },
        "controls": _controls(audit.controls),
        "worst": [
            {"identity": name, "value": value}
            for name, value in worst_identities(
                trial.rows, audit.split.classes, audit.controls.deciding
            )
        ],
        "queries": result.queries,
        "steps": None if result.steps is None else result.steps.double().mean().item(),
        "partial": []
        if result.partial is None
        else [audit.split.classes[i] for i in result.labels[result.partial].tolist()],
        "seconds": result.seconds,
        "keys": {
            "target": audit.target.key,
            "prior": trial.prior.key if trial.prior else None,
            "exposure": trial.exposure.key,
            "attack": result.key,
            "scores": trial.rows.key,
            "prior_only_scores": trial.baseline_rows.key,
            "control_scores": audit.control.rows.key if audit.control else None,
            "control_prior_only_scores": (
                audit.control.baseline_rows.key if audit.control else None
            ),
        },
    }
    return facts | _feature_facts(audit)


def _controls(controls: Controls) -> dict[str, Any]:
    names = ("headline", "lift", "control_lift")
    return asdict(controls) | {name: plain_scores(vars(controls)[name]) for name in names}


def _feature_facts(audit: Audit) -> dict[str, Any]:
    exposure = audit.trial.exposure
    if not isinstance(exposure, FeatureExposure):
        return {"agreement": audit.facts.get("agreement")}
    return {
        "cut": audit.target.cut,
        "attributes": list(audit.target.classes),
        "images_per_person": audit.experiment.judging.images,
        "released": [dict(row) for row in exposure.released.facts],
        "explained": audit.reconstructions.confidence.double().mean().item(),
        **{name: dict(values) for name, values in audit.facts.items()},
    }


def _evaluators(audit: Audit) -> list[dict[str, Any]]:
    """Return each evaluator's facts: how it was calibrated, whether it counts, and decides."""
    pairs = list(zip(audit.evaluators, audit.verifiers, strict=True))
    excluded = exclusions(pairs, audit.experiment.judging)
    return [
        (_target(network) if network.classes else _embedder(network))
        | {
            "kind": "classifier" if network.classes else "embedder",
            "verifier": verifier.facts(),
            "excluded": excluded.get(number, ""),
            "decides": number == deciding_evaluator(pairs, excluded),
        }
        for number, (network, verifier) in enumerate(pairs, 1)
    ]


def _embedder(network: Target) -> dict[str, Any]:
    names = ("model", "parameters")
    return {name: network.info[name] for name in names} | {
        "trained_on": network.info.get("trained_on"),
        "accuracy": None,
        "selected_epoch": None,
        "history": [],
        "key": network.key,
    }


def _target(target: Target) -> dict[str, Any]:
    facts = ("model", "parameters", "accuracy", "selected_epoch", "history")
    given = bool(target.info.get("given"))
    return {name: target.info[name] for name in facts} | {"key": target.key, "given": given}


def _training(audit: Audit) -> dict[str, Any]:
    """Return the target's recipe, its defenses' facts, and its time relative to undefended."""
    info, exp = audit.target.info, audit.experiment
    compared = audit.control if audit.control is not audit.trial else None
    plain = compared.target.info["seconds"] if compared else None
    seconds = None if exp.target.weights else info["seconds"]
    return {
        "recipe": {**asdict(exp.target), "seed": exp.seed},
        "trainable": info.get("trainable"),
        "facts": info.get("facts", {}),
        "strangers_accepted": info.get("strangers_accepted"),
        "first_stage": info.get("first_stage"),
        "seconds": seconds,
        "first_stage_seconds": info.get("stage_seconds"),
        "times_undefended": seconds / plain if seconds and plain else None,
    }


def all_scores(rows: Rows) -> dict[str, Any]:
    """Return all scores; those of recognition also per person, so that models can be compared.

    `first` is the share by the first candidate of each person, `any` by any candidate.
    """
    scores = [rows.score(name) for name in rows.columns]
    plain = plain_scores(scores)
    for score in scores:
        if score.name.startswith(("top1_", "verified_", "strict_")):
            values = rows.columns[score.name].double()
            plain[score.name] |= {
                "by_identity": score.values,
                "first": values[:, 0].mean().item(),
                "any": values.amax(1).mean().item(),
            }
    return plain


def plain_scores(scores: Sequence[Score]) -> dict[str, dict[str, Any]]:
    return {
        score.name: {"value": score.value, "low": score.low, "high": score.high} for score in scores
    }


def _images(audits: Sequence[Audit]) -> dict[str, torch.Tensor]:
    """Return a held-out image of each person (of victims, all of them) and reconstructions."""
    first = audits[0]
    exposure, labels = first.trial.exposure, first.reconstructions.labels
    if isinstance(exposure, FeatureExposure):
        truth = {"victims": exposure.images.pixels[:].unflatten(0, (len(labels), -1)).contiguous()}
    else:
        # Held out: what a reconstruction is compared with should not be what the model memorised.
        held_out = first.split.test
        index = [(held_out.labels == label).nonzero()[0, 0] for label in labels]
        truth = {"private": held_out.pixels[torch.stack(index)]}
    return truth | {
        f"audit.{number}": as_bytes(audit.reconstructions.images).pixels
        for number, audit in enumerate(audits)
    }


def _csv(result: Run) -> str:
    """Return one line per (audit, person, candidate).

    Cells of evaluators that an audit does not have are empty.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    audits = sorted(result.audits, key=lambda audit: -len(audit.evaluators))
    names = list(dict.fromkeys(name for audit in audits for name in audit.rows.columns))
    writer.writerow(["audit", "identity", "candidate", *names])
    for label, audit in zip(result.labels, result.audits, strict=True):
        for row, identity in enumerate(audit.rows.labels.tolist()):
            for candidate in range(audit.reconstructions.images.shape[1]):
                values = {
                    name: f"{column[row, candidate].item():.6g}"
                    for name, column in audit.rows.columns.items()
                }
                cells = [values.get(name, "") for name in names]
                writer.writerow([label, audit.split.classes[identity], candidate, *cells])
    return text.getvalue()
