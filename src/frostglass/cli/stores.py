"""The commands `store show`, `store clean` and `store purge`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from frostglass.auditing.steps import PRIVATE
from frostglass.core.errors import RunError
from frostglass.store.purge import Purged, Unfinished, clean, contents, purge
from frostglass.store.store import Store

PRIVATE_STEPS = tuple(step.name for step in PRIVATE)


def show_store(store: Path, *, as_json: bool) -> None:
    """List the steps of a store: what each kind takes, and what stopped runs left."""
    kinds = contents(Store(store))
    if as_json:
        print(json.dumps({"store": str(store), "kinds": [asdict(kind) for kind in kinds]}))
        return
    for kind in kinds:
        private = ", shows private people" if kind.step in PRIVATE_STEPS else ""
        print(f"{kind.step}: {kind.steps} finished, {_size(kind.bytes)}{private}")
    left = [each for kind in kinds for each in kind.unfinished]
    for each in left:
        print(f"unfinished: {_line(each)}")
    print(f"in all {_size(sum(k.bytes for k in kinds) + sum(u.bytes for u in left))} in {store}")
    if any(not each.owner for each in left):
        print(
            "the command that began an unfinished step resumes it; `frostglass store clean` "
            "removes those that no process works on"
        )


def _line(each: Unfinished) -> str:
    state = f"{each.owner} works on it" if each.owner else "left by a stopped run"
    return f"{each.step} {each.key[:8]}, {_size(each.bytes)}, changed {each.changed}: {state}"


def clean_store(store: Path, *, as_json: bool) -> None:
    """Remove the unfinished steps that stopped runs left."""
    kinds = [kind for kind in clean(Store(store)) if kind.steps or kind.in_use]
    _conclude(kinds, store, as_json=as_json)


def purge_store(store: Path, *, as_json: bool) -> None:
    """Remove what shows private people from a store, and say how much it was."""
    kinds = purge(Store(store), PRIVATE_STEPS)
    hint = "run folders have images of their own: delete those you do not need"
    _conclude(kinds, store, hint, as_json=as_json)


def _conclude(kinds: Sequence[Purged], store: Path, *hints: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"removed": [asdict(kind) for kind in kinds]}))
    else:
        for kind in kinds:
            print(f"{kind.step}: {kind.steps} removed, {_size(kind.bytes)}")
        print(f"in all {_size(sum(kind.bytes for kind in kinds))} removed from {store}")
        for hint in hints:
            print(hint)
    if in_use := [f"{kind.step} {key[:8]}" for kind in kinds for key in kind.in_use]:
        raise RunError(
            f"kept {', '.join(in_use)}, which a process is working on: repeat the command when it "
            "is done"
        )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
