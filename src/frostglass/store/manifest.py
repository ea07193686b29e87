"""The manifest of a finished step: what made it, and the size and hash of each of its files."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

from frostglass.core.errors import StoreError
from frostglass.store.files import read_json
from frostglass.store.hashing import file_hash

MANIFEST = "manifest.json"


def verify(folder: Path) -> None:
    """Compare the files of a finished step with its manifest."""
    again = f"delete the folder {folder} and run again"
    if not (folder / MANIFEST).is_file():
        raise StoreError(f"{folder} has no {MANIFEST}, so its step is not finished: {again}")
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("key") != folder.name:
        raise StoreError(f"{folder / MANIFEST} does not describe this step: {again}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            raise StoreError(f"{path} is missing or has another size than in the manifest: {again}")
        if file_hash(path) != expected["sha256"]:
            raise StoreError(f"{path} is corrupted, its hash differs from the manifest's: {again}")


def fingerprints(folder: Path) -> dict[str, Any]:
    """Return the size and hash of every file in a result."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """Describe the software and hardware; equal for two runs in one place."""
    cuda = device.type == "cuda"
    return {
        "packages": {
            "frostglass": _version(),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "device": torch.cuda.get_device_name(device) if cuda else f"{device} {platform.machine()}",
        "commit": _commit(),
    }


def _version() -> str | None:
    try:
        return metadata.version("frostglass")
    except metadata.PackageNotFoundError:  # run from its source folder
        return None


def _commit() -> str | None:
    """Return the commit of the checkout, read without git; None for an installed package."""
    git = Path(__file__).resolve().parents[3] / ".git"
    if not (git / "HEAD").is_file():
        return None
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    if (git / name).is_file():
        return (git / name).read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
