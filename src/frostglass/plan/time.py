"""Seconds from a dry run: a linear model whose constants are measured on this machine."""

import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.plan.ledger import Cost, Ledger
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import read_json, write_json
from frostglass.store.store import MARKER

CACHE = "plan.json"
REMEMBERED = 32  # results kept in that file
PARALLEL = 0.7  # n threads are n ** 0.7 times as fast; measured on training steps
PATIENCE = 0.1  # seconds spent on each constant


@dataclass(frozen=True)
class Machine:
    """Seconds per operator call, per floating point operation, and per byte moved."""

    calls: float
    conv: float
    matmul: float
    moved: float

    def seconds(self, cost: Cost) -> float:
        """Estimate how long code of this cost takes."""
        work = asdict(cost)
        return sum(rate * work[name] for name, rate in asdict(self).items())


def this_machine(root: Path) -> Machine:
    """Return the constants of this machine, kept in the store at `root` if there is one."""
    return Machine(**remembered(root, machine_name, lambda: asdict(calibrate())))


def remembered(root: Path, key: Callable[[], str], compute: Callable[[], Any]) -> Any:
    """Return plain values, computed before if there is a store at `root` and it has them."""
    if not (root / MARKER).exists():
        return compute()
    path, name = root / CACHE, key()
    known: dict[str, Any] = read_json(path) if path.exists() else {}
    if name not in known:
        known = {} if len(known) >= REMEMBERED else known
        known[name] = compute()
        with suppress(OSError):  # a store may be read-only
            write_json(path, known)
    return known[name]


def machine_name() -> str:
    """Name what the constants depend on: CPU model, torch version and threads."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or platform.machine()
    return f"{cpu}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def calibrate() -> Machine:
    """Measure the constants on small networks; takes well under a second.

    CPU time of one thread is measured, which does not depend on what else the machine does.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with seeded(0, "calibrate"):
            machine = _measured()
    finally:
        torch.set_num_threads(threads)
    speedup = threads**PARALLEL
    return Machine(
        machine.calls, machine.conv / speedup, machine.matmul / speedup, machine.moved / speedup
    )


def _measured() -> Machine:
    tiny = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)])
    wide = nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.BatchNorm2d(32), nn.ReLU())
    dense = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    layers = [nn.Conv2d(n, 32 + n, 3, padding=1, bias=False) for n in (32, 64)]
    shapes = ((8, 8), (16, 32, 32, 32), (64, 1024), (8, 32, 16, 16))
    rng = generator_for(0, "calibrate", "inputs")
    inputs = [torch.rand(shape, generator=rng) for shape in shapes]
    machine = Machine(0.0, 0.0, 0.0, 0.0)
    machine = _fit(machine, "calls", tiny, inputs[0])
    machine = _fit(machine, "moved", wide, inputs[1])
    machine = _fit(machine, "matmul", dense, inputs[2])
    return _fit(machine, "conv", nn.Sequential(*layers), inputs[3])


def _fit(machine: Machine, name: str, network: nn.Module, images: Tensor) -> Machine:
    """Measure one constant: the time of a training step that the others do not explain."""

    def step() -> None:
        network.zero_grad(set_to_none=True)
        network(images).sum().backward()

    seconds = _fastest(step)
    with Ledger() as ledger, ledger.measure() as cost:
        step()
    rest = seconds - machine.seconds(cost)
    # Another process may disturb a measurement: at least a third belongs to this constant.
    rate = max(rest, seconds / 3) / asdict(cost)[name]
    return Machine(**{**asdict(machine), name: rate})


def _fastest(step: Callable[[], None]) -> float:
    """Return the seconds of the fastest of many calls: other processes slow some of them down."""
    step()
    seconds: list[float] = []
    started = time.process_time()
    while len(seconds) < 5 or time.process_time() - started < PATIENCE:
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return min(seconds)
