"""What a worker does: one step of a job, or parts of one, at a time."""

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from frostglass.core.errors import FrostglassError
from frostglass.runtime.memory import keep_freed_memory
from frostglass.store.executor import Assignment, Missing, Outcome, Pending
from frostglass.store.step import Event, Task
from frostglass.store.store import Store

UNSEEN_PAUSE = 0.5  # seconds before a step that is not seen yet is assigned again


@dataclass(frozen=True)
class Setup:
    """What all workers of a run have in common.

    The number of threads changes the last bits of results, so it is the same everywhere.
    """

    root: Path
    device: str
    devices: int
    threads: int
    folder: Path  # where relative paths of a config start

    @classmethod
    def of(cls, store: Store, threads: int) -> "Setup":
        root, device = store.root.absolute(), str(store.device)
        return cls(root, device, store.devices, threads, Path.cwd())


class _Made(BaseException):
    """The assigned step is finished: the rest of the job is for others."""


class Worker:
    """Carries out assignments in this process, with a store that stays open between them."""

    def __init__(self, setup: Setup, listener: Callable[[Event], None] | None = None):
        keep_freed_memory()
        torch.set_num_threads(setup.threads)
        os.chdir(setup.folder)
        device = torch.device(setup.device)
        self._store = Store(setup.root, listener, device=device, devices=setup.devices)

    def work_on(self, assignment: Assignment) -> Outcome:
        """Run the job up to the assigned step, and make that."""
        store = self._store

        def obtain(task: Task[Any]) -> bool:
            if task.key == assignment.key:
                store.obtain = store.ensure  # a step may need others, such as releases of features
                store.help(task) if assignment.helping else store.ensure(task)
                raise _Made
            if not task.final.exists():
                raise Pending(missing(task))
            return store.ensure(task)

        store.obtain, unseen = obtain, assignment.title
        try:
            assignment.job(store)
        except _Made:
            return Outcome()
        except Pending as pending:
            unseen = pending.missing[0].title
        except FrostglassError as error:
            return Outcome(error)
        except Exception:  # noqa: BLE001 - a bug, whose traceback belongs to the main process
            return Outcome(RuntimeError(f"a worker failed\n{traceback.format_exc()}"))
        time.sleep(UNSEEN_PAUSE)  # until the folder may show it
        return Outcome(unseen=unseen)


def missing(task: Task[Any]) -> Missing:
    """Describe a step that is not finished."""
    return Missing(task.step.name, task.key, task.partial)
