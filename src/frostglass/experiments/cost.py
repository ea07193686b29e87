"""What a config would cost: its steps are walked without running any, and one small step of each network is timed."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.experiments.config import Experiment
from frostglass.experiments.pipeline import produce
from frostglass.experiments.store import Step, Store
from frostglass.training import Training, untrained
from frostglass.types import Shape


@dataclass(frozen=True)
class _Stub:
    """Stands for a product that has a key but is not there yet."""

    key: str
    classes: tuple[str, ...] = ()
    saw: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def public(self) -> "_Stub":
        return _Stub(f"{self.key}.public")

    def view(self, access: Sequence[str]) -> "_Stub":
        return _Stub(f"{self.key}:{'+'.join(sorted(access))}")


class _Plan(Store):
    """A store that notes which steps are asked for instead of running them."""

    def __init__(self, store: Store):
        super().__init__(store.root)
        self.asked: dict[str, tuple[Step, Any, tuple[Any, ...], bool]] = {}

    def step(self, step: Step, config: Any, *inputs: Any, seed: int) -> Any:
        key = self.key(step, config, *inputs, seed=seed)
        self.asked.setdefault(key, (step, config, inputs, self.has(step, config, *inputs, seed=seed)))
        return _Stub(key)


def estimate(chosen: Sequence[tuple[str, Experiment]], store: Store) -> dict[str, Any]:
    """Every step of the experiments with its amount of work, whether it is done already, and about how long it takes here."""
    rows, seen = [], set()
    for label, exp in chosen:
        plan = _Plan(store)
        produce(exp, plan)
        for key, (step, config, inputs, done) in plan.asked.items():
            if key not in seen:
                seen.add(key)
                work, seconds = _work(step.name, config, inputs, exp)
                rows.append({"step": step.name, "label": label, "key": key, "work": work, "done": done, "seconds": seconds})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # after one step of every network
    data = max((_pixels(exp) for _, exp in chosen), default=0) / 2**20
    return {"steps": rows, "seconds": sum(row["seconds"] for row in rows if not row["done"]), "memory_mib": peak + 2 * data}


def _work(name: str, config: Any, inputs: tuple[Any, ...], exp: Experiment) -> tuple[str, float]:
    identities, private, public = exp.data.counts()
    shape: Shape = exp.data.image_shape
    people = min(exp.judging.identities or identities, identities)
    if name == "split":
        return f"{private + public:,} pictures", (private + public) / 1000
    if name == "target":
        if config.weights:
            return "load weights", 1.0
        images = int(private * (1 - exp.split.test - exp.split.validation)) * config.epochs
        return f"{config.model}: {config.epochs} epochs, {images:,} images", images * _training_seconds(config, identities, shape)
    if name == "prior" and hasattr(config, "networks"):
        images = config.steps * config.batch * config.critic_steps
        return f"{config.steps:,} steps of {config.critic_steps} × {config.batch} images", images * _critic_seconds(config, shape)
    if name == "attack":
        latents = people * config.candidates * config.steps
        each = _training_seconds(exp.target, identities, shape) + (
            _critic_seconds(exp.prior, shape) / 4 if hasattr(exp.prior, "networks") else 0.002
        )
        return f"{people} people × {config.candidates} candidates × {config.steps} steps", latents * each
    if name == "scores":
        return f"{people * exp.attack.keep} pictures", 2.0 + private / 2000
    return "", 0.5


def _training_seconds(config: Training, classes: int, shape: Shape, batch: int = 16) -> float:
    """Seconds per image of a forward and backward pass."""
    module = untrained(config, tuple(map(str, range(classes))), shape, (), seed=0).module
    images, labels = torch.rand(batch, *shape), torch.zeros(batch, dtype=torch.long)
    return _timed(lambda: F.cross_entropy(module(images), labels).backward()) / batch


def _critic_seconds(config: Any, shape: Shape, batch: int = 16) -> float:
    """Seconds per image of one critic step with its penalty, about three passes through generator and critic."""
    generator, critic = config.networks(shape)
    latents = torch.randn(batch, config.latent)
    return 3 * _timed(lambda: critic(generator(latents)).sum().backward()) / batch


def _timed(step: Any) -> float:
    step()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _pixels(exp: Experiment) -> int:
    _, private, public = exp.data.counts()
    channels, height, width = exp.data.image_shape
    return (private + public) * channels * height * width
