"""The demo's attack with one worker and with two: speed-up, and CPU time beside it.

The ratio of seconds needs two idle cores. The ratio of CPU time, of two workers over one, does not:
it says what sharing costs, and 2 over it is the speed-up that idle cores would give.

Alone: OMP_NUM_THREADS=1 python -m benchmarks.workers
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measured import Measured
from frostglass.auditing.config_file import demo_config
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import audit
from frostglass.auditing.steps import ATTACK
from frostglass.store.step import Event
from frostglass.store.store import Store
from frostglass.workers import processes
from frostglass.workers.schedule import only_result

GOAL = 1.6


def measure() -> Iterator[Measured]:
    """Measure in a process of one thread, which can be forked."""
    alone = [sys.executable, "-m", "benchmarks.workers"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(alone, env=environment, capture_output=True, text=True, check=True)
    times, note = json.loads(done.stdout)
    yield Measured("the demo's attack, 2 workers, times 1 worker", times, note, least=GOAL)


def compare() -> tuple[float, str]:
    """Attack with a store that has everything else, with one worker and with two."""
    processes.START = "fork"  # then the CPU time of workers is known when they have ended
    settings = demo_config()
    del settings["grid"]
    job = partial(audit, Experiment.parse(settings))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        job(Store(root))
        alone, alone_cpu = _attacked(root, job, 1)
        pair, pair_cpu = _attacked(root, job, 2)
    return alone / pair, (
        f"{pair:.1f} s against {alone:.1f} s; CPU time {pair_cpu / alone_cpu:.2f} ×, which allows "
        f"{2 * alone_cpu / pair_cpu:.2f} on idle cores"
    )


def _attacked(root: Path, job: Callable[..., Any], workers: int) -> tuple[float, float]:
    """Return the seconds of the attack, and the CPU seconds of all processes."""
    shutil.rmtree(root / ATTACK.name)
    marks: dict[str, float] = {}

    def listen(event: Event) -> None:
        if event.step == ATTACK.name:
            marks.setdefault(event.kind, time.perf_counter())

    before, store = _cpu(), Store(root, listen)
    with processes.worker_processes(store, workers, 1):
        only_result(job, store)
    return marks["done"] - marks["start"], _cpu() - before


def _cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    print(json.dumps(compare()))
