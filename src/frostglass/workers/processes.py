"""Workers on this machine: one process each, with a pipe to the main process.

A worker that loses its pipe ends at once, so none outlives the main process, however that ends.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from frostglass.core.errors import ConfigError
from frostglass.runtime.processes import cores
from frostglass.store.executor import Assignment, Executor, Outcome
from frostglass.store.step import Event
from frostglass.store.store import Store
from frostglass.workers.schedule import executing
from frostglass.workers.worker import Setup, Worker

# A clean process that has imported torch is forked for each worker: one that has computed cannot
# be, because its threads would be missing in the copy.
START, IMPORTED = "forkserver", "frostglass.auditing.pipeline"
OWN = "define your own classes and functions in a module, not in a notebook or a function"
PATIENCE = 10.0  # seconds that a worker has to give back its leases


@contextmanager
def worker_processes(store: Store, count: int, threads: int | None = None) -> Iterator[None]:
    """Let so many processes make the steps of a store inside the block, 1 being this one alone.

    Each has `threads` threads, by default an equal share of the cores.
    """
    if count < 1:
        raise ConfigError(f"workers: expected at least 1, got {count}")
    if count == 1:
        yield
        return
    threads = threads or max(1, cores() // count)
    workers = Processes(Setup.of(store, threads), count, lambda event: store.report(*event))
    with executing(store, workers, threads):
        yield


class Processes(Executor):
    """Up to `count` worker processes; `listener` gets the events of their stores."""

    def __init__(
        self, setup: Setup, count: int, listener: Callable[[Event], None] | None = None
    ) -> None:
        self._setup, self._count, self._listener = setup, count, listener
        self._context: Any = multiprocessing.get_context(START)
        if START == "forkserver":
            self._context.set_forkserver_preload([IMPORTED])
        self._workers: list[_Process] = []

    @property
    def free(self) -> int:
        return self._count - len(self._busy)

    def submit(self, assignment: Assignment) -> None:
        idle = [worker for worker in self._workers if worker.assignment is None]
        if not idle:
            idle = [_Process(self._context, self._setup)]
            self._workers += idle
        idle[0].give(assignment)

    def wait(self, seconds: float) -> Sequence[tuple[Assignment, Outcome]]:
        ready = wait([worker.connection for worker in self._busy], seconds)
        ended = []
        for worker in [each for each in self._busy if each.connection in ready]:
            assignment = worker.assignment
            assert assignment is not None  # it is busy
            message = worker.message()
            if isinstance(message, Event):
                if self._listener:
                    self._listener(message)
                continue
            worker.assignment = None
            if message.lost:
                self._workers.remove(worker)
            ended.append((assignment, message))
        return ended

    def close(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(PATIENCE)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    @property
    def _busy(self) -> list["_Process"]:
        return [worker for worker in self._workers if worker.assignment is not None]


class _Process:
    """A worker process, seen from the main process."""

    def __init__(self, context: Any, setup: Setup):
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, setup), name="frostglass worker"
        )
        self.process.start()
        theirs.close()
        self.assignment: Assignment | None = None

    def give(self, assignment: Assignment) -> None:
        try:
            self.connection.send(assignment)
        except ConnectionError:
            pass  # it died while it was idle: `message` finds that out
        except Exception as error:  # such as that a class is local to a function
            raise ConfigError(f"workers: cannot send this run to one ({error}): {OWN}") from error
        self.assignment = assignment

    def message(self) -> Event | Outcome:
        """Return what the worker says; if nothing any more, that it was lost."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            return Outcome(lost=f"signal {-code}" if code < 0 else f"exit code {code}")


def _leave(*_: Any) -> NoReturn:
    """End this process by an exception, which gives back leases on its way out."""
    raise SystemExit


def _serve(connection: Connection, setup: Setup) -> None:
    """Carry out assignments until the main process says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the main process tells us
    signal.signal(signal.SIGTERM, _leave)
    assignments: queue.SimpleQueue[Assignment | Exception] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                assignments.put(connection.recv())
            except (EOFError, OSError):
                os._exit(1)
            except Exception as error:  # noqa: BLE001 - a user's module can raise anything
                assignments.put(error)

    threading.Thread(target=receive, name="assignments", daemon=True).start()
    worker = Worker(setup, connection.send)
    while True:
        assignment = assignments.get()
        if isinstance(assignment, Exception):
            reason = f"{type(assignment).__name__}: {assignment}"
            error = ConfigError(f"workers: one cannot read its assignment ({reason}): {OWN}")
            connection.send(Outcome(error))
        else:
            connection.send(worker.work_on(assignment))
