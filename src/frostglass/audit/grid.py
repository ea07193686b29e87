"""Many experiments as one run: a folder with every number, every setting and the pictures, from which a report is made."""

import csv
import io
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors.torch import save

from frostglass.audit.config import experiments
from frostglass.audit.controls import worst_identities
from frostglass.audit.pipeline import Audit, run
from frostglass.core.errors import DataError, RunError
from frostglass.core.types import Reconstructions, Split
from frostglass.metrics.accuracy import conventions
from frostglass.metrics.base import Rows, Score
from frostglass.store.files import full_disk_reported, write_bytes
from frostglass.store.store import Store

RUN_FORMAT = 3
PACKAGES = (
    "frostglass",
    "torch",
    "torchvision",
    "timm",
    "lightning-fabric",
    "numpy",
    "scikit-learn",
    "pydantic",
    "safetensors",
)


A = TypeVar("A", bound="Weighed")
E = TypeVar("E")


class Weighed(Protocol):
    """An audit of any kind: its rows and pictures, and what its controls say."""

    @property
    def split(self) -> Split: ...

    @property
    def found(self) -> Reconstructions: ...

    @property
    def rows(self) -> Rows: ...

    @property
    def controls(self) -> Any: ...


@dataclass(frozen=True)
class Run(Generic[A]):
    """The audits of one config, in grid order; `failed` says which are missing, and why."""

    name: str
    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    audits: tuple[A, ...]
    failed: tuple[str, ...] = ()

    @property
    def vacuous(self) -> list[str]:
        """Why audits of this run prove nothing; empty for a believable run."""
        return [
            f"{label}: {audit.controls.vacuous}"
            for label, audit in zip(self.labels, self.audits, strict=True)
            if audit.controls.vacuous
        ]


def run_all(settings: Mapping[str, Any], store: Store) -> Run[Audit]:
    """Run every experiment of a config; steps they share run once. One that fails does not take the others along, unless there are none."""
    return run_each(settings, experiments(settings), run, store)


def run_each(
    settings: Mapping[str, Any],
    chosen: Sequence[tuple[str, E]],
    run_one: Callable[[E, Store], A],
    store: Store,
) -> Run[A]:
    """Run experiments of any kind, by their labels."""
    done: dict[str, A] = {}
    failed: list[str] = []
    for label, experiment in chosen:
        try:
            done[label] = run_one(experiment, store)
        except (RunError, DataError) as error:
            if len(chosen) == 1:
                raise
            failed.append(f"{label}: {error}")
    if not done:
        raise RunError("; ".join(failed))
    return Run(chosen[0][1].name, settings, tuple(done), tuple(done.values()), tuple(failed))  # type: ignore[attr-defined]


def versions() -> dict[str, str]:
    """The packages that results depend on, and those of the extras that are installed."""
    installed = {name: metadata.version(name) for name in PACKAGES}
    with suppress(metadata.PackageNotFoundError):
        installed["opacus"] = metadata.version("opacus")
    return installed


def write_run(result: Run[Audit], folder: Path) -> Path:
    """Write run.json, rows.csv and pictures.safetensors; every number of a report comes from these."""
    return write_files(folder, result, summary(result), _pictures(result.audits))


def write_files(
    folder: Path, result: Run[Any], facts: Mapping[str, Any], pictures: dict[str, torch.Tensor]
) -> Path:
    """Write the folder of a run of any kind."""
    with full_disk_reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "pictures.safetensors", save(pictures))
        write_bytes(folder / "rows.csv", _csv(result).encode())
        write_bytes(folder / "run.json", (json.dumps(facts, indent=1) + "\n").encode())
    return folder


def summary(result: Run[Audit]) -> dict[str, Any]:
    """Everything measured, as plain values."""
    return {"format": RUN_FORMAT, **outline(result, _audit)}


def outline(result: Run[A], facts_of: Callable[[str, A], dict[str, Any]]) -> dict[str, Any]:
    """What the summary of a run of any kind holds: where its numbers come from, and each audit in its own words."""
    first: Any = result.audits[0]
    return {
        "name": result.name,
        "settings": dict(result.settings),
        "versions": {"python": platform.python_version()} | versions(),
        "threads": torch.get_num_threads(),
        "data": {
            "split": first.split.key,
            "image_shape": first.split.train.shape,
            "manifest": dict(first.split.manifest),
        },
        "identities": [first.split.classes[label] for label in first.found.labels.tolist()],
        "evaluators": [target_facts(evaluator) for evaluator in first.evaluators],
        "audits": [
            facts_of(label, audit)
            for label, audit in zip(result.labels, result.audits, strict=True)
        ],
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
        "conventions": {
            f"evaluator {number}": conventions(audit.rows, number)
            for number in range(1, len(audit.evaluators) + 1)
        },
        "controls": asdict(audit.controls)
        | {
            "lift": plain_scores(audit.controls.lift),
            "control_lift": plain_scores(audit.controls.control_lift),
        },
        "worst": [
            {"identity": name, "recognised": value}
            for name, value in worst_identities(audit.rows, audit.split.classes)
        ],
        "queries": audit.found.queries,
        "steps": None if audit.found.steps is None else audit.found.steps.double().mean().item(),
        "partial": []
        if audit.found.partial is None
        else [audit.split.classes[i] for i in audit.found.labels[audit.found.partial].tolist()],
        "seconds": audit.found.seconds,
        "keys": {
            "target": audit.target.key,
            "prior": audit.prior.key,
            "attack": audit.found.key,
            "scores": audit.rows.key,
        },
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
        "times_undefended": seconds / plain.info["seconds"]
        if seconds and plain and plain.info["seconds"]
        else None,
    }


def _scores(rows: Rows) -> dict[str, Any]:
    """All scores; the judges' verdicts also person by person, so that two models can be compared on the same people."""
    scores = [rows.score(name) for name in rows.columns]
    plain = plain_scores(scores)
    return plain | {
        score.name: plain[score.name] | {"by_identity": score.values}
        for score in scores
        if score.name.startswith("top1_")
    }


def plain_scores(scores: Sequence[Score]) -> dict[str, Any]:
    return {
        score.name: {"value": score.value, "low": score.low, "high": score.high} for score in scores
    }


def _pictures(audits: Sequence[Audit]) -> dict[str, torch.Tensor]:
    """The first training picture of each attacked person, and what each audit rebuilt, as bytes."""
    first = audits[0]
    train, labels = first.split.train, first.found.labels
    reference = torch.stack(
        [train.pixels[(train.labels == label).nonzero()[0, 0]] for label in labels]
    )
    return {"private": reference, **rebuilt_pictures(audits)}


def rebuilt_pictures(audits: Sequence[Weighed]) -> dict[str, torch.Tensor]:
    """What each audit rebuilt, as bytes."""
    return {
        f"audit.{number}": audit.found.images.mul(255).round().to(torch.uint8).contiguous()
        for number, audit in enumerate(audits)
    }


def _csv(result: Run[Any]) -> str:
    """One line per (audit, identity, candidate)."""
    text = io.StringIO()
    writer = csv.writer(text)
    names = list(result.audits[0].rows.columns)
    writer.writerow(["audit", "identity", "candidate", *names])
    for label, audit in zip(result.labels, result.audits, strict=True):
        for row, identity in enumerate(audit.rows.labels.tolist()):
            for candidate in range(audit.found.images.shape[1]):
                values = [
                    f"{audit.rows.columns[name][row, candidate].item():.6g}" for name in names
                ]
                writer.writerow([label, audit.split.classes[identity], candidate, *values])
    return text.getvalue()
