"""The base of priors that add networks to another prior which imitate the target."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior, ScoredDraws
from frostglass.core.types import Images, Shape, Target
from frostglass.core.views import ModelView
from frostglass.models.build import build, source
from frostglass.models.checkpoint import load_body, read_body
from frostglass.models.taps import find_head
from frostglass.priors.base import PriorMethod, PriorTask, identity_hashes, priors
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.fused import fuse
from frostglass.runtime.layout import fast_training
from frostglass.runtime.seeding import generator_for, seed_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

CHUNK = 256  # images shown at once where nothing is trained
ImagesAt = Callable[[Tensor], Tensor]  # from indices to images


@dataclass(frozen=True)
class Lessons:
    """What students learn from: images, and the target's answers to them.

    `answers` (N, K) are probabilities. `features` (2, F) are the statistics of the target's
    features, if they were asked for. `scored` are draws of the base, if these are all images.
    `weights` (N,) say how much each image counts, where a method uses them. `facts` are added to
    the prior's record.
    """

    images: ImagesAt
    answers: Tensor
    features: Tensor | None = None
    scored: ScoredDraws | None = None
    weights: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@parameters
class ImitatingPrior(PriorMethod):
    """Another prior with networks that learn the target's answers, by SGD.

    Args:
        base: the prior to learn from or to add to, a table with its `name` and parameters.
        students: one table for each network: `model`, a network's name as in target.model;
            `options`, what its builder takes; `start`, a checkpoint from which all but the head is
            taken.
        epochs: passes over the images, for each network.
        batch: images per step.
        lr: step size of the optimiser, SGD or Adam.
        momentum: its momentum; β₁ of Adam.
        weight_decay: its weight decay.
    """

    base: dict[str, Any] = Field(
        default_factory=lambda: {"name": "pretrained", "weights": "faces32"}
    )
    students: tuple[dict[str, Any], ...] = ()
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4

    tied: ClassVar[bool] = True

    def __post_init__(self) -> None:
        types: dict[str, type] = {"model": str, "options": dict, "start": str}
        for number, student in enumerate(self.students):
            if "model" not in student or not all(
                isinstance(value, types.get(key, ())) for key, value in student.items()
            ):
                raise ValueError(
                    f"students[{number}]: expected a table like "
                    f'{{ model = "cnn", options = {{ width = 16 }} }}, got {student!r}'
                )
        name = self.base.get("name")
        if not isinstance(name, str) or name in IMITATING:
            others = ", ".join(other for other in priors.names() if other not in IMITATING)
            raise ValueError(
                f"base: expected a table with a name, one of {others}; got {self.base!r}"
            )
        try:
            self.base_method  # noqa: B018
        except ConfigError as error:
            raise ValueError(f"base: {error}") from error

    @abstractmethod
    def lessons(self, task: PriorTask, view: ModelView, base: Prior) -> Lessons:
        """Return what to learn from; the target is frozen."""

    @abstractmethod
    def lr_at(self, epoch: int) -> float:
        """Return the step size of an epoch."""

    @abstractmethod
    def loss(
        self,
        student: nn.Module,
        images: Tensor,
        answers: Tensor,
        rng: torch.Generator,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch; `weights` are those of the lessons, if they have any."""

    def optimizer(self, student: nn.Module) -> torch.optim.Optimizer:
        """Return what trains a student; its step size is set in each epoch."""
        rule = torch.optim.SGD(
            student.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        return fuse(rule)

    def mode(self, student: nn.Module) -> nn.Module:
        """Bring a student to the mode in which it is trained."""
        return student.train()

    def check_base(self, base: Prior) -> None:
        """Refuse a base that cannot be imitated on."""

    @property
    def base_method(self) -> PriorMethod:
        """The method of the prior that students are added to."""
        return priors.build(self.base)

    def files(self) -> list[Path]:
        paths = [
            path
            for student in self.students
            for path in (student.get("start"), source(student["model"]))
            if path
        ]
        return [*self.base_method.files(), *map(Path, paths)]

    def build_students(
        self, image_shape: Shape, classes: int, *, seed: int = 0
    ) -> tuple[nn.Module, ...]:
        """Build the students for images of one shape, freshly initialised."""
        plain = self._plain_students(image_shape, classes, seed=seed)
        return self._with_heads(plain, image_shape, seed=seed)

    def with_head(self, student: nn.Module, image_shape: Shape, *, seed: int) -> nn.Module:
        """Return a student with the head that the method gives it; by default its own."""
        return student

    def _with_heads(
        self, students: Iterable[nn.Module], image_shape: Shape, *, seed: int
    ) -> tuple[nn.Module, ...]:
        return tuple(
            self.with_head(student, image_shape, seed=seed_for(seed, "head", number))
            for number, student in enumerate(students)
        )

    def _plain_students(
        self, image_shape: Shape, classes: int, *, seed: int
    ) -> tuple[nn.Module, ...]:
        return tuple(
            build(
                student["model"],
                classes=classes,
                image_shape=image_shape,
                seed=seed_for(seed, "student", number),
                **student.get("options", {}),
            )
            for number, student in enumerate(self.students)
        )

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        base = self.base_method.untrained(image_shape, classes)
        return self.skeleton(image_shape, classes, base)

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        base = base or self.base_method.skeleton(image_shape, classes)
        self.check_base(base)
        with torch.device("cpu"):  # networks are tried when built, which meta tensors cannot be
            students = self.build_students(base.image_shape, classes)
        device = torch.get_default_device()
        students = tuple(student.to(device).eval() for student in students)
        return replace(base, info=self._info(base, []), classes=classes, students=students)

    def _info(self, base: Prior, facts: list[dict[str, Any]]) -> dict[str, Any]:
        kept = {
            fact: base.info[fact] for fact in ("resize", "seen_identities") if fact in base.info
        }
        return {**kept, "method": self.record(), "base": dict(base.info), "students": facts}

    def problems(self, public: int) -> list[str]:
        return self.base_method.problems(public)

    def fit(self, task: PriorTask) -> Prior:
        """Extend `task.base`, which is trained here if it is not given."""
        view, base, seed = task.view, task.base, task.seed
        if view is None:
            raise ConfigError(
                f"{self.name} are fitted to one target: train them with that target's view"
            )
        if base is None:
            method = self.base_method
            base = method.fit(replace(task, view=view if method.tied else None))
        if base.tied_to not in (None, view.target_key):
            raise ConfigError(
                f"the base prior was fitted to the target {base.tied_to} and not to "
                f"{view.target_key}: make one for this target"
            )
        self.check_base(base)
        students = self._started(base.image_shape, view.classes, seed)
        with frozen(view.module):
            lessons = self.lessons(task, view, base)
        facts = []
        for number, student in enumerate(students):
            student.to(task.device)
            with fast_training(student, base.image_shape):
                self._learn(number, student, lessons, seed=seed, work=task.work)
            agreement = self._agreement(student, lessons)
            facts.append({"model": self.students[number]["model"], **agreement})
        return replace(
            base,
            seen_identities=torch.cat(
                [base.seen_identities, identity_hashes(task.public.names)]
            ).unique(),
            info={**self._info(base, facts), **lessons.facts},
            tied_to=view.target_key,
            classes=view.classes,
            students=students,
            features=lessons.features,
            scored=lessons.scored,
            key="",
        )

    def _started(self, image_shape: Shape, classes: int, seed: int) -> tuple[nn.Module, ...]:
        """Build the students, with the weights of their `start` if they have one."""
        students = self._plain_students(image_shape, classes, seed=seed)
        for student, table in zip(students, self.students, strict=True):
            if start := table.get("start"):
                head = find_head(student, image_shape)
                load_body(student, head, read_body(student, head, start))
        return self._with_heads(students, image_shape, seed=seed)

    def _learn(
        self, number: int, student: nn.Module, lessons: Lessons, *, seed: int, work: Work
    ) -> None:
        """Train one student in place, with a checkpoint after each epoch, the last one too."""
        name, count = f"student{number}", len(self.students)
        optimizer, first = self.optimizer(student), 0
        if saved := work.load(name):
            tensors, values = saved
            first = values["epoch"]
            student.load_state_dict(under_prefix("module", tensors))
            restore_optimizer(optimizer, under_prefix("optimizer", tensors))
        elif not number:
            work.progress(0, count * self.epochs, "answers are known")
        for epoch in range(first, self.epochs):
            for group in optimizer.param_groups:
                group["lr"] = self.lr_at(epoch)
            rng = generator_for(seed, "students", number, epoch)
            with seeded(seed, "students", number, epoch, "noise"):  # dropout inside the student
                loss = self._epoch(self.mode(student), optimizer, lessons, rng)
            if not math.isfinite(loss):
                raise RunError(
                    f"{self.name}: the loss of {self.students[number]['model']} is {loss} in epoch "
                    f"{epoch}: lower prior.lr"
                )
            tensors = with_prefix("module", student.state_dict())
            tensors |= with_prefix("optimizer", optimizer_tensors(optimizer))
            work.save(name, tensors, {"epoch": epoch + 1})
            done, total = number * self.epochs + epoch + 1, count * self.epochs
            work.progress(done, total, f"student {number + 1} of {count}, divergence {loss:.3f}")
        student.eval()

    def _epoch(
        self,
        student: nn.Module,
        optimizer: torch.optim.Optimizer,
        lessons: Lessons,
        rng: torch.Generator,
    ) -> float:
        """Train for one pass over the images; return the mean loss."""
        order = torch.randperm(len(lessons.answers), generator=rng)
        device = device_of(student)
        total = torch.zeros((), device=device)  # read once: reading waits for the device
        # Near-equal batches: no image is dropped and no batch is too small for batch norm.
        batches = max(1, min(math.ceil(len(order) / self.batch), len(order) // 2))
        for index in order.tensor_split(batches):
            answers = lessons.answers[index].to(device)
            weights = None if lessons.weights is None else lessons.weights[index].to(device)
            loss = self.loss(student, lessons.images(index), answers, rng, weights)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(index)
        return total.item() / len(order)

    def _agreement(self, student: nn.Module, lessons: Lessons) -> dict[str, float]:
        """Return the mean divergence from the target, and the share of equal predictions."""
        divergence, same, device = 0.0, 0.0, device_of(student)
        count = len(lessons.answers)
        with frozen(student), torch.no_grad():
            for index in torch.arange(count).split(CHUNK):
                logits = student(lessons.images(index))
                expected = lessons.answers[index].to(device)
                divergence += self.divergence(logits, expected).item() * len(index)
                same += (logits.argmax(1) == expected.argmax(1)).sum().item()
        return {"divergence": divergence / count, "agreement": same / count}

    def divergence(self, logits: Tensor, answers: Tensor) -> Tensor:
        """Return the batch mean of KL(p_T ‖ p_S) of a student's logits."""
        return distillation(logits, answers, 1.0)


IMITATING = ("experts", "students", "surrogates")  # one cannot be the base of another


def distillation(logits: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return the batch mean of KL(p_T ‖ p_S) / temperature².

    `logits` (N, K) are the student's, `scores` (N, K) the target's probabilities at temperature 1.
    """
    target = (scores.log() / temperature).softmax(1)  # log-probabilities are logits
    divergence = F.kl_div((logits / temperature).log_softmax(1), target, reduction="batchmean")
    return divergence / temperature**2


def images_of(
    base: Prior,
    latents: Tensor,
    labels: Tensor,
    make: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Images:
    """Generate the images of latents and labels, rounded to 8 bits as public images are.

    `make` does so in [0, 1], by default the prior itself.
    """
    make = make or base.images
    device = device_of(base.generator)
    with frozen(*base.modules), torch.no_grad():
        parts = [
            make(z.to(device), y.to(device)).mul(255).round().byte().cpu()
            for z, y in zip(latents.split(CHUNK), labels.split(CHUNK), strict=True)
        ]
    return Images(torch.cat(parts), labels, (), ("drawn",) * len(labels))


def resized(public: Images, shape: Shape, device: torch.device | None = None) -> ImagesAt:
    """Return a function from indices to public images of that shape, as a target sees them."""
    target = Target(module=nn.Identity(), classes=(), image_shape=shape, head="")
    device = device or default_device()
    return lambda index: target.fit(public.floats(index).to(device))
