"""The memory estimate of `frostglass check` over the measured peak of a run.

Each runs in a process of its own, with trainings and searches cut to two steps.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measured import Measured

LOW, HIGH = 0.8, 1.25
ROOT = Path(__file__).parents[1]
EVALUATOR = {"model": "cnn", "options": {"width": 8}, "epochs": 1}
CASES = (
    "GMI at 32",
    "LOMMA at 32",
    "GMI at 64",
    "PLG-MI at 64",
    "GMI at 128",
    "GMI on StyleGAN2 at 256",
)


def measure() -> Iterator[Measured]:
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            settings = json.dumps(_settings(name, Path(folder)))
            estimated, step = _child("estimate", settings, folder)
            measured, _ = _child("run", settings, folder)
        yield Measured(
            f"memory, {name} pixels, estimated over measured",
            estimated / measured,
            f"{estimated:,.0f} MiB ({step}) against {measured:,.0f} MiB",
            least=LOW,
            most=HIGH,
        )


def _child(kind: str, settings: str, folder: str) -> tuple[float, str]:
    command = [sys.executable, "-m", "benchmarks.memory", kind, settings, folder]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    mib, step = json.loads(done.stdout)
    return mib, step


def _settings(name: str, folder: Path) -> dict[str, Any]:
    """Return published batch sizes with few people: memory depends on the batch."""
    if name.endswith("32"):
        return _shipped("LOMMA on GMI" if name.startswith("LOMMA") else "GMI")
    short = {"steps": 2, "critic_steps": 1}
    few = {"steps": 2, "candidates": 4, "keep": 1}
    if name == "PLG-MI at 64":
        return _audit(64, "ir152", {"name": "conditional", **short}, {"name": "plgmi", **few})
    if name == "GMI on StyleGAN2 at 256":
        weights = str(_stylegan2(folder / "style.safetensors"))
        prior: dict[str, Any] = {"name": "stylegan2", "weights": weights}
        attack = {"name": "gmi", "critic_weight": 0.0, **few, "batch": 16}
        data = {
            "name": "folder",
            "private": str(_write_images(folder / "private", 4, 6)),
            "public": str(_write_images(folder / "public", 4, 4)),
            "size": 256,
        }
        return _audit(256, "torchvision:resnet18", prior, attack, batch=16) | {"data": data}
    model, batch = ("vgg16", 64) if name.endswith("64") else ("torchvision:resnet18", 32)
    prior = {"name": "wgan", "batch": batch, **short}
    return _audit(int(name.split()[-1]), model, prior, {"name": "gmi", **few})


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
        "evaluators": [EVALUATOR],
        "judging": {"positive_control": False},
        "prior": prior,
        "attack": attack,
    }


def _shipped(case: str) -> dict[str, Any]:
    """Return one case of configs/faces/attacks.toml on the undefended model."""
    path = ROOT / "configs" / "faces" / "attacks.toml"
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    chosen = next(each for each in settings.pop("grid")["case"] if each["case"] == case)
    settings |= {section: chosen[section] for section in ("prior", "attack") if section in chosen}
    settings["data"]["public_identities"] = 100
    settings["attack"]["steps"] = 2
    for trained in (settings["target"], *settings["evaluators"], settings["prior"]):
        if "epochs" in trained:
            trained["epochs"] = 1
    return settings


def _stylegan2(file: Path) -> Path:
    """Write an untrained StyleGAN2 of the usual size, as `frostglass convert stylegan2` does."""
    from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
    from frostglass.networks.stylegan2.nvidia import KIND
    from frostglass.runtime.seeding import seeded
    from frostglass.store.files import write_tensors

    settings = StyleSettings(
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
        write_tensors(file, StyleGenerator(settings).state_dict(), {KIND: asdict(settings)})
    return file


def _write_images(folder: Path, people: int, each: int) -> Path:
    import torch
    from PIL import Image

    rng = torch.Generator().manual_seed(len(folder.name))
    for person in range(people):
        own = folder / f"{folder.name} {person}"
        own.mkdir(parents=True)
        for number in range(each):
            coarse = torch.randint(256, (8, 8, 3), generator=rng, dtype=torch.uint8)
            Image.fromarray(coarse.numpy()).resize((256, 256)).save(own / f"{number}.png")
    return folder


def _one(kind: str, settings: dict[str, Any], folder: Path) -> tuple[float, str]:
    """Return MiB and the step they are for: estimated, or measured over a run and its report."""
    from frostglass import Store, build_report, estimate, experiments, run_all, write_run
    from frostglass.runtime.memory import keep_freed_memory, most_resident

    keep_freed_memory()  # as the command line does
    store = Store(folder / "store")
    if kind == "estimate":
        cost = estimate(experiments(settings), store)
        return cost["memory_mib"], cost["memory_unknown"] or cost["memory_step"]
    build_report([write_run(run_all(settings, store), folder / "run")], folder / "report.html")
    return most_resident() / 2**20, ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_one(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))))
