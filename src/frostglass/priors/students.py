"""LOMMA's additions to a prior: networks that imitate the target, statistics of its features."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.priors._imitation import (
    CHUNK,
    ImagesAt,
    ImitatingPrior,
    Lessons,
    distillation,
    images_of,
    resized,
)
from frostglass.priors.base import PriorTask, priors
from frostglass.runtime.seeding import generator_for

EFFICIENT = tuple({"model": f"timm:efficientnet_b{number}"} for number in range(3))


@priors.register
@parameters
class Students(ImitatingPrior):
    """Another prior with networks that imitate the target, and statistics of the target's features.

    A student minimises KL(p_T ‖ p_S) / temperature² on public images, and on draws of the base
    prior if asked to, p = softmax(logits / temperature), by SGD. An attack on target and students
    together finds what they agree on instead of one network's quirks; one that subtracts students
    finds what the target alone knows. Mean and standard deviation of the penultimate
    features bound the logit loss, which has no bound of its own.

    Use: the prior of `lomma`, and of the variants "lomma" and "subtract" of other attacks.
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
        students: none for statistics only.
        statistics: public images from which the features' mean and standard deviation come; 0 for
            students only, which need the target's scores alone.
        draws: images drawn from the base prior for the students to learn from, besides the public
            ones; 0 as published. A prior that completes hints has none to draw.
        decay: factor on lr after every `decay_every` epochs.
        decay_every: epochs between two such factors; published as 20, which at 20 epochs is never.
        temperature: divides the logits of target and student before softmax.
    """

    students: tuple[dict[str, Any], ...] = EFFICIENT
    statistics: Annotated[int, Field(ge=0)] = 5_000
    draws: Annotated[int, Field(ge=0)] = 0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.5
    decay_every: Annotated[int, Field(ge=1)] = 20
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    title: ClassVar[str] = "Students (LOMMA)"

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
        super().__post_init__()

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        placeholder = torch.tensor([[0.0], [1.0]]) if self.statistics else None
        return replace(super().untrained(image_shape, classes), features=placeholder)

    def lessons(self, task: PriorTask, view: ModelView, base: Prior) -> Lessons:
        public, features, scores = task.public, None, torch.empty(0)
        images = resized(public, base.image_shape, task.device)
        if self.statistics:
            order = generator_for(task.seed, "students", "statistics")
            chosen = torch.randperm(len(public), generator=order)[: self.statistics]
            features = feature_statistics(view, images, chosen)
        if self.draws:
            drawn = drawn_images(base, self.draws, seed=task.seed)
            images = joined(images, len(public), resized(drawn, base.image_shape, task.device))
        if self.students:
            scores = target_scores(view, images, len(public) + self.draws)
        return Lessons(images, scores, features)

    def lr_at(self, epoch: int) -> float:
        return self.lr * self.decay ** (epoch // self.decay_every)

    def loss(
        self,
        student: nn.Module,
        images: Tensor,
        answers: Tensor,
        rng: torch.Generator,
        weights: Tensor | None = None,
    ) -> Tensor:
        return self.divergence(student(images), answers)

    def divergence(self, logits: Tensor, answers: Tensor) -> Tensor:
        return distillation(logits, answers, self.temperature)

    def check_base(self, base: Prior) -> None:
        if self.draws and base.condition == "hint":
            raise ConfigError(
                f"draws ({self.draws}): the base prior completes hints, so nothing can be drawn "
                "from it: set draws to 0, or use another base"
            )

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
    """Draw images of a prior; labels are random."""
    rng = generator_for(seed, "students", "draws")
    latents = torch.randn(count, base.latent, generator=rng)
    return images_of(base, latents, torch.randint(max(1, base.classes), (count,), generator=rng))


def joined(first: ImagesAt, count: int, second: ImagesAt) -> ImagesAt:
    """Return the images of both: the first `count` indices are of the first."""

    def images(index: Tensor) -> Tensor:
        places = [(index < count).nonzero()[:, 0], (index >= count).nonzero()[:, 0]]
        chosen = zip((first, second), places, (0, count), strict=True)
        parts = [make(index[place] - base) for make, place, base in chosen if len(place)]
        return torch.cat(parts)[torch.cat(places).argsort().to(parts[0].device)]

    return images
