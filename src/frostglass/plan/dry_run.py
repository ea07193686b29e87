"""Dry runs: the steps of an audit on the meta device, with brief copies of all methods.

A dry run executes the code of each step at its real batch size, for few iterations, people and
images. Nothing is computed and next to nothing is allocated. The cost of a brief step is scaled to
the real one by the budgets that the methods announce.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from frostglass.attacks._search.runner import ModelAttack
from frostglass.attacks.base import Attack
from frostglass.attacks.features.base import spread_evenly
from frostglass.auditing.products import FeatureExposure, ImageBatch, Released
from frostglass.auditing.steps import (
    ATTACK,
    CUT,
    PRETRAIN,
    PRIOR,
    SCORES,
    SPLIT,
    TARGET,
    VERIFIER,
)
from frostglass.core.assets import Assets
from frostglass.core.errors import FrostglassError
from frostglass.core.method import Budget, Method
from frostglass.core.types import Reconstructions, Split, Target
from frostglass.models.base import MODEL_ERRORS, first_line, probe
from frostglass.plan.brief import BATCH, Call, blank_split
from frostglass.plan.ledger import META, Cost, Ledger
from frostglass.plan.time import Machine
from frostglass.store.files import Work
from frostglass.store.manifest import MANIFEST
from frostglass.store.step import Step, Task, with_key
from frostglass.store.store import Store
from frostglass.training.settings import PUBLIC, STRANGERS, Training

T = TypeVar("T")
KEY = re.compile(r"\b[0-9a-f]{24}")
READ = 10_000  # bytes moved to read, crop and compare one pixel of a dataset; measured
ALIKE = 0.1  # difference between the costs of two networks that are dry-run as one
TYPICAL = Machine(calls=5e-6, conv=1e-11, matmul=1e-11, moved=1e-10)  # to compare networks
FIXED = 0.2  # share of the work that does not grow with people, below which it is not separated
DEEP = 2_000  # operator calls of a dry run that is not repeated at twice the size
MAX_CACHE = 2**30  # bytes; methods keep no more features of public images in memory


class DryRunWork(Work):
    """The work folder of a dry run: checkpoints stay in memory, meta tensors as shapes."""

    def __init__(self, ledger: Ledger):
        super().__init__(Path())
        self.begun: Cost | None = None  # cost when a training began, if it reports that
        self.looped: Cost | None = None  # cost at the last reported progress
        self._ledger = ledger
        self._saved: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        self._ledger.charge(sum(tensor.nbytes for tensor in tensors.values()))  # one buffer
        shapes = {
            key: (tensor.shape, tensor.dtype) if tensor.is_meta else tensor
            for key, tensor in tensors.items()
        }
        self._saved[name] = shapes, dict(values)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if name not in self._saved:
            return None
        shapes, values = self._saved[name]
        tensors = {
            key: value
            if isinstance(value, Tensor)
            else torch.empty(value[0], dtype=value[1], device=META)
            for key, value in shapes.items()
        }
        return tensors, values

    def names(self) -> list[str]:
        return sorted(self._saved)

    def sheet(self, name: str, images: Tensor) -> None:
        pass

    def progress(self, done: int, total: int, note: str = "") -> None:
        self.looped = replace(self._ledger.cost)
        if not done and self.begun is None:
            self.begun = self.looped


@dataclass(frozen=True)
class Planned:
    """A step that an experiment will run: its work in words, and its estimated cost."""

    task: Task[Any]
    work: str
    cost: Cost

    @property
    def title(self) -> str:
        return title_of(self.task)


@dataclass(frozen=True)
class Measured:
    """The result of a dry run: the product, the work in words, the cost, and memory kept."""

    product: Any
    work: str
    cost: Cost
    kept: int = 0


class DryRunStore(Store):
    """A store that dry-runs steps instead of running them, and writes nothing.

    `planned` has the steps by key, `unknown` the first reason why a step could not be dry-run.
    Steps that differ only in seeds, or in inputs of the same structure, are run once. A split that
    is in the store is loaded, because keys of released features depend on its images.
    """

    def __init__(self, root: Path, ledger: Ledger):
        super().__init__(root, device=META)
        self.planned: dict[str, Planned] = {}
        self.unknown = ""
        self._real = Store(root, device=torch.device("cpu"))
        self._ledger = ledger
        self._products: dict[str, Any] = {}
        self._measured: dict[str, Measured] = {}
        self._structures: dict[str, str] = {}  # by key of the product
        self._targets: dict[str, list[list[float]]] = {}  # costs of those that differ
        self._depth = 0

    def step(self, step: Step[T], config: Any, /, *, seed: int, **inputs: Any) -> T:
        task = Task.of(step, config, inputs, seed, self.root)
        if task.key in self._products:
            return self._products[task.key]
        if isinstance(exposure := inputs.get("exposure"), FeatureExposure) and not self._depth:
            _request_releases(config, exposure, inputs["assets"])
        structure = self._structure(task)
        if structure in self._measured:
            self._ledger.keep(self._measured[structure].kept)
        else:
            self._measured[structure] = self._measure(task)
        measured = self._measured[structure]
        product = with_key(measured.product, task.key)
        if step is SPLIT and (task.final / MANIFEST).is_file():
            product = self._real.step(step, config, seed=seed, **inputs)
        self._products[task.key] = product
        self._structures[task.key] = self._product_structure(task, product) or structure
        if not self._depth:
            self.planned[task.key] = Planned(task, measured.work, measured.cost)
        return product

    def read(self, make: Callable[..., T], *args: Any) -> T:
        """Return what `make` reads from files, once for all experiments."""
        key = f"{make.__qualname__} {args}"
        if key not in self._products:
            self._products[key] = make(*args)
        return self._products[key]

    def _structure(self, task: Task[Any]) -> str:
        """Return a key of what a step's cost depends on: no seed, and inputs by structure.

        Weights, rates and budgets of methods count as announced work, and as zero or not.
        """
        inputs, config = dict(task.identity["inputs"]), task.identity["config"]
        for value in task.inputs.values():
            if isinstance(value, ImageBatch):
                self._structures[value.key] = f"images {tuple(value.images.shape)}"
        if task.step not in (SPLIT, TARGET):
            config = [without_floats(config), str(Call(task.config, task.inputs).budget())]
            inputs.pop("number", None)
        identity = [task.step.name, config, inputs]
        text = json.dumps(identity, sort_keys=True)
        text = KEY.sub(lambda key: self._structures.get(key[0], key[0]), text)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _product_structure(self, task: Task[Any], product: Any) -> str:
        """Describe a product by its structure if that is all that matters; "" otherwise."""
        if isinstance(product, Reconstructions):
            return f"reconstructions {tuple(product.images.shape)} {tuple(product.latents.shape)}"
        if isinstance(product, Released):  # an attack on it is about the encoder
            return (
                f"released {self._structures[task.inputs['target'].key]} {product.features.shape}"
            )
        return self._target_structure(product) if isinstance(product, Target) else ""

    def _target_structure(self, target: Target) -> str:
        """Name a target by the first one whose pass takes as long and moves as much."""
        with self._ledger.measure() as cost:
            probe(target.module, torch.empty(BATCH, *target.image_shape, device=META))
        work = [TYPICAL.seconds(cost), cost.moved]
        place = f"target {len(target.classes)} {target.image_shape} {target.cut}"
        alike = self._targets.setdefault(place, [])
        for number, other in enumerate(alike):
            if all(math.isclose(*pair, rel_tol=ALIKE) for pair in zip(work, other, strict=True)):
                return f"{place} {number}"
        alike.append(work)
        return f"{place} {len(alike) - 1}"

    def _measure(self, task: Task[Any]) -> Measured:
        before = self._ledger.now
        self._depth += 1
        try:
            measured = self._split(task) if task.step is SPLIT else self._dry_run(task)
        except (*MODEL_ERRORS, FrostglassError) as error:
            reason = f"{title_of(task)} cannot be dry-run: {first_line(error)}"
            self.unknown = self.unknown or reason
            if task.step is not SCORES:  # later steps need the product
                raise
            measured = Measured(None, "", Cost())
        finally:
            self._depth -= 1
        product = measured.product
        if isinstance(product, Target):
            product = replace(product, info={**product.info, "seconds": 0.0})
        return replace(measured, product=product, kept=max(0, self._ledger.now - before))

    def _split(self, task: Task[Any]) -> Measured:
        """Return blank images; a split is mapped from a file, and so are most datasets."""
        with self._ledger.measure() as cost:
            split: Split = blank_split(task.config, task.inputs["fractions"])
            images = sum(map(len, (split.train, split.validation, split.test, split.public)))
            if task.config.in_memory:
                self._ledger.charge(images * math.prod(split.train.shape))
        cost.moved += READ * images * math.prod(split.train.shape[1:])
        return Measured(split, f"{images:,} images", cost)

    def _dry_run(self, task: Task[Any]) -> Measured:
        """Run a brief copy of a step and scale its cost to the whole step.

        A second run with twice the people and images separates the part that grows with them.
        """
        full = Call(task.config, task.inputs)
        brief = full.brief()
        product, once, reported = self._run(task, brief)
        looped = reported.looped or once
        memory, work = once.memory, full.budget().description
        if isinstance(full.config, Training):
            images = full.trained / max(1, brief.trained)
            epochs = full.config.epochs / brief.config.epochs
            cost = Cost().plus(looped, epochs * images).plus(once.plus(looped, -1.0), images)
            # Targets, evaluators and embedders are all trained by the same step.
            whose = "public images" if full.inputs["data"] in (PUBLIC, STRANGERS) else "images"
            work = f"{full.config.model}: {work.replace('images', whose)}"
        elif not brief.images:
            ratio = 1.0 if isinstance(full.config, Method) else full.count / brief.count
            work, cost = work or _simple_work(task, full), Cost().plus(once, ratio)
        elif (full.fixed > FIXED * full.images or (full.uses_public and once.calls < DEEP)) and (
            larger := full.brief(2)
        ).images > brief.images:
            _, twice, _ = self._run(task, larger)
            memory = twice.memory + _cached(full, brief, larger, twice.memory - memory)
            cost = _separated(full, brief, larger, once, twice)
        else:
            cost = Cost().plus(once, full.images / brief.images)
        short, begun = brief.budget(), reported.begun
        if task.step in (PRIOR, PRETRAIN) and begun and short.evaluations and short.trained:
            cost = _learned(full.budget(), short, once, begun, looped)
        with self._ledger.measure() as whole:
            product = full.full_size(product)
            if task.step is ATTACK and not isinstance(full.config, ModelAttack):
                # Only attacks on models write their images to a file, part by part.
                self._ledger.charge(2 * 4 * math.prod(product.images.shape))
        return Measured(product, work, replace(cost, memory=max(memory, whole.memory)))

    def _run(self, task: Task[Any], call: Call) -> tuple[Any, Cost, DryRunWork]:
        """Return the product, the cost, and what was reported meanwhile."""
        work = DryRunWork(self._ledger)
        with self._ledger.measure() as cost:
            product = task.step.make(call.config, seed=0, work=work, device=META, **call.inputs)
        return product, cost, work


def _learned(whole: Budget, short: Budget, once: Cost, begun: Cost, looped: Cost) -> Cost:
    """Scale the cost of a step that asks the attacked network and learns from its answers.

    Images are asked once, before a training begins, and learned from in each epoch: a brief copy
    with one epoch has another share of both. What comes after the last epoch is done once too.
    """
    learning = looped.plus(begun, -1.0)
    cost = Cost().plus(once.plus(learning, -1.0), whole.evaluations / short.evaluations)
    return cost.plus(learning, whole.trained / short.trained)


def _simple_work(task: Task[Any], call: Call) -> str:
    """Describe a step whose method announces no work."""
    named = {CUT: f"cut after {task.config}", VERIFIER: "enrol people, set thresholds"}
    return named.get(task.step, f"{call.count:,} images")


def without_floats(value: Any) -> Any:
    """Return a plain config with floats as zero or not."""
    if isinstance(value, dict):
        return {name: without_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_floats(item) for item in value]
    return bool(value) if isinstance(value, float) else value


def _separated(full: Call, brief: Call, larger: Call, once: Cost, twice: Cost) -> Cost:
    """Scale the fixed part of a cost and the part that grows with people and images separately."""
    growth = twice.plus(once, -1.0)
    varying = (brief.images - brief.fixed) / (larger.images - brief.images)
    work = (full.images - full.fixed) / (larger.images - brief.images)
    cost = Cost().plus(growth, work)
    if brief.fixed:
        cost = cost.plus(once.plus(growth, -varying), full.fixed / brief.fixed)
    return cost


def _cached(full: Call, brief: Call, larger: Call, growth: int) -> int:
    """Estimate the memory of what is kept of the public images that the dry run leaves out."""
    if not full.uses_public or larger.size.public <= brief.size.public:
        return 0
    each = max(0, growth) / (larger.size.public - brief.size.public)
    return int(min(each * (full.size.public - larger.size.public), MAX_CACHE))


def _request_releases(attack: Attack, exposure: FeatureExposure, assets: Assets) -> None:
    """Plan what a device releases while an attack runs: again, and for public images."""
    for number in range(1, attack.releases):
        exposure.device.release(exposure.victims, number)
    if attack.protected_images:
        public = assets.require_public()
        rows = spread_evenly(len(public), attack.protected_images)
        exposure.device.release(ImageBatch.of(public.floats(rows), "public"))


def title_of(task: Task[Any]) -> str:
    """Name a step and its method or model."""
    config = task.config
    model = config.model if isinstance(config, Training) else ""
    name = config.name if isinstance(config, Method) else model
    return f"{task.step.name} {name}".strip()
