"""BREP-MI: boundary-repelling model inversion, from labels alone."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.search import SearchResult
from frostglass.attacks.base import Attack, Recipe, attacks, run_padded
from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import Capability, ModelView
from frostglass.runtime.batching import BATCH_MULTIPLE
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import generator_for

CHUNK = 256  # latents drawn between two counts of the labels they hit, as published


@attacks.register
@parameters
class Brepmi(Attack):
    """Boundary-repelling model inversion: from nothing but labels, moves a latent away from the border of its class.

    N directions uᵢ on a sphere; cᵢ = +1 where the target says y at z + R·uᵢ, -1 elsewhere; d = (1/N) Σ ½(cᵢ - 1)·uᵢ, away from all that is outside;
    z ← clamp(z + min(R/3, 3)·d, ±1.5) if the target still says y there. R ← 1.3·R when Σcᵢ > 0.75·N; the point at the last growth is the result. It
    needs no gradients and no scores, so a defense that only hides those does not stop it.

    Paper: Kahla et al., Label-Only Model Inversion Attacks via Boundary Repulsion, CVPR 2022, arXiv 2203.01925.
    Differs: published loops end only after `patience`, which rejected moves do not count for, so they may never end; here a walk also ends when its
        `budget` is spent, and when no two points of the box are as far apart as R. In the step of a growth the published code divides by the new radius, which
        shortens that one move by 1.3; here it is whole. Where that move is rejected, the published result stays that of the growth before; here
        it is the point that saw its sphere grow. A radius that never grew counts as failed in the published code; here the point reached is
        the result, which the target still calls y, and ranks below every one that grew. Published starts are drawn until every label was hit (or
        any 300 labels are attacked); here up to `tries`. A label that was hit less often than `candidates` has walks that share a start. One that was
        never hit keeps blind draws of the prior, which the target does not call y: their confidence is 0, and no other's is. One image per identity is
        published; several `candidates` and `keep` are additions.

    Args:
        points: N, looks around a point. radius: the first R. growth: what R is multiplied by.
        rule: when R grows: "code" if Σcᵢ > 0.75·N, which is 29 of 32 inside; "paper" if all are inside.
        direction: "repulsion" (published), or "both", d = (1/N) Σ cᵢ·uᵢ, the published code's alternative.
        step_divisor: the 3 of R/3. step_limit: the longest step α.
        box: starts and moves are clamped to ± this; looks around a point are not.
        patience: a walk ends after this many accepted moves without growth.
        budget: the most queries of one walk; (N + 1) · samples for each move, accepted or not.
        tries: the most latents drawn to find starts for all identities together, rounded up to a multiple of 256.
        candidates: walks per identity. keep: how many of them are returned, the largest radius first.
        batch: pictures shown to the target together, rounded up to a multiple of 16; does not change the result.
        samples: passes through the target at each look, whose commonest label counts; above 1 it sees through the noise of defenses such as MID.
    """

    points: Annotated[int, Field(ge=1)] = 32
    radius: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    growth: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.3
    rule: Literal["code", "paper"] = "code"
    direction: Literal["repulsion", "both"] = "repulsion"
    step_divisor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    step_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    box: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.5
    patience: Annotated[int, Field(ge=1)] = 1000
    budget: Annotated[int, Field(ge=1)] = 100_000
    tries: Annotated[int, Field(ge=1)] = 65_536
    candidates: Annotated[int, Field(ge=1)] = 1
    keep: Annotated[int, Field(ge=1)] = 1
    batch: Annotated[int, Field(ge=1)] = 256
    samples: Annotated[int, Field(ge=1)] = 1

    access: ClassVar[tuple[Capability, ...]] = ("labels",)

    def __post_init__(self) -> None:
        if self.keep > self.candidates:
            raise ValueError(f"keep ({self.keep}) must not exceed candidates ({self.candidates})")
        if self.budget < (least := (self.points + 2) * self.samples):
            raise ValueError(
                f"budget ({self.budget}) must allow one move: at least (points + 2) · samples ({least})"
            )

    @property
    def rows(self) -> int:
        return max(1, self.batch // self.points)

    @property
    def asked_once(self) -> int:
        return self.tries

    def effort(self) -> tuple[str, int]:
        return f"up to {self.budget:,} queries", self.budget

    def problems(self, view: ModelView, prior: Prior) -> list[str]:
        widest, found = self._widest(prior), super().problems(view, prior)
        if self.radius > widest:
            found.append(
                f"brepmi.radius ({self.radius:g}) must be at most the diagonal of the box ({widest:.3g})"
            )
        return found

    def _widest(self, prior: Prior) -> float:
        """The largest distance of two points in the box."""
        return 2 * self.box * math.sqrt(prior.latent)

    def recipe(self, view: ModelView, prior: Prior, *, seed: int) -> Recipe:
        def start(labels: Tensor) -> Tensor:
            return self._starts(view, prior, labels, seed=seed)

        def search(latents: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            return self._walk(view, prior, latents, labels, draws, seed=seed)

        return Recipe(start, search)

    def _answers(self, view: ModelView, prior: Prior, latents: Tensor) -> Tensor:
        """What the target says of the pictures of latents (..., latent)."""
        with torch.no_grad():
            parts = latents.flatten(0, -2).split(
                math.ceil(self.batch / BATCH_MULTIPLE) * BATCH_MULTIPLE
            )
            answers = [
                run_padded(view, lambda z: (view.labels(prior.images(z)),), part)[0]
                for part in parts
            ]
        return torch.cat(answers).unflatten(0, latents.shape[:-1])

    def _starts(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        """For each identity the first latents its label was said of, out of one sequence of draws for all, (I, K, latent)."""
        drawn, said, counts = [], [], torch.zeros(view.classes, dtype=torch.long)
        for number in range(math.ceil(self.tries / CHUNK)):
            fresh = torch.randn(
                CHUNK, prior.latent, generator=generator_for(seed, "brepmi", "start", number)
            )
            drawn.append(fresh.clamp(-self.box, self.box).to(device_of(prior.generator)))
            said.append(self._answers(view, prior, drawn[-1]).cpu())
            counts += said[-1].bincount(minlength=view.classes)
            if (counts[labels] >= self.candidates).all():
                break
        if not counts[labels].any():
            raise RunError(
                f"the target says none of the {len(labels)} attacked labels of any of {int(counts.sum())} draws of the prior, so no walk can begin: "
                "raise attack.tries or use a prior that is closer to the private pictures"
            )
        answers, each, chosen = torch.cat(said), torch.arange(self.candidates), []
        for label in labels.tolist():
            hits = (answers == label).nonzero()[:, 0][: self.candidates]
            chosen.append(
                hits[each % len(hits)]
                if len(hits)
                else (label * self.candidates + each) % len(answers)
            )
        return torch.cat(drawn)[torch.stack(chosen).to(drawn[0].device)]

    def _walk(
        self,
        view: ModelView,
        prior: Prior,
        latents: Tensor,
        labels: Tensor,
        draws: Tensor,
        *,
        seed: int,
    ) -> SearchResult:
        """Where each walk ended, scored by its last radius; one that could not begin is not whole."""
        rng = [
            generator_for(seed, "brepmi", label, draw)
            for label, draw in zip(labels.tolist(), draws.tolist(), strict=True)
        ]
        here, found = latents.clone(), latents.clone()
        begun = self._answers(view, prior, here) == labels
        radius = latents.new_full((len(latents),), self.radius)
        waited = torch.zeros_like(labels)  # accepted moves since the radius grew
        steps = torch.zeros_like(labels)
        rows = begun.nonzero()[:, 0]  # those that still walk
        for _ in range((self.budget // self.samples - 1) // (self.points + 1)):
            if not len(rows):
                break
            u = torch.stack(
                [_directions(rng[row], self.points, prior.latent) for row in rows.tolist()]
            ).to(here.device)
            z, r, y = here[rows], radius[rows], labels[rows]
            inside = self._answers(view, prior, z[:, None] + r[:, None, None] * u) == y[:, None]
            grows = (
                inside.all(1)
                if self.rule == "paper"
                else 2 * inside.sum(1) - self.points > 0.75 * self.points
            )
            proposed = (
                z
                + (r / self.step_divisor).clamp(max=self.step_limit)[:, None]
                * self._away(inside, u)
            ).clamp(-self.box, self.box)
            accepted = self._answers(view, prior, proposed) == y
            steps[rows] += 1
            here[rows] = torch.where(accepted[:, None], proposed, z)
            radius[rows] = torch.where(grows, r * self.growth, r)
            waited[rows] = torch.where(grows, 0, waited[rows] + accepted)
            found[rows] = torch.where(
                (grows | (radius[rows] == self.radius))[:, None], here[rows], found[rows]
            )
            rows = rows[(waited[rows] < self.patience) & (radius[rows] <= self._widest(prior))]
        return SearchResult(found, steps, begun, torch.where(begun, radius, 0))

    def _away(self, inside: Tensor, u: Tensor) -> Tensor:
        """The mean push of directions (R, N, latent): from those outside, and with "both" also towards those inside."""
        push = (
            inside.to(u.dtype) - 1 if self.direction == "repulsion" else 2 * inside.to(u.dtype) - 1
        )
        return (push[..., None] * u).mean(1)


def _directions(rng: torch.Generator, count: int, size: int) -> Tensor:
    u = torch.randn(count, size, generator=rng)
    return u / u.norm(dim=1, keepdim=True)
