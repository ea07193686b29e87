"""How many workers, and how many threads for each: measured on the network that is attacked."""

import time
from collections.abc import Callable, Sequence

import torch

from frostglass.auditing.experiment import Experiment
from frostglass.core.errors import ConfigError
from frostglass.core.ranks import default_devices
from frostglass.defenses.base import Defense
from frostglass.plan.time import machine_name, remembered
from frostglass.runtime.processes import cores
from frostglass.runtime.seeding import generator_for
from frostglass.store.store import Store
from frostglass.training.build import check_devices, untrained
from frostglass.training.settings import Training

WORTH = 1.8  # a doubling of threads must be so much faster, else a second worker is better
ROWS = 64  # images of the timed step, unless the attack has a batch
REPEATS = 5  # steps of which the fastest counts: other processes slow some of them down


def device_problems(chosen: Sequence[tuple[str, Experiment]], devices: int | None) -> list[str]:
    """List the trainings of experiments that so many processes cannot share."""
    devices = devices or default_devices()
    found: dict[str, None] = {}
    for label, exp in chosen:
        trained: list[tuple[str, object, Sequence[Defense]]]
        trained = [("target", exp.target, exp.training_defenses)]
        trained += [("evaluators", each, ()) for each in exp.evaluators]
        for name, config, defenses in trained:
            if not isinstance(config, Training) or config.weights or devices == 1:
                continue
            try:
                check_devices(devices, config, defenses)
            except ConfigError as error:
                found[f"{label}: {name}: {error}"] = None
    return list(found)


def workers_and_threads(exp: Experiment, store: Store, threads: int | None) -> tuple[int, int]:
    """Choose how many workers share this machine's cores, and the threads of each.

    A small network is not faster with many threads, but many workers are. The choice is kept in
    the store: threads change the last bits, so a resumed run should have the same.
    """
    if store.device.type != "cpu":
        return 1, threads or cores()
    if threads is None:
        store.create()

        def key() -> str:
            return f"threads: {exp.target} {exp.data.image_shape} {cores()} {machine_name()}"

        threads = int(remembered(store.root, key, lambda: best_threads(_step(exp), cores())))
    return max(1, cores() // threads), threads


def best_threads(step: Callable[[], None], most: int) -> int:
    """Return the largest number of threads, in doublings, that is worth its cores."""
    before = torch.get_num_threads()
    try:
        threads, seconds = 1, _fastest(step, 1)
        while 2 * threads <= most:
            faster = _fastest(step, 2 * threads)
            if seconds < WORTH * faster:
                break
            threads, seconds = 2 * threads, faster
        return threads
    finally:
        torch.set_num_threads(before)


def _step(exp: Experiment) -> Callable[[], None]:
    """Return a forward and backward pass of the attacked network, untrained."""
    shape = exp.data.image_shape
    classes = tuple(map(str, range(exp.data.counts()[0])))
    module = untrained(exp.target, classes, shape, (), seed=0).module.eval()
    rows = getattr(exp.attack, "batch", ROWS)
    images = torch.rand(rows, *shape, generator=generator_for(0, "threads")).requires_grad_()

    def step() -> None:
        torch.autograd.grad(module(images).sum(), images)

    return step


def _fastest(step: Callable[[], None], threads: int) -> float:
    torch.set_num_threads(threads)
    step()  # the first call allocates
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
