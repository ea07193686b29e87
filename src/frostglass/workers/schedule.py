"""Runs jobs whose steps are made by an executor: what is missing is assigned, and no step twice.

A job is an ordinary function of a store. It is run again and again, each time up to the steps that
are missing, which are then assigned to workers; the last time nothing is missing. Workers that
would have nothing to do help with steps that have parts. All state is in the store, so a main
process that is killed and started again goes on where the files are.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from frostglass.core.errors import BudgetReached, DataError, RunError
from frostglass.store.executor import Assignment, Executor, Job, Missing, Outcome, Pending
from frostglass.store.sharing import POLL_SECONDS, open_parts
from frostglass.store.step import Task
from frostglass.store.store import Store
from frostglass.workers.worker import missing

MOST_DEATHS = 3  # of workers that make one step, before it is given up
UNSEEN_SECONDS = 180.0  # in which a network folder must show a finished step to all workers
UNAIDED_SECONDS = 30.0  # before a step gets help again, after a helper died or failed
FAILURES = (RunError, DataError, BudgetReached)  # leave other jobs as they are


def results(jobs: Mapping[str, Job], store: Store) -> Iterator[tuple[str, Any]]:
    """Run jobs, with the store's executor if it has one; yield the result of each, or its failure.

    Without an executor each job is run when its result is asked for.
    """
    if store.executor is not None:
        yield from _Schedule(jobs, store, store.executor).run().items()
        return
    for label, job in jobs.items():
        yield label, _result(job, store)


def only_result(job: Job, store: Store) -> Any:
    """Run one job, with the store's executor if it has one; raise what fails."""
    ((_, result),) = results({"": job}, store)
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def executing(store: Store, executor: Executor, threads: int) -> Iterator[None]:
    """Let an executor make the steps of a store inside the block, and close it after that.

    What is computed here has the threads of the workers, because they change the last bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    store.executor = executor
    try:
        yield
    finally:
        store.executor = None
        torch.set_num_threads(before)
        executor.close()


def _result(job: Job, store: Store) -> Any:
    try:
        return job(store)
    except FAILURES as error:
        return error


class _Schedule:
    def __init__(self, jobs: Mapping[str, Job], store: Store, executor: Executor):
        self._jobs, self._store, self._executor = jobs, store, executor
        self._results: dict[str, Any] = {}
        self._waiting: dict[str, dict[str, Missing]] = {}  # what each job needs, by key
        self._running: list[Assignment] = []
        # By key:
        self._deaths: Counter[str] = Counter()
        self._unseen: dict[str, float] = {}  # since when workers do not find what it needs
        self._unaided: dict[str, float] = {}  # until when it gets no help

    def run(self) -> dict[str, Any]:
        due: Iterable[str] = list(self._jobs)
        while True:
            for label in due:
                self._look(label)
                self._assign()
            if not self._waiting:
                return {label: self._results[label] for label in self._jobs}
            try:
                self._store.check()
            except BudgetReached as error:
                return {label: self._results.get(label, error) for label in self._jobs}
            self._help()
            due = self._ended()
            self._assign()

    def _look(self, label: str) -> None:
        """Run a job as far as its steps are made."""
        self._waiting.pop(label, None)
        self._store.obtain = self._obtain
        try:
            self._results[label] = _result(self._jobs[label], self._store)
        except Pending as pending:
            self._waiting[label] = {each.key: each for each in pending.missing}
        finally:
            self._store.obtain = self._store.ensure

    def _obtain(self, task: Task[Any]) -> bool:
        if not task.final.exists():
            raise Pending(missing(task))
        return self._store.ensure(task)

    def _assign(self) -> None:
        """Assign missing steps while there are free workers, those of the first jobs first."""
        running = {each.key for each in self._running}
        for label, needed in self._waiting.items():
            for key, each in needed.items():
                if self._executor.free < 1:
                    return
                if key not in running:
                    running.add(key)
                    self._submit(Assignment(self._jobs[label], each.step, key))

    def _help(self) -> None:
        """Let free workers make parts of running steps, at most one worker for each part."""
        partials = {
            key: each.partial for needed in self._waiting.values() for key, each in needed.items()
        }
        for each in [one for one in self._running if not one.helping]:
            if each.key not in partials or time.monotonic() < self._unaided.get(each.key, 0.0):
                continue
            free, unfinished = open_parts(partials[each.key])
            busy = sum(other.key == each.key for other in self._running)
            for _ in range(min(self._executor.free, unfinished - busy, free)):
                self._submit(Assignment(each.job, each.step, each.key, helping=True))

    def _submit(self, assignment: Assignment) -> None:
        self._executor.submit(assignment)
        self._running.append(assignment)

    def _ended(self) -> list[str]:
        """Wait a moment; return the jobs that may go on."""
        due: dict[str, None] = {}
        for assignment, outcome in self._executor.wait(POLL_SECONDS):
            if assignment not in self._running:  # of earlier jobs, one of which failed
                continue
            self._running.remove(assignment)
            if outcome.lost:
                note = f"its worker died ({outcome.lost})"
                self._store.report(assignment.step, assignment.key, "waiting", note=note)
            if assignment.helping:
                # What a helper could not do, the maker of the step does or reports.
                if outcome.lost or outcome.error:
                    self._unaided[assignment.key] = time.monotonic() + UNAIDED_SECONDS
            elif error := outcome.error or self._given_up(assignment, outcome):
                self._failed(assignment, error)
            elif outcome == Outcome():
                self._store.report(assignment.step, assignment.key, "done")
                self._unseen.pop(assignment.key, None)
                for label in self._concerned(assignment):
                    del self._waiting[label][assignment.key]
                    due[label] = None
        return list(due)

    def _concerned(self, assignment: Assignment) -> list[str]:
        """Return the jobs that wait for a step."""
        return [label for label, keys in self._waiting.items() if assignment.key in keys]

    def _given_up(self, assignment: Assignment, outcome: Outcome) -> RunError | None:
        """Say why a step is not assigned again after its workers died or lacked what it needs."""
        key = assignment.key
        if outcome.lost:
            self._deaths[key] += 1
            if self._deaths[key] >= MOST_DEATHS:
                return RunError(
                    f"{assignment.title}: its worker died ({outcome.lost}), {MOST_DEATHS} times: "
                    "give more memory, fewer --workers or a smaller batch, and run the same "
                    "command again"
                )
        if outcome.unseen:
            since = self._unseen.setdefault(key, time.monotonic())
            if time.monotonic() - since >= UNSEEN_SECONDS:
                return RunError(
                    f"{assignment.title}: workers do not find {outcome.unseen} in the store: all "
                    "need the same store, config, data and version of frostglass"
                )
        return None

    def _failed(self, assignment: Assignment, error: Exception) -> None:
        """End the jobs that need a step which failed; an error of another kind ends all."""
        if not isinstance(error, FAILURES):
            raise error
        for label in self._concerned(assignment):
            del self._waiting[label]
            self._results[label] = error
