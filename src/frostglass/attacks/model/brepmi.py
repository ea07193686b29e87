"""BREP-MI: boundary-repelling model inversion, from labels alone."""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.fields import AtLeastOne, Positive
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.runner import QueryAttack, Recipe, run_padded
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks.base import attacks
from frostglass.core.assets import Assets
from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import generator_for

CHUNK = 256  # latents drawn between two counts of the labels they hit, as published


@attacks.register
@parameters
class Brepmi(QueryAttack):
    """Boundary repulsion: from labels alone, moves a latent away from the border of its class.

    N directions uᵢ on a sphere; cᵢ = +1 where the target says y at z + R·uᵢ, -1 elsewhere; d =
    (1/N) Σ ½(cᵢ - 1)·uᵢ, away from all that is outside; z ← clamp(z + min(R/3, 3)·d, ±1.5) if the
    target still says y there. R ← 1.3·R when Σcᵢ > 0.75·N; the point at the last growth is the
    result. It needs no gradients and no scores, so hiding those is no defense.

    Use: the attacker sees labels alone. Also beside attacks by gradients, to see whether a defense
        only hides the gradient.
    Paper: Kahla et al., Label-Only Model Inversion Attacks via Boundary Repulsion, CVPR 2022, arXiv
        2203.01925.
    Differs: published loops end only after `patience`, which rejected moves do not count for, so
        they may never end; here a walk also ends when its `max_queries` are spent, and when no two
        points of the box are as far apart as R. In the step of a growth the published code divides
        by the new radius, which shortens that one move by 1.3; here it is whole. Where that move is
        rejected, the published result stays that of the growth before; here it is the point that
        saw its sphere grow. A radius that never grew counts as failed in the published code; here
        the point reached is the result, which the target still calls y, and ranks below every one
        that grew. Published starts are drawn until every label was hit (or any 300 labels are
        attacked); here up to `tries`. A label that was hit less often than `candidates` has walks
        that share a start. One that was never hit keeps random draws of the prior, which the target
        does not call y: their confidence is 0, and no other's is. One image per person is
        published; several `candidates` and `keep` are additions. MIBench's is another algorithm:
        points inside attract too, every move is accepted, and nothing is clamped.

    Args:
        points: N, queries around a point. radius: the first R. growth: what R is multiplied by.
        rule: when R grows: "code" if Σcᵢ > 0.75·N, which is 29 of 32 inside; "paper" if all are.
        direction: "repulsion" (published), or "both", d = (1/N) Σ cᵢ·uᵢ, the published code's
            alternative.
        step_divisor: the 3 of R/3. step_limit: the longest step α.
        box: starts and moves are clamped to ± this; queries around a point are not.
        patience: a walk ends after this many accepted moves without growth.
        max_queries: the most queries of one walk; (N + 1) · samples for each move, accepted or not.
        tries: the most latents drawn to find starts for all people together, rounded up to a
            multiple of 256.
        candidates: each is a walk. keep: the largest radius comes first.
        samples: the most frequent label of these passes counts.
    """

    title = "BREP-MI"

    points: AtLeastOne = 32
    radius: Positive = 2.0
    growth: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.3
    rule: Literal["code", "paper"] = "code"
    direction: Literal["repulsion", "both"] = "repulsion"
    step_divisor: Positive = 3.0
    step_limit: Positive = 3.0
    box: Positive = 1.5
    patience: AtLeastOne = 1000
    max_queries: AtLeastOne = 100_000
    tries: AtLeastOne = 65_536

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_queries < self._one_move:
            raise ValueError(
                f"max_queries ({self.max_queries}) must allow one move: at least (points + 2) · "
                f"samples ({self._one_move})"
            )

    @property
    def access(self) -> tuple[str, ...]:
        return ("labels",)

    @property
    def rows(self) -> int:
        return max(1, self.batch // self.points)

    @property
    def start_draws(self) -> int:
        return self.tries

    @property
    def search_effort(self) -> tuple[str, int]:
        return f"{self.max_queries:,} queries", self.max_queries

    @property
    def _one_move(self) -> int:
        return (self.points + 2) * self.samples

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        return {"max_queries": self._one_move, "tries": min(CHUNK, self.tries)}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        chunks = scaled_down(math.ceil(self.tries / CHUNK), share, 1)
        return {
            "max_queries": scaled_down(self.max_queries, share, self._one_move),
            "tries": chunks * CHUNK,
        }

    def prior_problems(self, prior: Prior) -> list[str]:
        problems, widest = super().prior_problems(prior), self._widest(prior)
        if self.radius > widest:
            problems.append(
                f"brepmi.radius must be at most the diagonal of the box ({widest:.3g}), got "
                f"{self.radius:g}: lower it"
            )
        return problems

    def _widest(self, prior: Prior) -> float:
        """Return the largest distance of two points in the box."""
        return 2 * self.box * math.sqrt(prior.latent)

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        prior = assets.require_prior()

        def start(labels: Tensor) -> Tensor:
            # In one part, because each draw is asked for only if those before did not suffice.
            return view.in_parts(1, lambda _: self._starts(view, prior, labels, seed=seed))[0]

        def search(latents: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            return self._walk(view, prior, latents, labels, draws, seed=seed)

        return Recipe(start, search)

    def _labels(self, view: ModelView, prior: Prior, latents: Tensor) -> Tensor:
        """Query the labels of the images of latents (..., latent)."""
        with torch.no_grad():
            parts = latents.flatten(0, -2).split(len(padded_rows(self.batch)))
            labels = [
                run_padded(view, lambda z: (view.labels(prior.images(z)),), part)[0]
                for part in parts
            ]
        return torch.cat(labels).unflatten(0, latents.shape[:-1])

    def _starts(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        """Return each person's first hits in one sequence of draws for all, (I, K, latent)."""
        drawn, said, counts = [], [], torch.zeros(view.classes, dtype=torch.long)
        for number in range(math.ceil(self.tries / CHUNK)):
            rng = generator_for(seed, "brepmi", "start", number)
            latents = torch.randn(CHUNK, prior.latent, generator=rng).clamp(-self.box, self.box)
            drawn.append(latents.to(device_of(prior.generator)))
            said.append(self._labels(view, prior, drawn[-1]).cpu())
            counts += said[-1].bincount(minlength=view.classes)
            if (counts[labels] >= self.candidates).all():
                break
        if not counts[labels].any():
            raise RunError(
                f"the target gives none of {int(counts.sum())} draws of the prior any of the "
                f"{len(labels)} attacked labels, so no walk can start: raise attack.tries or use a "
                "prior that is closer to the private images"
            )
        answers, each, chosen = torch.cat(said), torch.arange(self.candidates), []
        for label in labels.tolist():
            hits = (answers == label).nonzero()[:, 0][: self.candidates]
            unhit = (label * self.candidates + each) % len(answers)
            chosen.append(hits[each % len(hits)] if len(hits) else unhit)
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
        """Walk from latents, scored by the last radius; a walk without a start is not finished."""
        rngs = [
            generator_for(seed, "brepmi", label, draw)
            for label, draw in zip(labels.tolist(), draws.tolist(), strict=True)
        ]
        here, result = latents.clone(), latents.clone()
        started = self._labels(view, prior, here) == labels
        radius = latents.new_full((len(latents),), self.radius)
        waited = torch.zeros_like(labels)  # accepted moves since the radius grew
        steps = torch.zeros_like(labels)
        rows = started.nonzero()[:, 0]  # those that still walk
        for _ in range((self.max_queries // self.samples - 1) // (self.points + 1)):
            if not len(rows):
                break
            directions = [_directions(rngs[i], self.points, prior.latent) for i in rows.tolist()]
            u = torch.stack(directions).to(here.device)
            z, r, y = here[rows], radius[rows], labels[rows]
            inside = self._labels(view, prior, z[:, None] + r[:, None, None] * u) == y[:, None]
            grows = self._grows(inside)
            length = (r / self.step_divisor).clamp(max=self.step_limit)[:, None]
            proposed = (z + length * self._away(inside, u)).clamp(-self.box, self.box)
            accepted = self._labels(view, prior, proposed) == y
            steps[rows] += 1
            here[rows] = torch.where(accepted[:, None], proposed, z)
            radius[rows] = torch.where(grows, r * self.growth, r)
            waited[rows] = torch.where(grows, 0, waited[rows] + accepted)
            kept = grows | (radius[rows] == self.radius)
            result[rows] = torch.where(kept[:, None], here[rows], result[rows])
            rows = rows[(waited[rows] < self.patience) & (radius[rows] <= self._widest(prior))]
        return SearchResult(result, steps, started, torch.where(started, radius, 0))

    def _grows(self, inside: Tensor) -> Tensor:
        """Return whether the radius of each row grows, by which points (R, N) are inside."""
        if self.rule == "paper":
            return inside.all(1)
        return 2 * inside.sum(1) - self.points > 0.75 * self.points

    def _away(self, inside: Tensor, u: Tensor) -> Tensor:
        """Return the mean push of directions (R, N, latent) by which of them are inside."""
        hits = inside.to(u.dtype)
        push = hits - 1 if self.direction == "repulsion" else 2 * hits - 1
        return (push[..., None] * u).mean(1)


def _directions(rng: torch.Generator, count: int, size: int) -> Tensor:
    u = torch.randn(count, size, generator=rng)
    return u / u.norm(dim=1, keepdim=True)
