"""The command `store purge`."""

import json
from dataclasses import asdict
from pathlib import Path

from frostglass.auditing.steps import PRIVATE
from frostglass.core.errors import RunError
from frostglass.store.purge import purge
from frostglass.store.store import Store


def purge_store(store: Path, *, as_json: bool) -> None:
    """Remove what shows private people from a store, and say how much it was."""
    kinds = purge(Store(store), [step.name for step in PRIVATE])
    if as_json:
        print(json.dumps({"removed": [asdict(kind) for kind in kinds]}))
    else:
        for kind in kinds:
            print(f"{kind.step}: {kind.steps} removed, {_size(kind.bytes)}")
        print(f"in all {_size(sum(kind.bytes for kind in kinds))} removed from {store}")
        print("run folders have images of their own: delete those you do not need")
    if in_use := [f"{kind.step} {key[:8]}" for kind in kinds for key in kind.in_use]:
        raise RunError(
            f"kept {', '.join(in_use)}, which a process is working on: purge again when it is done"
        )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
