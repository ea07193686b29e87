"""What all attacks share that follow the target's gradients: parameters, objective and search, with a slot for what sets each apart."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.families import Family, Point
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import (
    OptimizerName,
    OptimizerSettings,
    SearchResult,
    descend,
)
from frostglass.attacks._search.start import fresh
from frostglass.attacks.base import Attack, Recipe
from frostglass.core.objective import LossName, loss_of
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import Capability, ModelView
from frostglass.runtime.batching import BATCH_MULTIPLE

# Against defenses that are known: what an attacker who knows of them would change.
ADAPTIVE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "noise": (
        "expectation over the noise of MID: each look at the target is the mean of eight",
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
        "for LS and CALoR: the margin goes on pushing where cross-entropy has no gradient left",
        {"loss": "margin"},
    ),
    "poincare": (
        "for LS: a loss that does not change when the logits are blown up",
        {"loss": "poincare"},
    ),
}


@parameters
class Descent(Attack):
    """Base of the attacks that minimise w_t · loss(T(G(z)), y) - w_c · D(G(z)) + penalty over what stands for z.

    Args:
        loss: what the target should think: "ce" (-ln p_y), "logit" (-l_y), "margin" (max of the other logits - l_y), "poincare", or "aim",
            (ln p_y - ln aim)².
        aim: the confidence that loss "aim" wants; 0.8825 is exp(-1/8), what CALoR trains for.
        weight: w_t, the weight of the class loss. critic_weight: w_c, the weight of the prior's critic; 0 needs no critic.
        coupling: both are divided by this, as a mean over a batch of that size divides them.
        optimizer: "nesterov", "momentum" or "adam". momentum: of the first two. betas: of Adam.
        lr: step size. steps: iterations.
        patience: a candidate that convinces the target and whose confidence has been flat for this many steps leaves the batch at the next multiple of 10; 0 uses all
            steps, as published.
        flat: how far a confidence may move and still be called flat.
        candidates: searches per identity. keep: how many pictures are returned, best target margin first.
        batch: pictures shown to the target together, rounded up to a multiple of 16; does not change the result.
        samples: passes through the target averaged at each look; above 1 it sees through the noise of defenses such as MID.
        straight_through: let gradients pass the saturating layers of the target (tanh and sigmoid of a head that a defense put in, else every tanh layer) as if they
            were not there; changes nothing where there is none, or where tanh is called as a function.
    """

    loss: LossName = "ce"
    aim: Annotated[float, Field(gt=0, lt=1)] = 0.8825
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 100.0
    critic_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    coupling: Annotated[int, Field(ge=1)] = 60
    optimizer: OptimizerName = "adam"
    lr: Annotated[float, Field(gt=0)] = 0.02
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    steps: Annotated[int, Field(ge=0)] = 1500
    patience: Annotated[int, Field(ge=0)] = 0
    flat: Annotated[float, Field(ge=0, le=1)] = 0.01
    candidates: Annotated[int, Field(ge=1)] = 5
    keep: Annotated[int, Field(ge=1)] = 5
    batch: Annotated[int, Field(ge=1)] = 64
    samples: Annotated[int, Field(ge=1)] = 1
    straight_through: bool = False

    access: ClassVar[tuple[Capability, ...]] = ("gradients",)
    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = ADAPTIVE

    def __post_init__(self) -> None:
        if self.keep > (most := self.candidates * self.read_from_each):
            drawn = "candidates" if self.read_from_each == 1 else "candidates · draws"
            raise ValueError(f"keep ({self.keep}) must not exceed {drawn} ({most})")

    @property
    def read_from_each(self) -> int:
        """How many pictures are read from each searched row at the end."""
        return 1

    @property
    def looks(self) -> int:
        """How many pictures each row makes at one step."""
        return 1

    @property
    def ramp(self) -> Callable[[float], float] | None:
        """What the step size is multiplied by after a share of the steps."""
        return None

    @property
    def views(self) -> int:
        """How many times each picture is shown to the target at one step."""
        return 1

    @property
    def rows(self) -> int:
        return max(1, self.batch // self.looks)

    @property
    def batch_multiple(self) -> int:
        return BATCH_MULTIPLE // math.gcd(BATCH_MULTIPLE, self.looks)

    def effort(self) -> tuple[str, int]:
        each = self.looks * self.views * self.samples
        return f"{self.steps} steps" + (
            f" of {each} pictures" if each > 1 else ""
        ), self.steps * each

    def problems(self, view: ModelView, prior: Prior) -> list[str]:
        found = super().problems(view, prior)
        if self.critic_weight and prior.critic is None:
            found.append(
                f"{self.name}.critic_weight is not 0 and the prior has no critic: set it to 0"
            )
        return found

    def family(self, prior: Prior) -> Family:
        """What stands for a latent."""
        return Point(prior.latent)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        """Where rows begin, (I, candidates, latent)."""
        return fresh(prior, labels, self.candidates, seed=seed, purpose=type(self).__name__.lower())

    def identity(
        self, view: ModelView, prior: Prior, pictures: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        """How far the target is from seeing `labels` in pictures, and its probability of them, one value a picture."""
        logits = view.logits(pictures)
        return loss_of(self.loss, logits, labels, aim=self.aim), confidence(logits, labels)

    def judged(
        self, view: ModelView, prior: Prior, pictures: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        """What pictures are worth to target and critic, weighed, and the target's probability of `labels`, one value a picture."""
        value, sure = self.identity(view, prior, pictures, labels, rng)
        value = self.weight * value
        return (
            value - self.critic_weight * prior.realism(pictures) if self.critic_weight else value
        ), sure

    def pace(self, steps: int, project: Callable[[Tensor, Tensor], Tensor]) -> OptimizerSettings:
        """How far and how fast rows go."""
        return OptimizerSettings(
            steps,
            self.lr,
            self.optimizer,
            self.momentum,
            self.patience,
            self.flat,
            project,
            self.betas,
            self.ramp,
        )

    def penalty(self, family: Family, state: Tensor, rng: RowRng) -> Tensor | float:
        """What else rows are punished for, one value a row."""
        return 0.0

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        """Where rows that began at `start` may be, applied after each step."""
        return state

    def pictures(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        """What latents (N, ...) look like; attacks may leave values a little outside [0, 1], which are cut off in pictures that are kept."""
        return prior.images(latents, labels)

    def ranks(
        self, view: ModelView, prior: Prior, state: Tensor, labels: Tensor, rng: RowRng
    ) -> Tensor | None:
        """By what candidates are kept in the end, one value a row, larger is better; None is the target's margin."""
        return None

    def recipe(self, view: ModelView, prior: Prior, *, seed: int) -> Recipe:
        family = self.family(prior)
        shown = view.straightened() if self.straight_through else view
        pace = self.pace(self.steps, self.project)

        def start(labels: Tensor) -> Tensor:
            centres = self.centres(view, prior, labels, seed=seed)
            return family.begin(centres.flatten(0, 1)).unflatten(0, centres.shape[:2])

        def objective(state: Tensor, labels: Tensor, rng: RowRng) -> tuple[Tensor, Tensor]:
            latents = family.sample(state, rng.normal(self.looks, family.noise))
            each = labels.repeat_interleave(self.looks)
            pictures = self.pictures(prior, latents.flatten(0, 1), each)
            value, sure = self.judged(shown, prior, pictures, each, rng)
            value = value.unflatten(0, (-1, self.looks)).mean(1) / self.coupling
            return value + self.penalty(family, state, rng), sure.unflatten(
                0, (-1, self.looks)
            ).mean(1)

        def search(state: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            found = descend(
                shown,
                state,
                labels,
                RowRng.of(seed, "search", labels, draws),
                objective,
                pace,
                batch_multiple=self.batch_multiple,
            )
            return replace(
                found,
                score=self.ranks(
                    view, prior, found.state, labels, RowRng.of(seed, "rank", labels, draws)
                ),
            )

        def read(state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
            noise = RowRng.of(seed, "read", labels, draws).normal(self.read_from_each, family.noise)
            with torch.no_grad():
                return family.sample(state, noise)

        def show(latents: Tensor, labels: Tensor) -> Tensor:
            return self.pictures(prior, latents, labels).clamp(0, 1)

        return Recipe(start, search, read, show)


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """The probability of each label, without gradients."""
    return logits.detach().softmax(1).gather(1, labels[:, None])[:, 0]
