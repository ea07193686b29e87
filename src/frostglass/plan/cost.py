"""What a config would cost, and what would stop it: its steps are walked without running any, and each network is built and timed once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.attacks.base import Attack
from frostglass.audit.config import Experiment
from frostglass.audit.pipeline import produce
from frostglass.core.errors import ConfigError, FrostglassError
from frostglass.core.types import Shape
from frostglass.core.views import CAPABILITIES
from frostglass.data._splits import check_people
from frostglass.data.base import Dataset
from frostglass.defenses.base import Defense
from frostglass.models.checkpoint import load_weights
from frostglass.plan.memory import foreseen
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from frostglass.store.store import Step, Store
from frostglass.training.build import check_training, untrained
from frostglass.training.settings import Training, first_stage

NOBODY = "data: no private person is named: private pictures need one sub-folder per identity, named after it"


@dataclass(frozen=True)
class Stub:
    """Stands for a product that has a key but is not there yet."""

    key: str
    classes: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=lambda: {"seconds": 0.0})
    seen_identities: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    condition: str = ""
    seconds: float = 0.0

    @property
    def public(self) -> "Stub":
        return Stub(f"{self.key}.public")

    def view(self, access: Sequence[str]) -> "Stub":
        return Stub(f"{self.key}:{'+'.join(sorted(access))}")

    def averaged(self, samples: int) -> "Stub":
        return Stub(self.key + (f"×{samples}" if samples > 1 else ""))


class Plan(Store):
    """A store that notes which steps are asked for instead of running them."""

    def __init__(self, store: Store):
        super().__init__(store.root)
        self.asked: dict[str, tuple[Step, Any, tuple[Any, ...], bool]] = {}

    def step(self, step: Step, config: Any, *inputs: Any, seed: int) -> Any:
        key = self.key(step, config, *inputs, seed=seed)
        self.asked.setdefault(
            key, (step, config, inputs, self.has(step, config, *inputs, seed=seed))
        )
        return Stub(key)


class Once:
    """Keeps what was found by all it depends on: the experiments of a grid share their data and most of their networks."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def __call__(self, find: Callable[..., Any], *given: Any) -> Any:
        recipe = f"{find.__qualname__} {given}"
        if recipe not in self._known:
            self._known[recipe] = find(*given)
        return self._known[recipe]


def problems(chosen: Sequence[tuple[str, Experiment]]) -> list[str]:
    """What would stop these experiments after hours of work: data that is not there, networks that cannot be built, weights that do not fit."""
    found, once = [], Once()
    for _, exp in chosen:
        try:
            classes, private, public = once(counts_of, exp.data)
        except FrostglassError as error:
            found.append(f"data: {error}")
            continue  # nobody knows how many classes a network has
        if not classes:
            found.append(NOBODY)
            continue
        wrong = set()
        for where, attempt, given in _attempts(exp, classes, private, public):
            if where == "attack" and "prior" in wrong:
                continue  # whether it would fit a prior that cannot be is no question
            try:
                once(attempt, *given)
            except FrostglassError as error:
                found.append(f"{where}: {error}")
                wrong.add(where)
    return list(dict.fromkeys(found))


def _attempts(
    exp: Experiment, classes: int, private: int, public: int
) -> Iterator[tuple[str, Callable[..., None], tuple[Any, ...]]]:
    """Each network of an experiment: its place in the config, and how to try it."""
    shape = exp.data.image_shape
    records = int(private * (1 - exp.split.test - exp.split.validation))
    yield "target", try_classifier, (exp.target, exp.defenses, classes, shape, records)
    for place, config in enumerate(exp.evaluators):
        yield f"evaluators[{place}]", try_classifier, (config, (), classes, shape, records)
    if any(
        on_public_people(config, defenses)
        for config, defenses in ((exp.target, exp.defenses), *((e, ()) for e in exp.evaluators))
    ):
        yield "data", try_public_people, (exp.data,)
    yield "prior", try_prior, (exp.prior, shape, classes, public)
    yield "attack", _try_attack, (exp.attack, exp.prior, shape)


def try_classifier(
    config: Training, defenses: Sequence[Defense], classes: int, shape: Shape, records: int
) -> None:
    """Build the network of each stage, the last one first, and fill it with the weights it begins from or is given."""
    first = first_stage(config, defenses)
    names = tuple(map(str, range(classes)))
    target = untrained(
        config, names, shape, defenses, seed=0, start=None if first else config.starting_file
    )
    check_training(config, target, defenses, records)
    if config.weights:
        load_weights(target.module, config.weights)
    if first:
        try_classifier(first.config, first.defenses, classes, shape, records)


