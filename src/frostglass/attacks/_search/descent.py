"""The base of all attacks that follow the target's gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.families import Family, Point
from frostglass.attacks._search.fields import AtLeastOne, Count, Share, Weight
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.runner import ExtraLoss, ModelAttack, Recipe
from frostglass.attacks._search.search import (
    OptimizerName,
    OptimizerSettings,
    SearchResult,
    descend,
)
from frostglass.attacks._search.start import POOL_CHUNK, Bonus, fresh
from frostglass.core.assets import Assets
from frostglass.core.method import Variants
from frostglass.core.objective import LossName, loss_of
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.batching import BATCH_MULTIPLE

Beta = Annotated[float, Field(ge=0, lt=1)]

LEAST_PATIENCE = 20  # steps
ALL_STEPS = {"patience": 0}  # no published search ends early
PUBLISHED: Variants = {
    "published": ("as published: every search takes all its steps", ALL_STEPS),
}
# What an attacker who knows of a defense would change.
ADAPTIVE: Variants = {
    "noise": (
        "expectation over the noise of MID: each query is the mean of eight passes",
        {"samples": 8},
    ),
    "aimed": (
        "for CALoR: aims at the confidence exp(-1/b) its training rewards (b = 8), not at 1",
        {"loss": "aim", "aim": 0.8825},
    ),
    "straight": (
        "for CALoR: gradients pass the saturated tanh as if it were not there, on the margin",
        {"straight_through": True, "loss": "margin"},
    ),
    "margin": (
        "for LS and CALoR: the margin still has a gradient where cross-entropy has none left",
        {"loss": "margin"},
    ),
    "poincare": (
        "for LS: a loss that does not change when the logits are scaled up",
        {"loss": "poincare"},
    ),
}


@parameters
class Descent(ModelAttack):
    """Base of the attacks that minimise w_t · loss(T(G(z)), y) - w_c · D(G(z)) + penalty.

    Args:
        loss: class loss: "ce" (-ln p_y), "logit" (-l_y), "margin" (max of the other logits - l_y),
            "poincare", or "aim", (ln p_y - ln aim)².
        aim: target confidence of loss "aim"; 0.8825 is exp(-1/8), what CALoR trains for.
        smoothing: of the label in loss "ce": 1 - smoothing for y, the rest for all others alike.
        weight: w_t, the weight of the class loss.
        critic_weight: w_c, the weight of the prior's critic; 0 needs no critic.
        coupling: both are divided by this, as a mean over a batch of that size divides them.
        optimizer: "nesterov", "momentum" or "adam".
        momentum: of the first two optimisers. betas: of Adam.
        lr: step size. steps: iterations.
        patience: a candidate that convinces the target and whose confidence has been flat for this
            many steps stops early, at the next multiple of 10; by default a sixth of the steps, at
            least 20; 0 takes all steps, as published.
        flat: how far a confidence may move and still count as flat.
        straight_through: let gradients pass the saturating layers of the target (tanh and sigmoid
            of a defense's head, else every tanh layer) as if they were not there; changes nothing
            where there is none, or where tanh is called as a function.
        trace: record loss, gradient norm and confidence of each kept candidate before each step, in
            `Reconstructions.trace`; changes nothing else.
    """

    loss: LossName = "ce"
    aim: Annotated[float, Field(gt=0, lt=1)] = 0.8825
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight: Weight = 100.0
    critic_weight: Weight = 1.0
    coupling: AtLeastOne = 60
    optimizer: OptimizerName = "adam"
    lr: Annotated[float, Field(gt=0)] = 0.02
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    steps: Count = 1500
    patience: Count | None = None
    flat: Share = 0.01
    straight_through: bool = False
    trace: bool = False

    unkeyed: ClassVar[Mapping[str, Any]] = {"trace": False, "smoothing": 0.0}
    variants: ClassVar[Variants] = {**PUBLISHED, **ADAPTIVE}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smoothing and self.loss != "ce":
            raise ValueError(
                f'smoothing ({self.smoothing:g}) is for loss "ce", got {self.loss!r}: set it to 0'
            )

    @property
    def access(self) -> tuple[str, ...]:
        return ("gradients",)

    @property
    def flat_steps(self) -> int:
        """Steps for which a confidence must be flat to stop; 0 never stops.

        A search of more steps has smaller ones, and what is flat for a few of them still moves.
        """
        return max(LEAST_PATIENCE, self.steps // 6) if self.patience is None else self.patience

    @property
    def steerable(self) -> bool:
        return True

    @property
    def looks(self) -> int:
        """Number of images each row generates at one step."""
        return 1

    @property
    def views(self) -> int:
        """Number of times each image is shown to the target at one step."""
        return 1

    @property
    def asks(self) -> bool:
        """Whether a step shows its images to the target."""
        return True

    @property
    def rows(self) -> int:
        return max(1, self.batch // self.looks)

    @property
    def batch_multiple(self) -> int:
        return BATCH_MULTIPLE // math.gcd(BATCH_MULTIPLE, self.looks)

    @property
    def all_steps(self) -> int:
        """Steps of one search, all its stages together."""
        return self.steps

    @property
    def search_effort(self) -> tuple[str, int]:
        each = self.looks * self.views * (self.samples if self.asks else 1)
        words = f"{self.steps:,} steps" + (f" of {each} images" if each > 1 else "")
        return words + " on students" * (not self.asks), self.all_steps * each * self.asks

    @property
    def surrogate_images(self) -> int:
        return 0 if self.asks else self.all_steps * self.looks * self.views

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        # Two steps, so that optimisers have allocated their memory.
        return {"steps": min(2, self.steps)}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        # Steps that ask nothing are free.
        return {"steps": scaled_down(self.steps, share)} if self.asks else {}

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if self.critic_weight and prior.critic is None:
            problems.append(
                f"{self.name}.critic_weight is {self.critic_weight:g}, but the prior has no "
                "critic: set it to 0"
            )
        return problems

    def family(self, prior: Prior) -> Family:
        """Return what represents a latent: a point or a distribution."""
        return Point(prior.latent)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        """Return the initial latents of all rows, (I, candidates, latent)."""
        return fresh(prior, labels, self.candidates, seed=seed, purpose=type(self).__name__.lower())

    def class_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        """Return the class loss and the target's confidence, one value per image."""
        logits = view.logits(images)
        return self.loss_from(logits, labels), confidence(logits, labels)

    def loss_from(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the class loss of each image from a network's logits."""
        return loss_of(self.loss, logits, labels, aim=self.aim, smoothing=self.smoothing)

    def weighted_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of target and critic and the confidence, one per image."""
        value, sure = self.class_loss(view, prior, images, labels, rng)
        value = self.weight * value
        if self.critic_weight:
            value = value - self.critic_weight * prior.realism(images)
        return value, sure

    def settings(
        self, steps: int, project: Callable[[Tensor, Tensor], Tensor]
    ) -> OptimizerSettings:
        return OptimizerSettings(
            steps,
            self.lr,
            self.optimizer,
            self.momentum,
            self.flat_steps,
            self.flat,
            project,
            self.betas,
            self.ramp,
            self.trace,
        )

    def ramp(self, step: int, steps: int) -> float:
        """Return the scale of the size of a step, which is numbered from 1."""
        return 1.0

    def penalty(self, family: Family, state: Tensor, rng: RowRng) -> Tensor | float:
        """Return a further loss, one value per row."""
        return 0.0

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        """Constrain rows that began at `start`, after each step."""
        return state

    def images(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        """Generate images of latents (N, ...); values may lie a little outside [0, 1]."""
        return prior.images(latents, labels)

    def bonus(self, prior: Prior) -> Bonus | None:
        """Return what images score besides the target's margin, in starts and in the ranking."""
        return None

    def rank(
        self, view: ModelView, prior: Prior, state: Tensor, labels: Tensor, rng: RowRng
    ) -> Tensor | None:
        """Return a score per row by which candidates are kept; None uses the target's margin."""
        return None

    def _per_row(self, values: Tensor) -> Tensor:
        """Average the values of the images of each row."""
        return values.unflatten(0, (-1, self.looks)).mean(1)

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        prior = assets.require_prior()
        family = self.family(prior)
        shown = view.straightened() if self.straight_through else view
        settings = self.settings(self.steps, self.project)
        alike: dict[int, bool] = {}

        def start(labels: Tensor) -> Tensor:
            centres = self.centres(view, prior, labels, seed=seed)
            return family.begin(centres.flatten(0, 1)).unflatten(0, centres.shape[:2])

        def search(
            state: Tensor, labels: Tensor, draws: Tensor, extra: ExtraLoss | None = None
        ) -> SearchResult:
            def objective(state: Tensor, rows: Tensor, rng: RowRng) -> tuple[Tensor, Tensor]:
                latents = family.sample(state, rng.normal(self.looks, family.noise))
                each = rows.repeat_interleave(self.looks)
                whose = labels[each]
                images = self.images(prior, latents.flatten(0, 1), whose)
                value, sure = self.weighted_loss(shown, prior, images, whose, rng)
                value, sure = self._per_row(value) / self.coupling, self._per_row(sure)
                if extra:
                    value = value + self._per_row(extra(images, each))
                return value + self.penalty(family, state, rng), sure

            rng = RowRng.of(seed, "search", labels, draws)
            rows = torch.arange(len(labels), device=labels.device)
            result = descend(
                shown,
                state,
                rows,
                rng,
                objective,
                settings,
                batch_multiple=self.batch_multiple,
                alike=alike,
            )
            rng = RowRng.of(seed, "rank", labels, draws)
            return replace(result, score=self.rank(view, prior, result.state, labels, rng))

        def read(state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
            noise = RowRng.of(seed, "read", labels, draws).normal(self.reads, family.noise)
            with torch.no_grad():
                return family.sample(state, noise)

        def show(latents: Tensor, labels: Tensor) -> Tensor:
            return self.images(prior, latents, labels).clamp(0, 1)

        return Recipe(start, search, read, show, bonus=self.bonus(prior))


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each label, without gradients."""
    return logits.detach().softmax(1).gather(1, labels[:, None])[:, 0]


def brief_pool(pool: int, at_least: int) -> int:
    """Return a pool of two scored chunks, or as large as it must be."""
    return min(pool, max(2 * POOL_CHUNK, at_least))
