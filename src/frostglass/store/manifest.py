"""Manifests: what made a step, and the size and hash of each of its files.

Runs and clients, which leave the store, have a manifest of hashes alone.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

from frostglass.core.errors import StoreError
from frostglass.store.files import read_json, write_json
from frostglass.store.hashing import file_hash

MANIFEST = "manifest.json"
NAMES = {"cpu": "CPU capability", "torch": "torch version"}


def verify(folder: Path) -> dict[str, Any]:
    """Compare the files of a finished step with its manifest; return the manifest."""
    again = f"delete the folder {folder} and run again"
    if not (folder / MANIFEST).is_file():
        raise StoreError(f"{folder} has no {MANIFEST}, so its step is not finished: {again}")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("key") != folder.name:
        raise StoreError(f"{folder / MANIFEST} does not describe this step: {again}")
    if problem := _difference(folder, manifest):
        raise StoreError(f"{problem}: {again}")
    return manifest


def seal(folder: Path, names: Sequence[str]) -> None:
    """Write the manifest of files that leave the store, such as those of a run or a client."""
    write_json(folder / MANIFEST, {"files": {name: _fingerprint(folder / name) for name in names}})


def broken_seal(folder: Path, names: Sequence[str]) -> str:
    """Say how files differ from the manifest that `seal` wrote; "" if they do not."""
    if not (folder / MANIFEST).is_file():
        return f"{folder} has no {MANIFEST}, so its files cannot be verified"
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        return f"{folder / MANIFEST} lists no files"
    if others := sorted(set(files) ^ set(names)):
        return f"{folder} and its {MANIFEST} do not both have {others[0]}"
    return _difference(folder, manifest)


def _difference(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Say which file of a folder differs from its manifest; "" if none does."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
        return f"{folder / MANIFEST} lists no files"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected.get("bytes"):
            return f"{path} is missing or has another size than in the manifest"
        if file_hash(path) != expected.get("sha256"):
            return f"{path} is corrupted or was edited, its hash differs from the manifest's"
    return ""


def fingerprints(folder: Path) -> dict[str, Any]:
    """Return the size and hash of every file in a result."""
    return {
        path.relative_to(folder).as_posix(): _fingerprint(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


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


def conditions() -> dict[str, Any]:
    """Return what the last bits of a result depend on, and its key does not."""
    return {
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def conditions_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions under which a step was made; older manifests have the torch version."""
    packages = manifest.get("packages")
    torch_version = packages.get("torch") if isinstance(packages, dict) else None
    made_under = manifest.get("conditions") or [{"torch": torch_version}]
    # The manifest lists hashes of other files only, so it may be damaged in any way itself.
    if isinstance(made_under, list) and all(isinstance(each, dict) for each in made_under):
        return made_under
    return unknown_conditions()


def unknown_conditions() -> list[dict[str, Any]]:
    """Return what to record for a step whose conditions were lost; a run with others warns."""
    return [dict.fromkeys(conditions(), "unknown")]


def differing(made_under: Iterable[Mapping[str, Any]]) -> str:
    """Say in what conditions differ, such as "threads: 1, 2"; "" if in nothing."""
    found: dict[str, set[str]] = {}
    for each in made_under:
        for name, value in each.items():
            found.setdefault(name, set()).add(str(value))
    return "; ".join(
        f"{NAMES.get(name, name)}: {', '.join(sorted(values))}"
        for name, values in sorted(found.items())
        if len(values) > 1
    )


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
