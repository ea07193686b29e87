"""Ships a split model: client and server of an experiment, protected features of a folder."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from frostglass.auditing.experiment import Experiment
from frostglass.auditing.feature_facts import released_facts
from frostglass.auditing.pipeline import expose, split_of
from frostglass.auditing.products import FeatureExposure, ImageBatch
from frostglass.auditing.victims import victims_of
from frostglass.core.errors import ConfigError
from frostglass.data._catalogue import image_files
from frostglass.data._images import read_images
from frostglass.deploy.client import Client, split_model
from frostglass.store.files import Work, write_tensors
from frostglass.store.store import Store


def ship(exp: Experiment, store: Store, out: Path) -> dict[str, Any]:
    """Train or load an experiment's split model and write `client` and `server` below `out`."""
    split = split_of(exp, store)
    exposure = expose(exp, store, split, victims_of(exp, split))
    if not isinstance(exposure, FeatureExposure):
        raise ConfigError("target.cut: required to split a model, and not given")
    device = exposure.device
    client, server = split_model(
        device.target, device.protection, prior=device.prior, amortizer=device.amortizer
    )
    client = replace(client, crop=exp.data.crop_mode())
    facts = released_facts(exposure)
    return {
        "client": str(client.save(out / "client")),
        "server": str(server.save(out / "server")),
        "cut": server.cut,
        "classes": list(server.classes),
        "protection": client.protection.name if client.protection else "plain features",
        "feature_shape": list(server.feature_shape),
        "device_share": facts["facts"]["device_share"],
        "utility": facts["utility"],
        "plain_utility": facts["plain_utility"],
        "relative_deviation": facts["facts"]["relative_deviation"],
    }


def release_folder(
    client: Path,
    folder: Path,
    out: Path,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Write the features that a saved client releases for a folder of images; resumes."""
    device = Client.load(client)
    folder = folder.expanduser()
    files = image_files(folder)
    channels, side, _ = device.image_shape
    pixels = read_images(files, size=side, channels=channels, crop=device.crop)
    images = pixels.float().div_(255)
    # Checkpoints are keyed by images and client, so that another client's are not reused.
    key = hashlib.sha256(ImageBatch.of(images).key.encode())
    for file in sorted(client.iterdir()):
        key.update(hashlib.sha256(file.read_bytes()).digest())
    partial = out.with_name(f".{out.name}.partial")
    work = Work(partial / f"{key.hexdigest()[:24]}-{seed}", on_progress)
    work.folder.mkdir(parents=True, exist_ok=True)
    release = device.release(images, seed=seed, work=work)
    out.parent.mkdir(parents=True, exist_ok=True)
    names = [str(file.relative_to(folder)) for file in files]
    write_tensors(out, {"features": release.features}, {"images": names})
    shutil.rmtree(partial)
    return {
        "features": str(out),
        "images": len(files),
        "shape": list(release.features.shape),
        "facts": [dict(row) for row in release.facts],
    }