def on_public_people(config: Training, defenses: Sequence[Defense]) -> bool:
    """Whether one of the stages before a training is on public people."""
    first = first_stage(config, defenses)
    return first is not None and (
        first.data == "public" or on_public_people(first.config, first.defenses)
    )


def try_public_people(data: Dataset) -> None:
    check_people(data.public_people())


def try_prior(method: Any, shape: Shape, classes: int, public: int) -> None:
    if base := getattr(method, "base_method", None):
        try_prior(base, shape, classes, public)
    if getattr(method, "top", 0) > public:
        raise ConfigError(
            f"{method.name}.top ({method.top}) is more than the {public} public pictures there are: lower it"
        )
    if hasattr(method, "beginning"):
        method.beginning(shape)
    if getattr(method, "ready", False):
        method.read(shape)
    elif hasattr(method, "networks"):
        if hasattr(method, "check_trained"):
            method.check_trained(shape)
        with seeded(0, "cost"):
            method.networks(shape, classes)
    if hasattr(method, "build_students"):
        with seeded(0, "cost"):
            method.build_students(shape, classes)


def _try_attack(attack: Attack, method: Any, shape: Shape) -> None:
    """Whether the prior will have what the attack needs, and may be fitted with what the attack is granted; told before either is made."""
    made, needed = (
        offered(method, shape),
        [part.needs for part in _with_bases(method) if part.needs],
    )
    found = attack.problems(None, made)  # type: ignore[arg-type]
    granted = max(CAPABILITIES.index(access) for access in attack.access)
    if any(CAPABILITIES.index(need) > granted for need in needed):
        found.append(
            f"{attack.name} sees {attack.access[0]} alone, and the {method.name} prior is fitted to more: use one that is fitted to no target"
        )
    if found:
        raise ConfigError(found)


def _with_bases(method: Any) -> list[Any]:
    return [method, *(_with_bases(base) if (base := getattr(method, "base_method", None)) else [])]


def offered(method: Any, shape: Shape) -> Any:
    """What a prior will have, as far as an attack asks for it."""
    if base := getattr(method, "base_method", None):
        under = offered(base, shape)
        same = {
            name: getattr(under, name)
            for name in ("latent", "critic", "condition", "blocks", "image_shape", "info")
        }
        return SimpleNamespace(**same, students=method.students, features=method.statistics or None)
    if getattr(method, "ready", False):
        return method.read(shape)
    critic = True if getattr(method, "keeps_critic", True) else None
    blocks = method.blocks(shape) if hasattr(method, "blocks") else 0
    return SimpleNamespace(
        latent=method.latent, critic=critic, condition=getattr(method, "condition", ""), blocks=blocks, students=(), features=None,
        image_shape=shape, info={},
    )  # fmt: skip


def estimate(chosen: Sequence[tuple[str, Experiment]], store: Store) -> dict[str, Any]:
    """Every step of the experiments with its amount of work, whether it is done already, and about how long it takes here; the most memory, and where."""
    rows, seen, once = [], set(), Once()
    need = foreseen(
        chosen, store, lambda data: once(counts_of, data)
    )  # first: what is timed below leaves memory behind in this process
    for label, exp in chosen:
        plan = Plan(store)
        produce(exp, plan)
        for key, (step, config, inputs, done) in plan.asked.items():
            if key not in seen:
                seen.add(key)
                work, seconds = _work(step.name, config, inputs, exp, once)
                rows.append(
                    {
                        "step": step.name,
                        "label": label,
                        "key": key,
                        "work": work,
                        "done": done,
                        "seconds": seconds,
                    }
                )
    return {
        "steps": rows,
        "seconds": sum(row["seconds"] for row in rows if not row["done"]),
        "memory_mib": need.bytes / 2**20,
        "memory_step": need.step,
        "memory_unknown": need.unknown,
    }


