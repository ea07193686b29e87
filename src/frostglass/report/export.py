"""Exports the model of a run as a folder for a hub: weights, description and a model card."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from frostglass.auditing.steps import TARGET
from frostglass.core.errors import ConfigError, StoreError
from frostglass.core.registry import nearest
from frostglass.core.types import Target
from frostglass.models.checkpoint import load_target, save_target
from frostglass.report.card import document
from frostglass.report.load import Run, read_run
from frostglass.report.seeds import Share
from frostglass.store.files import full_disk_reported, write_bytes
from frostglass.store.manifest import verify
from frostglass.training.build import rebuild_network

CARD = "README.md"
# What a hub reads of a card; it must come first.
FRONT = """\
---
library_name: frostglass
pipeline_tag: image-classification
tags:
- privacy
- model-inversion
---
"""
ADVICE = "`frostglass protect` writes the client and the server of a split model"


def export_run(
    run: Path,
    out: Path,
    *,
    only: str | None = None,
    store: Path | None = None,
    redact: bool = False,
) -> dict[str, Any]:
    """Write the model that a run attacked to a folder, with the numbers of its audits.

    Args:
        only: label of an audit, to choose among several models.
        store: where the run's steps are, by default where they were made.
        redact: number the classes instead of naming the private people.
    """
    found = read_run(run)
    if found.facts.surface == "features":
        raise ConfigError(f"{run} is about features that leave a device: {ADVICE}")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty: name a new folder")
    audits: list[dict[str, Any]] = found.document["audits"]
    key = _chosen(audits, only)
    mine = [audit for audit in audits if audit["keys"]["target"] == key]
    target = _target(store or Path(found.document["store"]), key)
    if redact:
        names = tuple(f"person {number}" for number in range(1, len(target.classes) + 1))
        target = replace(target, classes=names)
    with full_disk_reported(out):
        out.mkdir(parents=True, exist_ok=True)
        save_target(target, out)
        write_bytes(out / CARD, (FRONT + _card(found, mine, target, named=not redact)).encode())
    return {"folder": str(out), "target": key, "audits": [audit["label"] for audit in mine]}


def _chosen(audits: Sequence[Mapping[str, Any]], only: str | None) -> str:
    """Return the key of the model to export."""
    labels = {audit["label"]: audit["keys"]["target"] for audit in audits}
    if only is not None:
        if only not in labels:
            raise ConfigError(f"--only: no audit is labelled {only!r}: {nearest(only, labels)}")
        return str(labels[only])
    if len(set(labels.values())) > 1:
        raise ConfigError(
            f"the run attacked {len(set(labels.values()))} models: choose one by the label of an "
            f"audit, --only LABEL; labels: {', '.join(labels)}"
        )
    return str(next(iter(labels.values())))


def _target(store: Path, key: str) -> Target:
    folder = store / TARGET.name / key
    if not folder.is_dir():
        raise StoreError(
            f"the model {key} is not in the store {store}: give --store the folder of the run's "
            "store, or run the same command again"
        )
    verify(folder)
    return load_target(folder, rebuild_network)


def _card(run: Run, audits: Sequence[Mapping[str, Any]], target: Target, *, named: bool) -> str:
    document_of_run = run.document
    size = "×".join(map(str, target.image_shape))
    defenses = " + ".join(each["name"] for each in audits[0]["defenses"]) or "no defense"
    accuracy = target.info["accuracy"]["test"]
    opening = [
        f"# {document_of_run['name']}",
        "",
        f"A classifier of {len(target.classes)} people ({target.info['model']}, images of {size}, "
        f"values in 0 to 1), trained with {defenses}. It classifies {accuracy:.1%} of held-out "
        "images correctly.",
    ]
    decides = next(each for each in audits[0]["evaluators"] if each["decides"])
    rate = decides["verifier"]["rates"][0]
    measured = [
        "## What its audits measured",
        "",
        f"Verified: {decides['model']} takes the reconstruction for the person at a false-accept "
        f"rate of {rate:.1%}. Prior-only: the same for draws of the attacker's generator, made "
        "without asking the model. Intervals are 95 % over people.",
        "",
        "| attack | people | verified | prior-only | verdict |",
        "|---|---|---|---|---|",
        *(_line(audit, document_of_run) for audit in audits),
    ]
    return document(opening, measured, "model", named=named)


def _line(audit: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    name = audit["controls"]["deciding"]
    ours, drawn = (_share(audit[part][name]) for part in ("scores", "prior_only"))
    vacuous = audit["controls"]["vacuous"]
    verdict = f"proves nothing: {vacuous}" if vacuous else "believable"
    attack = audit["case"] or audit["attack"]["name"]
    return f"| {attack} | {len(run['identities'])} | {ours} | {drawn} | {verdict} |"


def _share(score: Mapping[str, float]) -> Share:
    return Share(score["value"], score["low"], score["high"])
