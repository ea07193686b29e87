"""The options that spread the work of `run`, `demo` and `harden` over processes or a cluster.

Heavy imports happen inside functions, so that help answers at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostglass.core.errors import ConfigError

if TYPE_CHECKING:
    from frostglass.store.store import Store

WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Processes that share the work, or auto; 1 by default. The result is the same to the "
        "byte if --threads is.",
    ),
]
OnOption = Annotated[
    str | None, typer.Option("--on", metavar="ray", help="Send the work to a Ray cluster.")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", help="That of the cluster, e.g. auto; a new one on this machine by default."
    ),
]
AUTO = "auto"


@dataclass(frozen=True)
class Spread:
    """The options, as they were given; what cannot be used is refused at once."""

    workers: str | None = None
    on: str | None = None
    address: str | None = None
    devices: int | None = None  # processes that train each network together

    def __post_init__(self) -> None:
        text = self.workers
        if text not in (None, AUTO) and not (text.isdecimal() and 0 < int(text) < 10_000):
            raise ConfigError(f"--workers: expected a number from 1 or {AUTO}, got {text!r}")
        if self.on not in (None, "ray"):
            raise ConfigError(f"--on: expected ray, got {self.on!r}; --workers is this machine")
        if self.address is not None and self.on is None:
            raise ConfigError("--address is that of a Ray cluster: add --on ray")

    @property
    def count(self) -> int | None:
        return int(self.workers) if self.workers not in (None, AUTO) else None

    @contextmanager
    def over(
        self, store: "Store", chosen: Sequence[tuple[str, Any]], threads: int | None
    ) -> Iterator[None]:
        """Let workers make the steps of a store, for these experiments, inside the block."""
        if self.on:
            from frostglass.plan.estimate import memory_of_steps
            from frostglass.workers.cluster import ray_cluster

            memory = memory_of_steps(chosen, store)
            options: Any = {"count": self.count, "threads": threads or 1, "memory": memory}
            with ray_cluster(store, self.address, **options):
                yield
            return
        from frostglass.plan.threads import workers_and_threads
        from frostglass.workers.processes import worker_processes

        count = self.count or 1
        if self.workers == AUTO:
            count, threads = workers_and_threads(chosen[0][1], store, threads)
        with worker_processes(store, count, threads):
            yield
