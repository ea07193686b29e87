"""The commands `protect` and `release`, about split models."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.ship import release_folder, ship
from frostglass.cli.progress import progress
from frostglass.cli.run import check_machine, check_writable, prepare
from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest
from frostglass.plan.problems import problems
from frostglass.plan.threads import device_problems
from frostglass.store.step import Event
from frostglass.store.store import Store


def protect_settings(
    settings: dict[str, Any],
    store: Path,
    out: Path,
    label: str | None,
    *,
    as_json: bool,
    threads: int | None,
    devices: int | None,
) -> None:
    """Train the split model of a config, or find it in the store, and write client and server."""
    prepare(threads)
    exp = _one(_shipped(experiments(settings)), label)
    check_machine(store)
    check_writable("--out", out)
    for part in ("client", "server"):
        if (out / part).exists():
            raise ConfigError(f"{out / part} exists already: give another --out, or remove it")
    chosen = [(exp.name, exp)]
    if lines := problems(chosen, attacks=False) + device_problems(chosen, devices):
        raise ConfigError(lines)
    with progress() as listener:
        facts = ship(exp, Store(store, listener=listener, devices=devices), out)
    if as_json:
        print(json.dumps(facts))
        return
    size = "×".join(map(str, facts["feature_shape"]))
    utility, plain = facts["utility"], facts["plain_utility"]
    print(f"client: {facts['client']} ({facts['protection']}; {size} numbers leave per image)")
    print(f"the device computes {facts['device_share']:.0%} of the network's multiply-adds")
    print(f"server: {facts['server']} (predicts {', '.join(facts['classes'])})")
    print(
        f"on {utility['images']} held-out images the server reaches MCC {utility['mean_mcc']:.2f}, "
        f"AUC {utility['mean_auc']:.2f}; with plain features {plain['mean_mcc']:.2f} and "
        f"{plain['mean_auc']:.2f}"
    )
    print("to see what an attacker reconstructs from these features: frostglass run CONFIG")


def _shipped(chosen: Sequence[tuple[str, Experiment]]) -> dict[str, Experiment]:
    """Name what can be shipped: experiments that differ in their attacks alone are one."""
    shipped: dict[str, Experiment] = {}
    attack = chosen[0][1].attack
    for label, exp in chosen:
        plain = replace(exp, case="", attack=attack, attacker_prior=None)
        if plain not in shipped.values():
            name = label.removesuffix(f", {exp.case}").removeprefix(f"{exp.case}, ")
            shipped[label if name in shipped else name] = plain
    return shipped


def _one(chosen: dict[str, Experiment], label: str | None) -> Experiment:
    """Pick the experiment to ship."""
    if label is None and len(chosen) > 1:
        raise ConfigError(
            f"expected one experiment, got {len(chosen)}: name one with --only; there are "
            f"{'; '.join(chosen)}"
        )
    if label is not None and label not in chosen:
        raise ConfigError(f"--only: no experiment named {label!r}; {nearest(label, chosen)}")
    exp = next(iter(chosen.values())) if label is None else chosen[label]
    if exp.surface != "features":
        raise ConfigError(
            "target.cut: required to split a model, and not given; name a layer, such as "
            '"stage1", after which features leave the device'
        )
    return exp


def release_features(
    client: Path, images: Path, out: Path, *, seed: int, as_json: bool, threads: int | None
) -> None:
    """Protect the images of a folder with a saved client; a stopped call resumes."""
    prepare(threads)
    if out.exists():
        raise ConfigError(f"{out} exists already: give another --out, or remove it")
    check_writable("--out", out.parent)
    with progress() as listener:

        def report(done: int, total: int, note: str) -> None:
            listener(Event("release", out.stem, "progress", done, total, note))

        listener(Event("release", out.stem, "start"))
        facts = release_folder(client, images, out, seed=seed, on_progress=report)
        listener(Event("release", out.stem, "done"))
    text = f"{out}: features of {facts['images']} images, {tuple(facts['shape'])}"
    print(json.dumps(facts) if as_json else text)
