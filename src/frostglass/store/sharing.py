"""Steps whose parts are made by several processes, each part under a lease of its own.

    <key>.partial/parts/parts.json       the names of the parts, once they may be made
    <key>.partial/parts/<name>.lease/    the process that is making a part
    <key>.partial/work/<name>.safetensors    a finished part

The process with the lease of the step makes parts and waits for those of others. Helpers run the
same code, make parts that nobody is making, and leave at the first thing that is no part. What the
parts are follows from the config alone, so only who makes them depends on the helpers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from frostglass.core.errors import StoreError
from frostglass.store.files import Checkpoint, Work, permissions, read_json, write_json
from frostglass.store.lease import Lease, LeaseLost

PARTS, LIST = "parts", "parts.json"
CONDITIONS = "made_under"  # the value of a part that says under which conditions it was made
POLL_SECONDS = 0.1  # a look at one small file; parts of an attack can take few seconds
PATIENCE = 10  # looks after which a helper leaves; to come back costs it more than this second


class Leave(BaseException):
    """A helper found nothing to do for now."""


@dataclass(eq=False)
class SharedWork(Work):
    """The work of a step in a store.

    `now` are the conditions of this process; those of all makers of parts are added to `seen`.
    """

    now: dict[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    helping: bool = False
    _idle: int = 0  # looks at parts of others since this process made one

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        if self.helping:
            raise Leave
        super().save(name, tensors, values)

    def file(self, name: str) -> Path:
        if self.helping:  # the process with the lease of the step writes it
            raise Leave
        return super().file(name)

    def share(
        self,
        names: Sequence[str],
        make: Callable[[int], Checkpoint],
        note: Callable[[int], str] = lambda done: "",
    ) -> Iterator[Checkpoint]:
        if not self.helping:
            self._leases.mkdir(permissions(self.folder), exist_ok=True)
            write_json(self._leases / LIST, list(names))
        done: set[str] = set()
        while len(done) < len(names):
            before = len(done)
            for number, name in enumerate(names):
                if name not in done and self._is_made(name, partial(make, number)):
                    done.add(name)
                    self.progress(len(done), len(names), note(len(done)))
            if len(done) == before:
                self._wait()
        return (self._made(name) for name in names)

    def _is_made(self, name: str, make: Callable[[], Checkpoint]) -> bool:
        """Return whether a part is there, or was made now; not if another process is making it."""
        if self.load(name):
            return True
        if (lease := Lease.claim(self._leases / f"{name}.lease")) is None:
            return False
        with lease:
            if not self.load(name):  # else made between our look and our claim
                tensors, values = make()
                self._idle = 0
                try:
                    lease.check()
                except LeaseLost:  # taken over while this process slept: that part will be used
                    return False
                super().save(name, tensors, {**values, CONDITIONS: self.now})
        return True

    def _made(self, name: str) -> Checkpoint:
        if (part := self.load(name)) is None:
            raise StoreError(f"{self._file(name)} was damaged or removed: run the command again")
        made_under = part[1].pop(CONDITIONS, self.now)
        if made_under not in self.seen:
            self.seen.append(made_under)
        return part

    def _wait(self) -> None:
        """Let others finish their parts; a helper waits for what may come after them, not long."""
        self._idle += 1
        if self.helping and self._idle > PATIENCE:
            raise Leave
        if self.before_save:
            self.before_save()  # raises if the lease of the step was lost
        time.sleep(POLL_SECONDS)

    @property
    def _leases(self) -> Path:
        return self.folder.parent / PARTS


def open_parts(partial: Path) -> tuple[int, int]:
    """Count the parts of an unfinished step that nobody is making, and all unfinished ones."""
    try:
        names = read_json(partial / PARTS / LIST)
    except (OSError, StoreError):  # not shared, or finished and being removed
        return 0, 0
    unfinished = [name for name in names if not (partial / "work" / f"{name}.safetensors").exists()]
    free = [name for name in unfinished if not (partial / PARTS / f"{name}.lease").exists()]
    return len(free), len(unfinished)