def _work(
    name: str, config: Any, inputs: tuple[Any, ...], exp: Experiment, once: Once
) -> tuple[str, float]:
    identities, private, public = once(counts_of, exp.data)
    shape: Shape = exp.data.image_shape
    people = min(exp.judging.identities or identities, identities)
    if name == "split":
        return f"{private + public:,} pictures", (private + public) / 1000
    if name == "target":
        if config.weights:
            return "load weights", 1.0
        on_public = "public" in inputs[2:3]  # a first stage
        images = int(
            0.8 * public if on_public else private * (1 - exp.split.test - exp.split.validation)
        )
        return training_work(config, images, identities, shape, once)
    if name == "prior":
        return prior_work(config, shape, identities, public, once)
    if name == "attack":
        each = _look_seconds(config, exp, identities, once)
        searches, (what, pictures) = people * config.candidates, config.effort()
        # Without gradients a look is a forward pass, a third of the work.
        seconds = (
            (searches * pictures + config.asked_once)
            * each
            / (1 if "gradients" in config.access else 3)
        )
        once_for_all = (
            f", and up to {config.asked_once:,} to find starts" if config.asked_once else ""
        )
        return f"{people} people × {config.candidates} candidates × {what}{once_for_all}", seconds
    if name == "scores":
        return f"{people * exp.attack.keep} pictures", 2.0 + private / 2000
    return "", 0.5


def training_work(
    config: Training, images: int, classes: int, shape: Shape, once: Once
) -> tuple[str, float]:
    seen = images * config.epochs
    return f"{config.model}: {config.epochs} epochs, {seen:,} images", seen * once(
        _training_seconds, config, classes, shape
    )


def counts_of(data: Dataset) -> tuple[int, int, int]:
    return data.counts()


def _look_seconds(attack: Attack, exp: Experiment, classes: int, once: Once) -> float:
    """Seconds per picture of an attack's step: the generator makes it, the target looks at it, and so do the students that imitate it."""
    shape: Shape = exp.data.image_shape
    seconds = once(_training_seconds, exp.target, classes, shape)
    if getattr(attack, "students", False) and hasattr(exp.prior, "build_students"):
        seconds += once(_student_seconds, exp.prior, shape, classes)
    maker = _with_bases(exp.prior)[-1]
    if getattr(maker, "ready", False):
        return seconds + once(_generator_seconds, maker, shape)
    return seconds + once(_critic_seconds, maker, shape, classes) / 4


def _training_seconds(config: Training, classes: int, shape: Shape, batch: int = 16) -> float:
    """Seconds per image of a forward and backward pass."""
    module = untrained(config, tuple(map(str, range(classes))), shape, (), seed=0).module
    images, labels = torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.long)
    return _timed(lambda: F.cross_entropy(module(images), labels).backward()) / batch


def prior_work(
    method: Any, shape: Shape, classes: int, public: int, once: Once
) -> tuple[str, float]:
    if hasattr(method, "networks") and not getattr(method, "ready", False):
        images = method.steps * method.batch * method.critic_steps
        seconds = images * once(_critic_seconds, method, shape, classes)
        return (
            f"{method.name}: {method.steps:,} steps of {method.critic_steps} × {method.batch} images",
            seconds,
        )
    if hasattr(method, "build_students"):
        return f"{method.name}: {method.epochs} epochs of {public:,} images each", (
            method.epochs * public * once(_student_seconds, method, shape, classes)
        )
    return "load weights", 0.5


def _student_seconds(method: Any, shape: Shape, classes: int, batch: int = 16) -> float:
    """Seconds per image of a forward and backward pass of all students."""
    with seeded(0, "cost"):
        students = method.build_students(shape, classes)
    images = torch.zeros(batch, *shape)
    return (
        _timed(
            lambda: torch.stack([student(images).sum() for student in students]).sum().backward()
        )
        / batch
    )


def _generator_seconds(method: Any, shape: Shape, batch: int = 4) -> float:
    """Seconds per image of a forward and backward pass of a generator that is read from a file."""
    prior = method.read(shape)
    latents = torch.zeros(batch, prior.latent, requires_grad=True)
    labels = torch.zeros(batch, dtype=torch.long)
    with frozen(*prior.modules):
        return _timed(lambda: prior.images(latents, labels).sum().backward()) / batch


def _critic_seconds(method: Any, shape: Shape, classes: int, batch: int = 16) -> float:
    """Seconds per image of one critic step with its penalty, about three passes through generator and critic."""
    with seeded(0, "cost"):
        generator, critic = method.networks(shape, classes)
    labels = torch.zeros(batch, dtype=torch.long)
    given = {"": (), "label": (labels,), "hint": (torch.zeros(batch, shape[0] + 1, *shape[1:]),)}[
        getattr(method, "condition", "")
    ]
    judged = (labels,) if given and method.condition == "label" else ()
    return (
        3
        * _timed(
            lambda: (
                critic(generator(torch.zeros(batch, method.latent), *given), *judged)
                .sum()
                .backward()
            )
        )
        / batch
    )


def _timed(step: Callable[[], Any]) -> float:
    with seeded(0, "cost"):  # dropout
        step()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
