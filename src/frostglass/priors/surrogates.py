"""LOKT's surrogates: networks that learn the target's labels of a generator's images."""

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import Capability, ModelView
from frostglass.data._augment import DRAWS, viewed
from frostglass.priors._imitation import CHUNK, ImitatingPrior, Lessons, images_of, resized
from frostglass.priors.base import PriorTask, priors
from frostglass.runtime.seeding import generator_for

DENSE = tuple({"model": f"timm:densenet{depth}"} for depth in (121, 161, 169))


@priors.register
@parameters
class Surrogates(ImitatingPrior):
    """Another prior with networks that learned from labels alone what the target says of its draws.

    The base prior makes `per_class` images of each class (as many at random, if it takes no class),
    and the target labels them. A surrogate S minimises ½ CE(S(x), T(x)) + ½ CE(S(v(x)), T(x)), v a
    random crop, recolouring, mirroring and turn, by SGD whose step size falls as a cosine. A
    white-box attack on the surrogates then stands for one on the target.

    Use: the prior of `lokt`.
    Paper: Nguyen et al., Label-Only Model Inversion Attacks via Knowledge Transfer (LOKT), NeurIPS
    2023, arXiv 2310.19342.
    Differs: a published epoch is 117 batches of 256, drawn at random from all images; ours is a
    pass over them. Images are rounded to 8 bits. With another base than `tacgan` it is an ablation.

    Args:
        base: `tacgan` published. students: they are the surrogates; published: DenseNet-121, -161
            and -169.
        per_class: images of each class.
        lr: at first; it falls as a cosine.
    """

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "tacgan"})
    students: tuple[dict[str, Any], ...] = DENSE
    per_class: Annotated[int, Field(ge=1)] = 500
    epochs: Annotated[int, Field(ge=1)] = 200
    batch: Annotated[int, Field(ge=2)] = 256
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5e-4

    title: ClassVar[str] = "Surrogates (LOKT)"
    access: ClassVar[Capability] = "labels"

    def __post_init__(self) -> None:
        if not self.students:
            raise ValueError("students: expected at least one network that learns, got none")
        super().__post_init__()

    def check_base(self, base: Prior) -> None:
        if base.condition == "hint":
            raise ConfigError(
                "surrogates: the base prior completes hints, so nothing can be drawn from it: use "
                "another base, such as tacgan"
            )

    def lessons(self, task: PriorTask, view: ModelView, base: Prior) -> Lessons:
        labels = torch.arange(view.classes).repeat_interleave(self.per_class)
        rng, before = generator_for(task.seed, "surrogates", "draws"), view.queries
        drawn = images_of(base, torch.randn(len(labels), base.latent, generator=rng), labels)
        images = resized(drawn, base.image_shape, task.device)
        chunks = torch.arange(len(labels)).split(CHUNK)
        said = torch.cat([view.labels(images(index)).cpu() for index in chunks])
        facts = {"queries": view.queries - before + base.info.get("queries", 0)}
        if base.condition == "label":
            facts["as_asked"] = (said == labels).float().mean().item()
        return Lessons(images, F.one_hot(said, view.classes).float(), facts=facts)

    def lr_at(self, epoch: int) -> float:
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    def loss(
        self,
        student: nn.Module,
        images: Tensor,
        answers: Tensor,
        rng: torch.Generator,
        weights: Tensor | None = None,
    ) -> Tensor:
        draws = torch.rand(len(images), DRAWS, generator=rng).to(images)
        shown = (images, viewed(images, draws, jitter_share=0.5))
        return torch.stack([self.divergence(student(each), answers) for each in shown]).mean()

    def brief(self) -> Self:
        return replace(self, epochs=1, per_class=1)

    def budget(self, size: AuditSize) -> Budget:
        shown = self.per_class * max(1, size.classes)
        return Budget(
            f"{len(self.students)} surrogates × {self.epochs} epochs × {shown:,} images",
            evaluations=shown,
            trained=2 * len(self.students) * self.epochs * shown,
        )
