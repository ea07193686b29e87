"""LOMMA's additions to a prior: networks that imitate the target, statistics of its features."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Shape, Target
from frostglass.core.views import Capability, ModelView
from frostglass.models.build import build, source
from frostglass.models.checkpoint import load_body, read_body
from frostglass.models.taps import find_head
from frostglass.priors.base import PriorMethod, PriorTask, identity_hashes, priors
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

CHUNK = 256  # images shown at once where nothing is trained
EFFICIENT = tuple({"model": f"timm:efficientnet_b{number}"} for number in range(3))
ImagesAt = Callable[[Tensor], Tensor]  # from indices to public images


@priors.register
@parameters
class Students(PriorMethod):
    """Another prior with networks that imitate the target, and statistics of the target's features.

    A student minimises KL(p_T ‖ p_S) / temperature² on public images, and on draws of the base
    prior if asked to, p = softmax(logits / temperature), by SGD. An attack on target and students
    together finds what they agree on instead of one network's quirks; one that subtracts students
    finds what the target alone knows. Mean and standard deviation of the penultimate
    features bound the logit loss, which has no bound of its own.

    Paper: Nguyen et al., Re-thinking Model Inversion Attacks Against Deep Neural Networks (LOMMA),
    CVPR 2023, arXiv 2304.01669.
    Differs: the published students start from ImageNet weights; here they start from random ones
    unless `start` names a file. KL is divided by temperature² as in the released code, where Hinton
    et al. multiply; at the published temperature of 1 both are the same. The released settings have
    lr 0.01, the names of the released students 0.02. The feature statistics take exactly
    `statistics` images drawn at random, where the released code takes whole batches until it has
    more than 5,000, and stores the standard deviation under the name of a log-variance. The batches
    of an epoch are near-equal instead of full ones and a rest. Images are brought to the size that
    the base prior makes. `draws` is our option.

    Args:
        base: the prior to add to, a table with its `name` and parameters.
        students: one table for each student: `model`, a network's name as in target.model;
            `options`, what its builder takes; `start`, a checkpoint from which all but the head is
            taken. Empty for statistics only.
        statistics: public images from which the features' mean and standard deviation come; 0 for
            students only, which need the target's scores alone.
        draws: images drawn from the base prior for the students to learn from, besides the public
            ones; 0 as published. A prior that completes hints has none to draw.
        epochs: passes over these images, for each student.
        batch: images per step.
        lr: SGD's step size.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.
        decay: factor on lr after every `decay_every` epochs.
        decay_every: epochs between two such factors; published as 20, which at 20 epochs is never.
        temperature: divides the logits of target and student before softmax.
    """

    base: dict[str, Any] = Field(
        default_factory=lambda: {"name": "pretrained", "weights": "faces32"}
    )
    students: tuple[dict[str, Any], ...] = EFFICIENT
    statistics: Annotated[int, Field(ge=0)] = 5_000
    draws: Annotated[int, Field(ge=0)] = 0
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    decay_every: Annotated[int, Field(ge=1)] = 20
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    title: ClassVar[str] = "Students (LOMMA)"
    tied: ClassVar[bool] = True

    @property
    def access(self) -> Capability:
        return "gradients" if self.statistics else "scores"

    def __post_init__(self) -> None:
        if not self.students and not self.statistics:
            raise ValueError(
                "neither students nor statistics are asked for: nothing would be added to the base "
                "prior"
            )
        if self.draws and not self.students:
            raise ValueError(f"draws ({self.draws}) are for students: name some, or set it to 0")
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
        if not isinstance(name, str) or name == "students":
            others = ", ".join(other for other in priors.names() if other != "students")
            raise ValueError(
                f"base: expected a table with a name, one of {others}; got {self.base!r}"
            )
        try:
            self.base_method  # noqa: B018
        except ConfigError as error:
            raise ValueError(f"base: {error}") from error

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
        placeholder = torch.tensor([[0.0], [1.0]]) if self.statistics else None
        return replace(self.skeleton(image_shape, classes, base), features=placeholder)

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        base = base or self.base_method.skeleton(image_shape, classes)
        self._check_draws(base)
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
        public, view, base, seed = task.public, task.view, task.base, task.seed
        if view is None:
            raise ConfigError(
                "students are fitted to one target: train them with that target's view"
            )
        if base is None:
            method = self.base_method
            base = method.fit(replace(task, view=view if method.tied else None))
        if base.tied_to not in (None, view.target_key):
            raise ConfigError(
                f"the base prior was fitted to the target {base.tied_to} and not to "
                f"{view.target_key}: make one for this target"
            )
        self._check_draws(base)
        students = self._started(base.image_shape, view.classes, seed)
        images, features, scores = (
            resized(public, base.image_shape, task.device),
            None,
            torch.empty(0),
        )
        with frozen(view.module):
            if self.statistics:
                order = generator_for(seed, "students", "statistics")
                chosen = torch.randperm(len(public), generator=order)[: self.statistics]
                features = feature_statistics(view, images, chosen)
            if self.draws:
                drawn = drawn_images(base, self.draws, seed=seed)
                images = joined(images, len(public), resized(drawn, base.image_shape, task.device))
            if self.students:
                scores = target_scores(view, images, len(public) + self.draws)
        facts = []
        for number, student in enumerate(students):
            self._distil(number, student.to(task.device), images, scores, seed=seed, work=task.work)
            agreement = self._agreement(student, images, scores)
            facts.append({"model": self.students[number]["model"], **agreement})
        return replace(
            base,
            seen_identities=torch.cat(
                [base.seen_identities, identity_hashes(public.names)]
            ).unique(),
            info=self._info(base, facts),
            tied_to=view.target_key,
            classes=view.classes,
            students=students,
            features=features,
            key="",
        )

    def _check_draws(self, base: Prior) -> None:
        if self.draws and base.condition == "hint":
            raise ConfigError(
                f"draws ({self.draws}): the base prior completes hints, so nothing can be drawn "
                "from it: set draws to 0, or use another base"
            )

    def _started(self, image_shape: Shape, classes: int, seed: int) -> tuple[nn.Module, ...]:
        """Build the students, with the weights of their `start` if they have one."""
        students = self.build_students(image_shape, classes, seed=seed)
        for student, table in zip(students, self.students, strict=True):
            if start := table.get("start"):
                head = find_head(student, image_shape)
                load_body(student, head, read_body(student, head, start))
        return students

    def _distil(
        self,
        number: int,
        student: nn.Module,
        images: ImagesAt,
        scores: Tensor,
        *,
        seed: int,
        work: Work,
    ) -> None:
        """Train one student in place, with a checkpoint after each epoch, the last one too."""
        name, count = f"student{number}", len(self.students)
        optimizer = torch.optim.SGD(
            student.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        first = 0
        if saved := work.load(name):
            tensors, values = saved
            first = values["epoch"]
            student.load_state_dict(under_prefix("module", tensors))
            restore_optimizer(optimizer, under_prefix("optimizer", tensors))
        for epoch in range(first, self.epochs):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * self.decay ** (epoch // self.decay_every)
            rng = generator_for(seed, "students", number, epoch)
            order = torch.randperm(len(scores), generator=rng)
            with seeded(seed, "students", number, epoch, "noise"):  # dropout inside the student
                loss = self._epoch(student.train(), optimizer, images, scores, order)
            if not math.isfinite(loss):
                raise RunError(
                    f"students: the loss of {self.students[number]['model']} is {loss} in epoch "
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
        images: ImagesAt,
        scores: Tensor,
        order: Tensor,
    ) -> float:
        """Train for one pass over the images; return the mean loss."""
        total, device = 0.0, device_of(student)
        # Near-equal batches: no image is dropped and no batch is too small for batch norm.
        batches = max(1, min(math.ceil(len(order) / self.batch), len(order) // 2))
        for index in order.tensor_split(batches):
            loss = distillation(student(images(index)), scores[index].to(device), self.temperature)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
        return total / len(order)

    def _agreement(self, student: nn.Module, images: ImagesAt, scores: Tensor) -> dict[str, float]:
        """Return the mean divergence from the target, and the share of equal predictions."""
        divergence, same, device = 0.0, 0.0, device_of(student)
        with frozen(student), torch.no_grad():
            for index in torch.arange(len(scores)).split(CHUNK):
                logits, expected = student(images(index)), scores[index].to(device)
                divergence += distillation(logits, expected, self.temperature).item() * len(index)
                same += (logits.argmax(1) == expected.argmax(1)).sum().item()
        return {"divergence": divergence / len(scores), "agreement": same / len(scores)}

    def brief(self) -> Self:
        return replace(self, epochs=1, draws=min(self.draws, CHUNK))

    def budget(self, size: AuditSize) -> Budget:
        shown = size.public + self.draws
        scored = shown if self.students else 0
        return Budget(
            f"{len(self.students)} students × {self.epochs} epochs × {shown:,} images",
            evaluations=scored + min(self.statistics, size.public),
            trained=len(self.students) * self.epochs * shown,
        )


def distillation(logits: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return the batch mean of KL(p_T ‖ p_S) / temperature².

    `logits` (N, K) are the student's, `scores` (N, K) the target's probabilities at temperature 1.
    """
    target = (scores.log() / temperature).softmax(1)  # log-probabilities are logits
    divergence = F.kl_div((logits / temperature).log_softmax(1), target, reduction="batchmean")
    return divergence / temperature**2


