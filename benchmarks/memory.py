"""What `frostglass check` foresees of a run's memory over what the run took, each in a process of its own, with trainings and searches cut to two steps."""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

LOW, HIGH = 0.8, 1.25
ROOT = Path(__file__).parents[1]
JUDGE = {"model": "cnn", "options": {"width": 8}, "epochs": 1}


def measure() -> Iterator[str]:
    for name in (
        "GMI at 32",
        "LOMMA at 32",
        "GMI at 64",
        "PLG-MI at 64",
        "GMI at 128",
        "GMI on StyleGAN2 at 256",
    ):
        with tempfile.TemporaryDirectory() as folder:
            settings = json.dumps(_settings(name, Path(folder)))
            (said, step), (taken, _) = (
                _child(kind, settings, folder) for kind in ("foresee", "run")
            )
        yield (
            f"memory, {name} pixels: {said / taken:.2f} × measured ({LOW} to {HIGH} wanted); {said / 2**20:,.0f} MiB foreseen ({step}), "
            f"{taken / 2**20:,.0f} MiB taken"
        )


def _child(kind: str, settings: str, folder: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", kind, settings, folder],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def _settings(name: str, folder: Path) -> dict[str, Any]:
    """Published batch sizes, few people: memory depends on how many are looked at together."""
    if name.endswith("32"):
        return _shipped("LOMMA on GMI" if name.startswith("LOMMA") else "GMI")
    short = {"steps": 2, "critic_steps": 1}
    few = {"steps": 2, "candidates": 4, "keep": 1}
    if name == "PLG-MI at 64":
        return _audit(64, "ir152", {"name": "conditional", **short}, {"name": "plgmi", **few})
    if name == "GMI on StyleGAN2 at 256":
        prior = {"name": "stylegan2", "weights": str(_style(folder / "style.safetensors"))}
        attack = {"name": "gmi", "critic_weight": 0.0, **few, "batch": 16}
        data = {
            "name": "folder",
            "private": str(_pictures(folder / "private", 4, 6)),
            "public": str(_pictures(folder / "public", 4, 4)),
            "size": 256,
        }
        return _audit(256, "torchvision:resnet18", prior, attack, batch=16) | {"data": data}
    model, batch = ("vgg16", 64) if name.endswith("64") else ("torchvision:resnet18", 32)
    return _audit(
        int(name.split()[-1]),
        model,
        {"name": "wgan", "batch": batch, **short},
        {"name": "gmi", **few},
    )


def _audit(
    size: int, model: str, prior: dict[str, Any], attack: dict[str, Any], batch: int = 64
) -> dict[str, Any]:
    return {
        "data": {
            "name": "faces",
            "size": min(size, 128),
            "identities": 8,
            "images": 12,
            "public_identities": 64,
            "public_images": 1,
        },
        "target": {"model": model, "epochs": 1, "batch": batch},
        "evaluators": [JUDGE],
        "judging": {"positive_control": False},
        "prior": prior,
        "attack": attack,
    }


def _shipped(case: str) -> dict[str, Any]:
    """One case of configs/faces/attacks.toml on the undefended model."""
    settings = tomllib.loads(
        (ROOT / "configs" / "faces" / "attacks.toml").read_text(encoding="utf-8")
    )
    chosen = next(one for one in settings.pop("grid")["case"] if one["case"] == case)
    settings |= {section: chosen[section] for section in ("prior", "attack") if section in chosen}
    settings["data"]["public_identities"] = 100
    settings["attack"]["steps"] = 2
    for training in (
        settings["target"],
        *settings["evaluators"],
        *([settings["prior"]] if "epochs" in settings["prior"] else []),
    ):
        training["epochs"] = 1
    return settings


def _style(file: Path) -> Path:
    """An untrained StyleGAN2 of the usual size, as `frostglass convert stylegan2` writes one."""
    from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
    from frostglass.networks.stylegan2.nvidia import KIND
    from frostglass.runtime.seeding import seeded
    from frostglass.store.files import write_tensors

    made = StyleSettings(
        resolution=256,
        colours=3,
        z_dim=512,
        w_dim=512,
        layers=8,
        channel_base=16384,
        channel_max=512,
        clamp=None,
    )
    with seeded(0, "benchmark"):
        write_tensors(file, StyleGenerator(made).state_dict(), {KIND: asdict(made)})
    return file


def _pictures(folder: Path, people: int, each: int) -> Path:
    import torch
    from PIL import Image

    rng = torch.Generator().manual_seed(len(folder.name))
    for person in range(people):
        (folder / f"{folder.name} {person}").mkdir(parents=True)
        for number in range(each):
            coarse = torch.randint(256, (8, 8, 3), generator=rng, dtype=torch.uint8)
            Image.fromarray(coarse.numpy()).resize((256, 256)).save(
                folder / f"{folder.name} {person}" / f"{number}.png"
            )
    return folder


def _one(kind: str, settings: dict[str, Any], folder: Path) -> list[Any]:
    """Bytes and the step they are for: foreseen, or taken by a whole run with its report."""
    from frostglass.audit.config import experiments
    from frostglass.audit.grid import run_all, write_run
    from frostglass.cli.work import prepare
    from frostglass.plan.memory import foreseen, most_resident
    from frostglass.report.build import build_report
    from frostglass.store.store import Store

    prepare(None)
    store = Store(folder / "store")
    if kind == "foresee":
        need = foreseen(experiments(settings), store, lambda data: data.counts())
        return [need.bytes, need.unknown or need.step]
    build_report([write_run(run_all(settings, store), folder / "run")], folder / "report.html")
    return [most_resident(), ""]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_one(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))))
