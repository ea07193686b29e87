"""What the commands do about split models: audit features, make a client and a server, release features."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from frostglass.audit.feature_grid import feature_summary, run_all_features, write_feature_run
from frostglass.audit.feature_pipeline import (
    Pictures,
    device_of_experiment,
    usefulness,
    victims_of_experiment,
)
from frostglass.audit.features import FeatureExperiment, feature_experiments
from frostglass.audit.pipeline import SPLIT, fingerprint
from frostglass.cli.progress import Bars
from frostglass.cli.work import (
    check_machine,
    check_writable,
    conclude,
    console,
    prepare,
    print_costs,
    run_folder,
)
from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest
from frostglass.data._images import read_images
from frostglass.data.folder import pictures_in
from frostglass.deploy.client import Client, split_model
from frostglass.plan.feature_cost import feature_problems
from frostglass.plan.feature_estimate import feature_estimate
from frostglass.store.files import Work, write_tensors
from frostglass.store.store import Event, Store


def ready(settings: dict[str, Any], store: Path) -> list[tuple[str, FeatureExperiment]]:
    """The experiments of a config, after everything that can be refused without computing has been."""
    chosen = feature_experiments(settings)
    check_machine(store)
    if found := feature_problems(chosen):
        raise ConfigError(found)
    return chosen


def run_feature_settings(
    settings: dict[str, Any],
    store: Path,
    out: Path | None,
    *,
    as_json: bool,
    threads: int | None,
    redact: bool,
) -> None:
    """Run a config about split models, write its run folder and report, print the scores; fails when an audit proves nothing."""
    prepare(threads)
    folder = run_folder(out, ready(settings, store)[0][1].name)
    with Bars() as bars:
        result = run_all_features(settings, Store(store, listener=bars))
    conclude(
        result,
        folder,
        store,
        write_feature_run,
        feature_summary,
        _print_scores,
        as_json=as_json,
        redact=redact,
    )


def _print_scores(facts: dict[str, Any]) -> None:
    judges = [f"top1_{number}" for number in range(1, len(facts["evaluators"]) + 1)]
    title = (
        f"{facts['name']}: {facts['pictures']} pictures each of {len(facts['identities'])} people"
    )
    table = Table(title=title, title_justify="left")
    columns = (
        "audit",
        "MCC",
        "AUC",
        "similarity (95 %)",
        *(f"judge {number}" for number in range(1, len(judges) + 1)),
        "SSIM",
        "blind",
        "queries",
        "seconds",
    )
    for column in columns:
        # A long label wraps; a figure never loses a digit.
        table.add_column(
            column,
            justify="left" if column == "audit" else "right",
            no_wrap=column != "audit",
            overflow="fold",
        )
    for audit in facts["audits"]:
        scores, similarity = audit["scores"], audit["scores"]["similarity"]
        table.add_row(
            audit["label"],
            f"{audit['utility']['mean_mcc']:.2f}",
            f"{audit['utility']['mean_auc']:.2f}",
            f"{similarity['value']:.2f} ({similarity['low']:.2f} to {similarity['high']:.2f})",
            *(f"{scores[judge]['value']:.0%}" for judge in judges),
            f"{scores['ssim']['value']:.2f}",
            f"{audit['prior_only']['similarity']['value']:.2f}",
            f"{audit['queries']:,}",
            f"{audit['seconds']:.0f}",
        )
    console(140).print(table)
    reference = facts["references"]
    print(
        f"similarity: cosine of what is rebuilt with the victim's own picture; {reference['same_person']:.2f} for two photos of one person, "
        f"{reference['different_people']:.2f} for two people; blind: the same for draws without any feature"
    )
    print(
        "MCC, AUC: what the server still tells of the pictures, mean over attributes; judge N: rebuilt people it recognises"
    )
    accuracy = ", ".join(
        f"{judge['model']} {judge['accuracy']['test']:.1%}" for judge in facts["evaluators"]
    )
    print(f"judges' own accuracy on held-out pictures: {accuracy}")
    warnings = dict.fromkeys(
        warning for audit in facts["audits"] for warning in audit["controls"]["warnings"]
    )
    for warning in warnings:
        print(f"note: {warning}")


def check_feature_settings(settings: dict[str, Any], store: Path, *, as_json: bool) -> None:
    """Parse a config about split models and estimate its cost; a config with problems raises them all."""
    print_costs(feature_estimate(ready(settings, store), Store(store)), as_json=as_json)


def protect_settings(
    settings: dict[str, Any],
    store: Path,
    out: Path,
    label: str | None,
    *,
    as_json: bool,
    threads: int | None,
) -> None:
    """Train the split model of a config, or find it in the store, and write its two halves: a client that protects and a server that answers."""
    prepare(threads)
    chosen = dict(feature_experiments(settings))
    if label is None and len(chosen) > 1:
        raise ConfigError(
            f"the config has {len(chosen)} experiments, and one can be shipped: name it with --only; there are {'; '.join(chosen)}"
        )
    if label is not None and label not in chosen:
        raise ConfigError(f"--only: no experiment named {label!r}; {nearest(label, chosen)}")
    exp = chosen[label] if label is not None else next(iter(chosen.values()))
    check_machine(store)
    check_writable("--out", out)
    for part in ("client", "server"):
        if (out / part).exists():
            raise ConfigError(f"{out / part} is there already: give another --out, or remove it")
    if found := feature_problems([(exp.name, exp)], shipped=True):
        raise ConfigError(found)
    with Bars() as bars:
        kept = Store(store, listener=bars)
        split = kept.step(SPLIT, exp.data, exp.split, fingerprint(exp.data), seed=exp.seed)
        _, victims = victims_of_experiment(exp, split)
        device = device_of_experiment(exp, kept, split)
        useful, plain, facts = usefulness(
            device, victims, device.release(Pictures.of(victims.floats()))
        )
    client, server = split_model(
        device.target, device.protection, prior=device.prior, amortizer=device.amortizer
    )
    client = replace(client, crop=getattr(exp.data, "crop", client.crop))
    told = {
        "client": str(client.save(out / "client")), "server": str(server.save(out / "server")), "cut": server.cut,
        "feature_shape": list(server.feature_shape), "utility": useful, "plain_utility": plain, "relative_deviation": facts["relative_deviation"],
    }  # fmt: skip
    if as_json:
        print(json.dumps(told))
        return
    size = "×".join(map(str, server.feature_shape))
    print(
        f"client: {told['client']} ({client.protection.name if client.protection else 'plain features'}; {size} numbers leave for each picture)"
    )
    print(f"server: {told['server']} (answers {', '.join(server.classes)})")
    print(
        f"on {useful['pictures']} held-out pictures the server reaches MCC {useful['mean_mcc']:.2f}, AUC {useful['mean_auc']:.2f}; "
        f"with plain features {plain['mean_mcc']:.2f} and {plain['mean_auc']:.2f}"
    )
    print("what an attacker rebuilds of these features: frostglass run the same config")


def release_features(
    client: Path, pictures: Path, out: Path, *, seed: int, as_json: bool, threads: int | None
) -> None:
    """Protect the pictures of a folder with a saved client; a call that was stopped goes on where it was."""
    prepare(threads)
    if out.exists():
        raise ConfigError(f"{out} is there already: give another --out, or remove it")
    check_writable("--out", out.parent)
    device = Client.load(client)
    pictures = pictures.expanduser()
    files = pictures_in(pictures)
    channels, side, _ = device.image_shape
    images = read_images(files, size=side, channels=channels, crop=device.crop).float().div_(255)
    partial = out.with_name(f".{out.name}.partial")
    parts = (
        file.read_bytes() for file in sorted(client.iterdir())
    )  # what another client has finished must not be taken for this one's
    key = hashlib.sha256(
        Pictures.of(images).key.encode() + b"".join(hashlib.sha256(part).digest() for part in parts)
    ).hexdigest()[:24]
    with Bars() as bars:
        folder = partial / f"{key}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        work = Work(
            folder,
            lambda done, total, note: bars(Event("release", key, "progress", done, total, note)),
        )
        made = device.release(images, seed=seed, work=work)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(
        out,
        {"features": made.features},
        {"pictures": [str(file.relative_to(pictures)) for file in files]},
    )
    shutil.rmtree(partial)
    told = {
        "features": str(out),
        "pictures": len(files),
        "shape": list(made.features.shape),
        "facts": [dict(row) for row in made.facts],
    }
    print(
        json.dumps(told)
        if as_json
        else f"{out}: features of {len(files)} pictures, {tuple(made.features.shape)}"
    )
