"""SMILE's surrogate: a network of several experts, taught by the target's scores of draws."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize, Budget, Variants
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior, ScoredDraws
from frostglass.core.types import Shape
from frostglass.core.views import Capability, ModelView
from frostglass.models.taps import find_head
from frostglass.priors._imitation import CHUNK, ImitatingPrior, Lessons, images_of, resized
from frostglass.priors._style_space import StyleSpace
from frostglass.priors.base import PriorTask, priors
from frostglass.priors.students import target_scores
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seeded

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]

BOUND = 20.0  # of an expert's logits over the temperature, in the term of diversity
LEAST = 1e-6  # a smaller distance of an expert from the mean counts as this


class ExpertHeads(nn.ModuleList):
    """The heads of a surrogate's experts; its logits are the mean of theirs."""

    def __init__(self, features: int, classes: int, count: int):
        super().__init__(
            nn.Sequential(
                nn.Linear(features, features, bias=False),
                nn.BatchNorm1d(features),
                nn.Linear(features, classes),
            )
            for _ in range(count)
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([expert(features) for expert in self]).mean(0)


@priors.register
@parameters
class Experts(ImitatingPrior):
    """Another prior with a surrogate that learned the target's scores of its draws, tail first.

    The target scores `draws` images of the base prior. Most private people are hardly ever among
    its first guesses: what it says of draws is long-tailed. The surrogate has one body and
    `experts` heads e, whose mean logits are its own. It minimises, by Adam,

    Σ_x w(x) Σ_e [KL(p_T ‖ p_e) + ce · CE(e(x), argmax p_T)] + diversity · Σ_e 1 / KL(p′_e ‖ p̄),

    p at `temperature`, p′_e of e's clamped logits at its square, p̄ of the mean logits. An image
    whose first guess is y weighs w = (1 - β) / (1 - βⁿ⁺¹), n the number of draws with y among the
    `top` guesses. The prior keeps draws and scores, so that `smile` starts from the best ones.

    Use: the prior of `smile`.
    Paper: Li et al., From Head to Tail: Efficient Black-box Model Inversion Attack via Long-tailed
    Learning (SMILE), CVPR 2025, arXiv 2503.16266.
    Differs: facts are from the released code and the abstract, the paper's text was not at hand.
    The released weights multiply the mean loss of their whole batch, here the loss of their own
    image. The released body is trained on another set of faces and frozen: `variant = "published"`
    with a `start`; without one it is random and all of it learns. An expert is a linear layer,
    batch norm and head; released are those of each architecture, with a batch norm in common. The
    surrogate of the last epoch is kept; the released one may be the best on private test images.
    Images are rounded to 8 bits.

    Args:
        base: a StyleGAN published. students: they are the surrogates; one published.
        draws: images of the base prior that the target scores.
        truncation: ψ of these draws. cutoff: number of truncated layers of a StyleGAN2.
        experts: heads of a surrogate.
        frozen: train the experts alone, on the body of `start`.
        temperature: divides logits before softmax.
        ce: weight of the cross-entropy.
        diversity: weight of the term that keeps experts from being alike; 0 for none.
        beta: β of the weights; 0 weighs all images alike.
        top: number of guesses that count for n.
    """

    students: tuple[dict[str, Any], ...] = ({"model": "timm:efficientnet_b0"},)
    draws: Annotated[int, Field(ge=2)] = 2500
    truncation: Annotated[float, Field(ge=0, le=1)] = 0.7
    cutoff: Annotated[int, Field(ge=0)] = 8
    experts: Annotated[int, Field(ge=1)] = 3
    frozen: bool = False
    epochs: Annotated[int, Field(ge=1)] = 200
    batch: Annotated[int, Field(ge=2)] = 128
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    weight_decay: Weight = 0.0
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    ce: Weight = 0.15
    diversity: Weight = 10.0
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    top: Annotated[int, Field(ge=1)] = 10

    title: ClassVar[str] = "Experts (SMILE)"
    access: ClassVar[Capability] = "scores"
    variants: ClassVar[Variants] = {
        "published": (
            "as released: the body is that of `start`, trained on other faces, and frozen",
            {"frozen": True},
        ),
    }

    def __post_init__(self) -> None:
        if not self.students:
            raise ValueError("students: expected at least one network that learns, got none")
        super().__post_init__()
        if self.frozen and not all("start" in student for student in self.students):
            raise ValueError(
                "frozen trains the experts alone: give each of students a start, the weights of a "
                "network that knows other faces, or set frozen to false"
            )

    def check_base(self, base: Prior) -> None:
        if base.condition:
            raise ConfigError(
                f"experts: the base prior takes a {base.condition} with each latent, and draws "
                "must serve all classes: use another base, such as stylegan2 or wgan"
            )

    def with_head(self, student: nn.Module, image_shape: Shape, *, seed: int) -> nn.Module:
        name = find_head(student, image_shape)
        head = student.get_submodule(name)
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"experts replace a linear head, {name!r} is a {type(head).__name__}: choose a "
                "student that ends in a linear layer"
            )
        parent, _, last = name.rpartition(".")
        with seeded(seed, "experts"):
            heads = ExpertHeads(head.in_features, head.out_features, self.experts)
        setattr(student.get_submodule(parent), last, heads)
        return student

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        prior = super().untrained(image_shape, classes)
        latents, scores = torch.zeros(self.draws, prior.latent), torch.ones(self.draws, classes)
        return replace(prior, scored=self._scored(latents, scores / classes))

    def _scored(self, latents: Tensor, scores: Tensor) -> ScoredDraws:
        return ScoredDraws(latents, scores, self.truncation, self.cutoff)

    def lessons(self, task: PriorTask, view: ModelView, base: Prior) -> Lessons:
        rng, before = generator_for(task.seed, "experts", "draws"), view.queries
        latents = torch.randn(self.draws, base.latent, generator=rng)
        space = StyleSpace(base, self.truncation, self.cutoff)

        def make(latents: Tensor, labels: Tensor) -> Tensor:
            return space.images(space.styles(latents), truncate=True).clamp(0, 1)

        labels = torch.zeros(self.draws, dtype=torch.long)
        images = resized(images_of(base, latents, labels, make), base.image_shape, task.device)
        scores = target_scores(view, images, self.draws)
        facts = {"queries": view.queries - before + base.info.get("queries", 0)}
        weights = tail_weights(scores, self.beta, self.top)
        return Lessons(
            images, scores, scored=self._scored(latents, scores), weights=weights, facts=facts
        )

    def lr_at(self, epoch: int) -> float:
        return self.lr

    def optimizer(self, student: nn.Module) -> torch.optim.Optimizer:
        _, heads = expert_heads(student)
        student.requires_grad_(not self.frozen)
        heads.requires_grad_()
        return torch.optim.Adam(
            [weight for weight in student.parameters() if weight.requires_grad],
            lr=self.lr,
            betas=(self.momentum, 0.999),
            weight_decay=self.weight_decay,
        )

    def mode(self, student: nn.Module) -> nn.Module:
        student.train(not self.frozen)
        expert_heads(student)[1].train()
        return student

    def loss(
        self,
        student: nn.Module,
        images: Tensor,
        answers: Tensor,
        rng: torch.Generator,
        weights: Tensor | None = None,
    ) -> Tensor:
        name, heads = expert_heads(student)
        names = tuple(f"{name}.{number}" for number in range(len(heads)))
        with capture(student, names) as outputs:
            mean = student(images)
        each = torch.stack([outputs[name] for name in names])
        expected = (answers.log() / self.temperature).softmax(1)
        first, value = answers.argmax(1), torch.zeros_like(mean[:, 0])
        for logits in each:
            value = value + kl(expected, logits / self.temperature)
            value = value + self.ce * F.cross_entropy(logits, first, reduction="none")
        total = (value if weights is None else weights * value).sum()
        if self.diversity:
            total = total + self.diversity * self._alikeness(each, mean)
        return total

    def _alikeness(self, each: Tensor, mean: Tensor) -> Tensor:
        """Return Σ_e 1 / KL(p′_e ‖ p̄), KL averaged over the batch."""
        bounded = (each / self.temperature).clamp(-BOUND, BOUND)
        apart = [kl((e / self.temperature).softmax(1), mean / self.temperature) for e in bounded]
        return torch.stack([1 / one.mean().clamp(min=LEAST) for one in apart]).sum()

    def brief(self) -> Self:
        return replace(self, epochs=1, draws=min(self.draws, CHUNK))

    def budget(self, size: AuditSize) -> Budget:
        count = len(self.students)
        plural = "" if count == 1 else "s"
        return Budget(
            f"{count} surrogate{plural} × {self.epochs} epochs × {self.draws:,} draws",
            evaluations=self.draws,
            trained=count * self.epochs * self.draws,
        )


def expert_heads(student: nn.Module) -> tuple[str, ExpertHeads]:
    """Return the name and the heads of a surrogate's experts."""
    return next(
        (name, part) for name, part in student.named_modules() if isinstance(part, ExpertHeads)
    )


def tail_weights(scores: Tensor, beta: float, top: int) -> Tensor:
    """Return w = (1 - β) / (1 - βⁿ⁺¹) of each image, n that of its first guess, (N,).

    n counts the images that have a class among their `top` guesses by `scores` (N, K).
    """
    classes = scores.shape[1]
    guesses = scores.topk(min(top, classes), dim=1).indices
    counts = guesses.flatten().bincount(minlength=classes)
    return ((1 - beta) / (1 - beta ** (counts + 1.0)))[scores.argmax(1)]


def kl(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(expected ‖ softmax(logits)) of each row, (N,)."""
    return F.kl_div(logits.log_softmax(1), expected, reduction="none").sum(1)