def feature_statistics(view: ModelView, images: ImagesAt, chosen: Tensor) -> Tensor:
    """Return mean and population standard deviation (2, F) of the target's features."""
    with torch.no_grad():
        parts = [view.logits_and_features(images(index))[1] for index in chosen.split(CHUNK)]
    features = torch.cat(parts)
    _check_finite(features, "features")
    return torch.stack([features.mean(0), features.std(0, correction=0)])


def target_scores(view: ModelView, images: ImagesAt, count: int) -> Tensor:
    """Return the target's probabilities (N, K) for all images, asked once."""
    chunks = torch.arange(count).split(CHUNK)
    scores = torch.cat([view.scores(images(index)).cpu() for index in chunks])
    _check_finite(scores, "scores")
    return scores


def _check_finite(values: Tensor, what: str) -> None:
    if broken := int((~values.isfinite()).any(1).sum()):
        raise RunError(
            f"students: the target's {what} are not finite for {broken} of {len(values)} "
            "images: train the target again"
        )


def drawn_images(base: Prior, count: int, *, seed: int) -> Images:
    """Draw images of a prior, rounded to 8 bits as public images are; labels are random."""
    rng = generator_for(seed, "students", "draws")
    latents = torch.randn(count, base.latent, generator=rng)
    labels = torch.randint(max(1, base.classes), (count,), generator=rng)
    device = device_of(base.generator)
    with frozen(*base.modules), torch.no_grad():
        parts = [
            base.images(z.to(device), y.to(device)).mul(255).round().byte().cpu()
            for z, y in zip(latents.split(CHUNK), labels.split(CHUNK), strict=True)
        ]
    return Images(torch.cat(parts), labels, (), ("drawn",) * count)


def joined(first: ImagesAt, count: int, second: ImagesAt) -> ImagesAt:
    """Return the images of both: the first `count` indices are of the first."""

    def images(index: Tensor) -> Tensor:
        places = [(index < count).nonzero()[:, 0], (index >= count).nonzero()[:, 0]]
        chosen = zip((first, second), places, (0, count), strict=True)
        parts = [make(index[place] - base) for make, place, base in chosen if len(place)]
        return torch.cat(parts)[torch.cat(places).argsort().to(parts[0].device)]

    return images


def resized(public: Images, shape: Shape, device: torch.device | None = None) -> ImagesAt:
    """Return a function from indices to public images of that shape, as a target sees them."""
    target = Target(module=nn.Identity(), classes=(), image_shape=shape, head="")
    device = device or default_device()
    return lambda index: target.fit(public.floats(index).to(device))
