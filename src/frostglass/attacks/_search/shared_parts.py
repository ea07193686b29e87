"""What the starts of all people need of the target: made once by the processes of a run."""

import time
from collections.abc import Callable

from torch import Tensor

from frostglass.core.views import ModelView
from frostglass.store.files import Checkpoint, Work

PART = "part"  # the tensor in a checkpoint


class SharedParts:
    """Makes what starts need, or takes it from other processes; counts queries and seconds once.

    Parts are kept: a resumed run asks the target for none of them again.
    """

    def __init__(self, view: ModelView, work: Work):
        self._view, self._work, self._calls = view, work, 0
        self.queries, self.seconds = 0, 0.0  # of all parts, from any process
        self.own_queries, self.own_seconds = 0, 0.0  # of this process, for its parts and waiting

    def __call__(self, count: int, make: Callable[[int], Tensor]) -> list[Tensor]:
        self._calls += 1
        names = [f"starts-{self._calls}-{number:05d}" for number in range(count)]

        def made(number: int) -> Checkpoint:
            began, before = time.perf_counter(), self._view.queries
            tensors = {PART: make(number).cpu().contiguous()}
            queries = self._view.queries - before
            return tensors, {"queries": queries, "seconds": time.perf_counter() - began}

        began, before, parts = time.perf_counter(), self._view.queries, []
        for tensors, spent in self._work.share(names, made, lambda done: "starts"):
            parts.append(tensors[PART])
            self.queries += spent["queries"]
            self.seconds += spent["seconds"]
        self.own_queries += self._view.queries - before
        self.own_seconds += time.perf_counter() - began
        return parts
