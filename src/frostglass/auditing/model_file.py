"""The file of an audited model, so that a report says which model it is about."""

from pathlib import Path
from typing import Any

from frostglass.auditing.results import Audit
from frostglass.auditing.steps import TARGET
from frostglass.store.files import read_json
from frostglass.store.hashing import file_hash
from frostglass.store.manifest import MANIFEST


def model_file(audit: Audit, store: str) -> dict[str, Any]:
    """Return the name and SHA-256 of the file of an audited model; None where there is no file.

    A given model is the file that its owner named; what was trained is a file of the store.
    """
    config = audit.experiment.target
    if not config.weights:
        return _trained(audit.target.key, store)
    # What was only read for its code is no weights.
    files = [path for path in config.files() if str(path) in config.weights and path.is_file()]
    if not files:
        return {"name": config.weights, "sha256": None}
    return {"name": files[0].name, "sha256": file_hash(files[0])}


def _trained(key: str, store: str) -> dict[str, Any]:
    folder = Path(store) / TARGET.name / key
    manifest = read_json(folder / MANIFEST) if store and (folder / MANIFEST).is_file() else {}
    for name, facts in manifest.get("files", {}).items():
        if name.endswith(".safetensors"):
            return {"name": f"{TARGET.name}/{key}/{name}", "sha256": facts.get("sha256")}
    return {"name": f"{TARGET.name} {key}", "sha256": None}
