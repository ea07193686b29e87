"""Workers on many machines: tasks of a Ray cluster, which all use one store on a shared folder.

Ray says where a task runs and that its worker or node died; what was made is in the store.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from frostglass.core.errors import ConfigError, RunError
from frostglass.store.executor import Assignment, Executor, Outcome
from frostglass.store.store import Store
from frostglass.workers.schedule import executing
from frostglass.workers.worker import Setup, Worker

GIB = 2**30
KERNELS = "MKL_CBWR"  # read once when torch is imported, so it must be set before


@contextmanager
def ray_cluster(
    store: Store,
    address: str | None = None,
    *,
    count: int | None = None,
    threads: int = 1,
    memory: Callable[[Assignment], int] = lambda _: 0,
) -> Iterator[None]:
    """Let a Ray cluster make the steps of a store inside the block.

    `address` is that of a running cluster, "auto" the one of this machine; by default that of
    RAY_ADDRESS, or a new one on this machine. At most `count` tasks run at once, by default as many
    as there are cores for. Each reserves `threads` cores, the bytes that `memory` says, and a GPU
    if the store's device is one; more if the store trains with more devices.
    """
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    try:
        tasks = RayTasks(ray, Setup.of(store, threads), count, memory, store.report)
        with executing(store, tasks, threads):
            yield
    finally:
        if ours:
            ray.shutdown()


class RayTasks(Executor):
    """Carries out assignments as tasks of the cluster that this process is connected to."""

    def __init__(
        self,
        ray: Any,
        setup: Setup,
        count: int | None,
        memory: Callable[[Assignment], int],
        report: Callable[..., None],
    ) -> None:
        self._ray, self._setup, self._count = ray, setup, count
        self._memory, self._report = memory, report
        self._task = ray.remote(_carry_out)
        self._running: dict[Any, Assignment] = {}
        self._cores = max(setup.threads, setup.devices)
        self._gpus = setup.devices if setup.device.startswith("cuda") else 0
        for needed, resource, name in ((self._cores, "CPU", "cores"), (self._gpus, "GPU", "GPUs")):
            if (there := self._largest(resource)) < needed:  # such a task would wait for ever
                raise ConfigError(
                    f"--threads, --devices: a task needs {needed} {name}, the largest node of the "
                    f"Ray cluster has {there:.0f}: give fewer, or add a node"
                )

    @property
    def free(self) -> int:
        cores = self._ray.cluster_resources().get("CPU", 0)  # changes with the nodes
        return (self._count or int(cores // self._cores)) - len(self._running)

    def submit(self, assignment: Assignment) -> None:
        needed, there = self._memory(assignment), self._largest("memory")
        if needed > there:
            raise RunError(
                f"{assignment.step} needs about {needed / GIB:.1f} GiB of memory, the largest node "
                f"of the Ray cluster has {there / GIB:.1f} GiB: lower its batch, or add a node"
            )
        task = self._task.options(
            num_cpus=self._cores,
            num_gpus=self._gpus,
            memory=needed or None,
            max_retries=0,  # the schedule does that, after looking what the store has
        )
        self._running[task.remote(self._setup, assignment)] = assignment
        if not assignment.helping:
            self._report(assignment.step, assignment.key, "start")

    def wait(self, seconds: float) -> Sequence[tuple[Assignment, Outcome]]:
        if not self._running:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._running), timeout=seconds)
        return [(self._running.pop(reference), self._outcome(reference)) for reference in ready]

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:  # the task could not even begin
            return Outcome(RuntimeError(f"a worker failed\n{error}"))
        except errors.RayError as error:
            return Outcome(lost=type(error).__name__)

    def _largest(self, resource: str) -> float:
        """Return what the node with most of a resource has."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return max((float(node.get(resource, 0)) for node in nodes), default=0.0)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--on ray needs ray, which cannot be imported ({error}): "
            "pip install 'frostglass[cluster]'"
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    kernels = {KERNELS: os.environ[KERNELS]} if KERNELS in os.environ else {}
    more = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    try:
        ray.init(
            address,
            runtime_env={"env_vars": kernels},
            log_to_driver=False,
            logging_level="ERROR",
            **more,
        )
    except Exception as error:  # of no other kind, if a new cluster does not answer
        reason = str(error).partition("\n")[0]
        if more:
            raise RunError(
                f"--on ray: no Ray cluster could be started on this machine ({reason}): run the "
                "same command again, or use --workers"
            ) from error
        raise ConfigError(
            f"--address {address or 'of RAY_ADDRESS'}: no Ray cluster answers ({reason}): start "
            "one with `ray start --head`, or leave --address out"
        ) from error


@lru_cache(maxsize=1)
def _worker(setup: Setup) -> Worker:
    """Return the worker of this process, whose store keeps what it has loaded."""
    return Worker(setup)


def _carry_out(setup: Setup, assignment: Assignment) -> Outcome:
    try:
        worker = _worker(setup)
    except OSError as error:
        return Outcome(
            RunError(
                f"{assignment.title}: a node of the Ray cluster cannot use {setup.folder} "
                f"({error.strerror}): run the command in a folder that all nodes share"
            )
        )
    return worker.work_on(assignment)
