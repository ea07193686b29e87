"""LOMMA's additions to a prior: networks that imitate the target, and what its features look like on public pictures."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Shape, Target
from frostglass.core.views import Capability, ModelView
from frostglass.models.build import build, source
from frostglass.models.checkpoint import load_body, read_body
from frostglass.models.taps import find_head
from frostglass.priors.base import PriorMethod, identity_hashes, priors
from frostglass.runtime.device import default_device
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

CHUNK = 256  # pictures shown at once where nothing is learned from them
EFFICIENT = tuple({"model": f"timm:efficientnet_b{number}"} for number in range(3))
Pictures = Callable[[Tensor], Tensor]


@priors.register
@parameters
class Students:
    """Another prior with networks that imitate the target on public pictures, and with the statistics of the target's features there.

    A student minimises KL(p_T ‖ p_S) / temperature², p = softmax(logits / temperature), by SGD; an attack on target and students together finds what they
    agree on instead of one network's quirks. Mean and standard deviation of the penultimate features hold the logit loss, which has no bound of its own.

    Paper: Nguyen et al., Re-thinking Model Inversion Attacks Against Deep Neural Networks (LOMMA), CVPR 2023, arXiv 2304.01669.
    Differs: the published students begin from ImageNet weights; here they begin from random ones unless `start` names a file. KL is divided by temperature²
    as in the released code, where Hinton et al. multiply; at the published temperature of 1 both are the same. The released settings have lr 0.01, the names
    of the released students 0.02. The feature statistics take exactly `statistics` pictures drawn at random, where the released code takes whole batches until it
    has more than 5,000, and stores the standard deviation under the name of a log-variance. The batches of an epoch are near-equal instead of full
    ones and a rest. Pictures are brought to the size that the base prior makes.

    Args:
        base: the prior to add to, a table with its `name` and parameters.
        students: one table for each student: `model`, a network's name as in target.model; `options`, what its builder takes; `start`, a checkpoint
            from which all but the head is taken. Empty for statistics only.
        statistics: public pictures from which the features' mean and standard deviation come; 0 for students only, which need the target's scores alone.
        epochs: passes over the public pictures, for each student.
        batch: images a step.
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
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    decay_every: Annotated[int, Field(ge=1)] = 20
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    tied: ClassVar[bool] = True

    @property
    def needs(self) -> Capability:
        return "gradients" if self.statistics else "scores"

    def __post_init__(self) -> None:
        if not self.students and not self.statistics:
            raise ValueError(
                "neither students nor statistics are asked for: nothing would be added to the base prior"
            )
        kinds: dict[str, type] = {"model": str, "options": dict, "start": str}
        for number, student in enumerate(self.students):
            if "model" not in student or not all(
                isinstance(value, kinds.get(key, ())) for key, value in student.items()
            ):
                raise ValueError(
                    f'students[{number}]: expected a table like {{ model = "cnn", options = {{ width = 16 }} }}, got {student!r}'
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
        """The method that makes the prior which is added to."""
        return priors.get(self.base["name"])(
            **{key: value for key, value in self.base.items() if key != "name"}
        )

    def files(self) -> list[str]:
        """Files that the base prior and the students are read from."""
        theirs: list[Any] = getattr(self.base_method, "files", list)()
        own = [
            path
            for student in self.students
            for path in (student.get("start"), source(student["model"]))
            if path
        ]
        return [*map(str, theirs), *own]

    def build_students(
        self, image_shape: Shape, classes: int, *, seed: int = 0
    ) -> tuple[nn.Module, ...]:
        """The students for pictures of one shape, freshly initialised."""
        return tuple(
            build(
                student["model"], classes=classes, image_shape=image_shape, seed=seed_for(seed, "student", number),
                **student.get("options", {}),
            )
            for number, student in enumerate(self.students)
        )  # fmt: skip

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        base: Prior | None = None,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Add to `base` (made here if it is not given) what public pictures tell of the target; resumes in `work` with the same result."""
        if view is None:
            raise ConfigError(
                "students are fitted to one target: train them with that target's view"
            )
        work = work or Work.scratch()
        if base is None:
            base = self.base_method.train(
                public, view if self.base_method.tied else None, seed=seed, work=work
            )
        if base.tied_to not in (None, view.target_key):
            raise ConfigError(
                f"the base prior was fitted to the target {base.tied_to} and not to {view.target_key}: make one for this target"
            )
        made = self.build_students(base.image_shape, view.classes, seed=seed)
        for student, table in zip(made, self.students, strict=True):
            if start := table.get("start"):
                head = find_head(student, base.image_shape)
                load_body(student, head, read_body(student, head, start))
        pictures, facts = resized(public, base.image_shape), []
        with frozen(view.module):
            features = (
                feature_statistics(view, pictures, self._chosen(len(public), seed))
                if self.statistics
                else None
            )
            taught = scored(view, pictures, len(public)) if self.students else torch.empty(0)
        for number, student in enumerate(made):
            self._distil(
                number, student.to(default_device()), pictures, taught, seed=seed, work=work
            )
            facts.append(
                {
                    "model": self.students[number]["model"],
                    **self._compared(student, pictures, taught),
                }
            )
        return replace(
            base,
            seen_identities=torch.cat(
                [base.seen_identities, identity_hashes(public.names)]
            ).unique(),
            info={
                **{
                    fact: base.info[fact]
                    for fact in ("resize", "seen_identities")
                    if fact in base.info
                },  # students change neither
                "method": {"name": "students", "parameters": asdict(self)},  # type: ignore[call-overload]
                "base": dict(base.info),
                "students": facts,
            },
            tied_to=view.target_key,
            classes=view.classes,
            students=made,
            features=features,
            key="",
        )

    def _chosen(self, count: int, seed: int) -> Tensor:
        """Which of `count` public pictures the statistics are taken from."""
        return torch.randperm(count, generator=generator_for(seed, "students", "statistics"))[
            : self.statistics
        ]

    def _distil(
        self,
        number: int,
        student: nn.Module,
        pictures: Pictures,
        taught: Tensor,
        *,
        seed: int,
        work: Work,
    ) -> None:
        """Train one student in place, with a checkpoint after each epoch, the last one too: a finished student is not trained again."""
        name = f"student{number}"
        optimizer = torch.optim.SGD(
            student.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        begin = 0
        if saved := work.load(name):
            tensors, values = saved
            begin = values["epoch"]
            student.load_state_dict(under_prefix("module", tensors))
            restore_optimizer(optimizer, under_prefix("optimizer", tensors))
        for epoch in range(begin, self.epochs):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * self.decay ** (epoch // self.decay_every)
            order = torch.randperm(
                len(taught), generator=generator_for(seed, "students", number, epoch)
            )
            with seeded(seed, "students", number, epoch, "noise"):  # dropout inside the student
                loss = self._epoch(student.train(), optimizer, pictures, taught, order)
            if not math.isfinite(loss):
                raise RunError(
                    f"students: the loss of {self.students[number]['model']} is {loss} in epoch {epoch}: lower prior.lr"
                )
            work.save(
                name,
                with_prefix("module", student.state_dict())
                | with_prefix("optimizer", optimizer_tensors(optimizer)),
                {"epoch": epoch + 1},
            )
            done = number * self.epochs + epoch + 1
            work.progress(
                done,
                len(self.students) * self.epochs,
                f"student {number + 1} of {len(self.students)}, divergence {loss:.3f}",
            )
        student.eval()

    def _epoch(
        self,
        student: nn.Module,
        optimizer: torch.optim.Optimizer,
        pictures: Pictures,
        taught: Tensor,
        order: Tensor,
    ) -> float:
        """One pass over the public pictures; returns the mean loss."""
        total = 0.0
        # Near-equal batches: no picture is dropped and no batch is too small for batch norm.
        for index in order.tensor_split(
            max(1, min(math.ceil(len(order) / self.batch), len(order) // 2))
        ):
            loss = distillation(
                student(pictures(index)), taught[index].to(default_device()), self.temperature
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
        return total / len(order)

    def _compared(self, student: nn.Module, pictures: Pictures, taught: Tensor) -> dict[str, float]:
        """How near a student is to what the target said: the mean divergence, and the share of pictures both give the same class."""
        divergence = same = 0.0
        with frozen(student), torch.no_grad():
            for index in torch.arange(len(taught)).split(CHUNK):
                logits, wanted = student(pictures(index)), taught[index].to(default_device())
                divergence += distillation(logits, wanted, self.temperature).item() * len(index)
                same += (logits.argmax(1) == wanted.argmax(1)).sum().item()
        return {"divergence": divergence / len(taught), "agreement": same / len(taught)}


def distillation(logits: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """KL(p_T ‖ p_S) / temperature², the mean over a batch: `logits` (N, K) are the student's, `scores` (N, K) the target's probabilities at temperature 1."""
    wanted = (scores.log() / temperature).softmax(1)  # the logarithms of probabilities are logits
    return (
        F.kl_div((logits / temperature).log_softmax(1), wanted, reduction="batchmean")
        / temperature**2
    )


def feature_statistics(view: ModelView, pictures: Pictures, chosen: Tensor) -> Tensor:
    """Mean and standard deviation (that of the pictures themselves, not an estimate for others), (2, F), of the target's penultimate features."""
    with torch.no_grad():
        features = torch.cat(
            [view.logits_and_features(pictures(index))[1] for index in chosen.split(CHUNK)]
        )
    _check_finite(features, "features")
    return torch.stack([features.mean(0), features.std(0, correction=0)])


def scored(view: ModelView, pictures: Pictures, count: int) -> Tensor:
    """The target's probabilities, (N, K), for all public pictures: they stay the same, so it is asked once."""
    scores = torch.cat(
        [view.scores(pictures(index)).cpu() for index in torch.arange(count).split(CHUNK)]
    )
    _check_finite(scores, "scores")
    return scores


def _check_finite(values: Tensor, what: str) -> None:
    broken = int((~values.isfinite()).any(1).sum())
    if broken:
        raise RunError(
            f"students: the target's {what} are not finite for {broken} of {len(values)} public pictures: train the target again"
        )


def resized(public: Images, shape: Shape) -> Pictures:
    """A function from indices to public pictures of that shape, as a target of that shape would see them."""
    eye = Target(module=nn.Identity(), classes=(), image_shape=shape, head="")
    return lambda index: eye.fit(public.floats(index).to(default_device()))
