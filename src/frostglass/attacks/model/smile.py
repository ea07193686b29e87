"""SMILE: from scores, a surrogate for the start and an evolution strategy for the rest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from frostglass.attacks._search.box import Box
from frostglass.attacks._search.descent import LEAST_PATIENCE, PUBLISHED, confidence
from frostglass.attacks._search.evolution import (
    OnePlusOne,
    SeparableCma,
    Settled,
    Strategy,
    evolve,
)
from frostglass.attacks._search.fields import AtLeastOne, Count, Positive, Share
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.runner import REPEATED, QueryAttack, Recipe, run_padded
from frostglass.attacks._search.search import (
    CONVINCED,
    OptimizerSettings,
    SearchResult,
    descend,
)
from frostglass.attacks._search.styled import best_styles
from frostglass.attacks.base import View, attacks
from frostglass.attacks.model.mirror import rise_and_fall
from frostglass.core.assets import Assets
from frostglass.core.method import AuditSize, Budget, Variants
from frostglass.core.objective import ce
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Reconstructions
from frostglass.core.views import ModelView
from frostglass.priors._style_space import StyleSpace
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.device import device_of
from frostglass.store.files import Work

STRATEGIES: dict[str, type[Strategy]] = {"one_plus_one": OnePlusOne, "sep_cma": SeparableCma}
ImagesOf = Callable[[Tensor], Tensor]  # from styles to images
LEAST_SCORE = 1e-45  # about the smallest probability in single precision, for logarithms


@attacks.register
@parameters
class Smile(QueryAttack):
    """Surrogate-based inversion: a local search by gradients, then one that only asks for scores.

    Starts: of the draws that the target scored for the prior, the `candidates` with the highest
    p_y. Local search: `steps` of Adam on CE(S(G(w)), y), S the prior's surrogate, w kept in
    MIRROR's box; it asks nothing of the target. Then an evolution strategy minimises -ln p_y of the
    target in a wider box, from there, with `max_queries` scores. `prior.name = "experts"` is the
    published surrogate; what it asked of the target is counted as queries.

    Use: the attacker sees scores and pays for each query; compare it with `mirror_genetic` at equal
        queries. In our trials it found as many people as PPA with the weights.
    Paper: Li et al., From Head to Tail: Efficient Black-box Model Inversion Attack via Long-tailed
        Learning (SMILE), CVPR 2025, arXiv 2503.16266.
    Differs: facts are from the released code and the abstract, the paper's text was not at hand.
        The released optimiser is Nevergrad's NGOpt, which for a style of 512 numbers and 1,000
        queries is a (1+1) strategy (seen in version 0.5.0); so it is here for all sizes, where
        NGOpt would choose others for fewer than about 22 numbers. Released scores are logarithms
        from logits, here of probabilities, which round to 1. The released box has the styles of
        2,500 draws, as here. A released search asks its start and then 999 points, as here, and
        one more query reads the result. One image per person is published; `candidates`, `keep`,
        `strategy = "sep_cma"` and `patience` are additions. A generator without a mapping network
        is searched in its latents.

    Args:
        steps: of the local search. lr: its step size, which rises over the first 5 % of the steps
            and falls over the last 25 %.
        box: half the width of its box, in standard deviations of the draws.
        max_queries: the most scores that one evolution asks for.
        strategy: "one_plus_one", or "sep_cma", CMA-ES with a diagonal covariance.
        sigma: its first step size, in units of w.
        wide_box: half the width of the evolution's box; 1.7 published.
        patience: an evolution stops early once the target is convinced (p_y of at least 0.5) and
            its best p_y has risen by no more than `flat` over this many queries; by default a sixth
            of max_queries, at least 20; 0 takes all, as published.
        flat: how far p_y may rise and still count as flat.
    """

    title = "SMILE"
    variants: ClassVar[Variants] = {
        **PUBLISHED,
        **REPEATED,
        "sep_cma": ("an evolution strategy that learns a scale for each number", {
            "strategy": "sep_cma", "sigma": 0.3,
        }),
    }  # fmt: skip

    steps: Count = 200
    lr: Positive = 0.2
    box: Positive = 1.0
    max_queries: AtLeastOne = 1000
    strategy: Literal["one_plus_one", "sep_cma"] = "one_plus_one"
    sigma: Positive = 1.0
    wide_box: Positive = 1.7
    patience: Count | None = None
    flat: Share = 0.01

    @property
    def access(self) -> tuple[str, ...]:
        return ("scores",)

    @property
    def flat_queries(self) -> int:
        """Queries over which p_y must be flat to stop; 0 never stops."""
        default = max(LEAST_PATIENCE, self.max_queries // 6)
        return default if self.patience is None else self.patience

    @property
    def search_effort(self) -> tuple[str, int]:
        queries = self.max_queries * self.samples
        return f"{self.steps:,} steps on a surrogate and {queries:,} queries", queries

    def budget(self, size: AuditSize) -> Budget:
        budget = super().budget(size)
        local = size.people * self.candidates * self.steps
        return Budget(budget.description, budget.evaluations, budget.trained + local)

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        # Two steps, so that the optimiser has its memory; more than one generation of a strategy.
        return {"steps": min(2, self.steps), "max_queries": min(64, self.max_queries)}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        return {"max_queries": scaled_down(self.max_queries, share, 1)}

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if prior.condition:
            problems.append(
                f"{self.name} starts from draws that serve all people, but this prior needs a "
                f"{prior.condition} for each image: use another prior"
            )
        if not prior.students or prior.scored is None:
            problems.append(
                f"{self.name} needs a surrogate and draws that the target scored, but the prior "
                'has none: use prior.name = "experts"'
            )
        elif self.candidates > len(prior.scored.latents):
            problems.append(
                f"{self.name}.candidates must be at most the {len(prior.scored.latents)} draws of "
                f"the prior, got {self.candidates}: lower it, or raise prior.draws"
            )
        return problems

    def run(
        self, view: View, assets: Assets, people: Tensor, *, seed: int, work: Work
    ) -> Reconstructions:
        result = super().run(view, assets, people, seed=seed, work=work)
        asked = assets.require_prior().info.get("queries", 0)  # of this target, for this attack
        return replace(result, queries=result.queries + asked)

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        prior = assets.require_prior()
        assert prior.scored is not None  # as `prior_problems` checks
        scored, device = prior.scored, device_of(prior.generator)
        space = StyleSpace(prior, scored.truncation, scored.cutoff)
        with torch.no_grad():
            parts = scored.latents.to(device).split(len(padded_rows(self.batch)))
            styles = torch.cat([space.styles(part) for part in parts])
        box, wide = (Box.around(space, styles, width) for width in (self.box, self.wide_box))

        def images(points: Tensor) -> Tensor:
            return space.images(points, truncate=True).clamp(0, 1)

        def start(labels: Tensor) -> Tensor:
            return best_styles(styles, scored.scores[:, labels.cpu()], self.candidates)

        def search(state: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            local = self._local(view, prior, box, images, state, labels, draws, seed=seed)
            rng = RowRng.of(seed, "evolution", labels, draws)

            def losses(points: Tensor, rows: Tensor) -> Tensor:
                return -self._scores(view, images, points, labels[rows]).clamp(LEAST_SCORE).log()

            found = evolve(
                STRATEGIES[self.strategy](local, self.sigma),
                losses,
                rng,
                evaluations=self.max_queries,
                clamp=wide.clamp,
                settled=self._settled(len(local), local.device) if self.flat_queries else None,
            )
            return SearchResult(found.points, found.evaluations, found.values.isfinite())

        return Recipe(start, search, show=lambda latents, labels: images(latents))

    def _local(
        self,
        view: ModelView,
        prior: Prior,
        box: Box,
        images: ImagesOf,
        state: Tensor,
        labels: Tensor,
        draws: Tensor,
        *,
        seed: int,
    ) -> Tensor:
        """Return styles that convince the surrogate, from those of `state`."""

        def objective(state: Tensor, rows: Tensor, rng: RowRng) -> tuple[Tensor, Tensor]:
            shown = images(state)
            logits = [student(shown) for student in prior.students]
            losses = torch.stack([ce(each, labels[rows]) for each in logits]).mean(0)
            sure = torch.stack([confidence(each, labels[rows]) for each in logits]).mean(0)
            return losses, sure

        settings = OptimizerSettings(
            self.steps,
            self.lr,
            project=lambda state, start: box.clamp(state),
            ramp=lambda step, steps: rise_and_fall(step / steps),
        )
        rows = torch.arange(len(labels), device=labels.device)
        rng = RowRng.of(seed, "search", labels, draws)
        return descend(view, state, rows, rng, objective, settings).state

    def _scores(self, view: ModelView, images: ImagesOf, points: Tensor, labels: Tensor) -> Tensor:
        """Query p_y of points (M, size)."""

        def look(part: Tensor, y: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                return (view.scores(images(part)).gather(1, y[:, None])[:, 0].double(),)

        batch = len(padded_rows(self.batch))
        pairs = zip(points.split(batch), labels.split(batch), strict=True)
        return torch.cat([run_padded(view, look, *pair)[0] for pair in pairs])

    def _settled(self, rows: int, device: torch.device) -> Settled:
        """Return a function that tells which rows have stopped to improve."""
        level = torch.zeros(rows, dtype=torch.double, device=device)
        since = torch.ones(rows, dtype=torch.long, device=device)

        def settled(rows: Tensor, least: Tensor, spent: int) -> Tensor:
            sure = (-least).exp()
            moved = (sure - level[rows] > self.flat) | (sure < CONVINCED)
            level[rows] = torch.where(moved, sure, level[rows])
            since[rows] = torch.where(moved, spent, since[rows])
            return spent - since[rows] >= self.flat_queries

        return settled
