"""PPDG-MI: attacks again with a generator tuned on the reconstructions of a first round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.fields import AtLeastOne, Count, Positive, Share, Weight
from frostglass.attacks._search.runner import Recipe, read_out
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.tuned import (
    DISTANCES,
    AdversarialTuning,
    Features,
    PointTuning,
    TunedCopy,
    layer_features,
    pixel_features,
)
from frostglass.attacks._search.wrapped import GroupedAttack
from frostglass.attacks.base import View, attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import RunError
from frostglass.core.method import AuditSize, Budget, Variants
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.seeding import seed_for


@attacks.register
@parameters
class Ppdgmi(GroupedAttack):
    """Pseudo-private data: tunes a copy of the generator on what a first round found, goes again.

    Round 1 searches as `base` does. Of its images for a person, the `points` that the target rates
    highest, x̂, are taken for private ones, and a copy of the generator is tuned for that person to
    make them more likely. The next round searches in the copy. The result is the last round's.

    Tuning by `measure`: "pointwise", "ct" and "mmd" find pivots w with G(w) near x̂, from the mean
    style, and then minimise d(φ(G'(w)), φ(x̂)) over the weights of the copy G'. d is the mean
    squared distance, the conditional transport or the squared MMD of two sets. "vanilla" trains
    the GAN on: critic and generator take turns as in WGAN-GP, and public images with x̂ among them
    are the real ones. Neither the prior nor the target is changed. Latents of the result are those
    of the copies, which are not kept.

    Use: to see whether another attack gains from a generator that is tuned to its results; costs a
        training for each person. With a generator that knows such faces it gained nothing here.
    Paper: Peng et al., Pseudo-Private Data Guided Model Inversion Attacks, NeurIPS 2024, OpenReview
        pyqPUf36D2.
    Differs: φ are layers of VGG-16 in the published code, here those of an embedder of public
        people, or pixels. Published for StyleGAN2 are the first three measures, and "vanilla" for
        other generators; here the first three serve both, with latents in place of styles. The
        published "vanilla" tunes the GANs of KED-MI and PLG-MI with their own losses; here it needs
        a Wasserstein critic. All images of a person are scored by the base itself or by the
        target's margin, where published candidates are compared under random crops. Published
        pivots of "pointwise" have noise maps of their own; ours keep the generator's.

    Args:
        rounds: rounds of searches; the copy is tuned before each but the first, from where it is.
        searches: a round is such a group; 100 published for StyleGAN2, 1000 else.
        points: images of a round that the copy is tuned on.
        measure: how the copy is tuned.
        features: φ of the first three measures: "embedder" or "pixels".
        inversion: steps of the search for pivots. inversion_lr: Adam's step size in it.
        realism: weight of softplus(-D(G(w))) in it, if the prior has a critic.
        tuning: steps of tuning; of the generator, in "vanilla".
        tuning_lr: Adam's step size in it.
        tuning_batch: images of a step of "vanilla". critic_steps: of its critic for each of the
            generator. penalty: weight of its gradient penalty.
        share: share of x̂ among the real images of "vanilla"; by default their number decides, as
            published.
        reselect: choose the starts of later rounds anew, with the tuned copy, as published. It
            shows the base's pool to the target again, for each person. Else they start as the
            first round did.
        candidates: each is an independent sequence of rounds.
    """

    title = "PPDG-MI"
    variants: ClassVar[Variants] = {
        "pw": (
            "PPDG-PW as published for StyleGAN2: five points, one by one",
            {"measure": "pointwise", "searches": 100, "points": 5},
        ),
        "ct": (
            "PPDG-CT as published for StyleGAN2: ten points, conditional transport",
            {"measure": "ct", "searches": 100, "points": 10},
        ),
        "mmd": (
            "PPDG-MMD as published for StyleGAN2: ten points, maximum mean discrepancy",
            {"measure": "mmd", "searches": 100, "points": 10},
        ),
        "vanilla": (
            "PPDG-vanilla as published for GMI: ten passes of the GAN over 30,000 public images",
            {
                "measure": "vanilla",
                "searches": 1000,
                "points": 500,
                "tuning": 950,
                "tuning_lr": 2e-4,
            },
        ),
    }

    rounds: Annotated[int, Field(ge=2)] = 2
    searches: AtLeastOne = 10
    points: AtLeastOne = 5
    measure: Literal["pointwise", "ct", "mmd", "vanilla"] = "pointwise"
    features: Literal["embedder", "pixels"] = "embedder"
    inversion: Count = 300
    inversion_lr: Positive = 0.01
    realism: Weight = 0.1
    tuning: AtLeastOne = 150
    tuning_lr: Positive = 3e-4
    tuning_batch: Annotated[int, Field(ge=2)] = 64
    critic_steps: AtLeastOne = 5
    penalty: Weight = 10.0
    share: Share | None = None
    reselect: bool = True
    candidates: AtLeastOne = 1

    reads_name: ClassVar[str] = "searches"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points > self.reads:
            raise ValueError(
                f"points ({self.points}) must not exceed the images of a round ({self.reads}): "
                "lower it, or raise searches"
            )

    @property
    def searches_each(self) -> int:
        return self.candidates * self.searches

    @property
    def reads(self) -> int:
        return self.searches * self.base_attack.reads

    @property
    def needs(self) -> frozenset[Asset]:
        compared = self.measure != "vanilla" and self.features == "embedder"
        return super().needs | ({"embedder"} if compared else set())

    @property
    def search_effort(self) -> tuple[str, int]:
        words, images = self.base_attack.search_effort
        looks = self.reads * self.samples + (self.start_images if self.reselect else 0)
        total = self.rounds * self.searches * images + (self.rounds - 1) * looks
        return f"{self.rounds} rounds of {self.searches} × {words}", total

    @property
    def surrogate_images(self) -> int:
        return self.rounds * self.searches * self.base_attack.surrogate_images

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        fewest = {"inversion": min(2, self.inversion), "tuning": min(2, self.tuning)}
        return super().brief_counts(candidates) | fewest

    def budget(self, size: AuditSize) -> Budget:
        budget = super().budget(size)
        shown = self.points * (self.inversion + self.tuning)
        if self.measure == "vanilla":
            shown = self.tuning_batch * self.tuning * (self.critic_steps + 1)
        trained = size.people * self.candidates * (self.rounds - 1) * shown
        return Budget(budget.description, budget.evaluations, budget.trained + trained)

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if self.measure == "vanilla" and (prior.critic is None or not _wasserstein(prior)):
            problems.append(
                'ppdgmi.measure "vanilla" trains a WGAN on, but the prior is none with its critic: '
                'use a wgan prior, or measure = "pointwise"'
            )
        return problems

    def problems(self, view: View, assets: Assets) -> list[str]:
        problems = super().problems(view, assets)
        if self.measure == "vanilla" and not assets.public:
            problems.append("ppdgmi needs assets.public, got none: pass Assets(public=...)")
        return problems

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        base, prior = self.base_attack.recipe(view, assets, seed=seed), assets.require_prior()
        rounds = _Rounds(self, view, base, assets, TunedCopy.of(prior), self._tuner(assets), seed)
        pixels = math.prod(prior.image_shape)

        def start(labels: Tensor) -> Tensor:
            return base.start(labels).unflatten(1, (self.searches, -1)).transpose(1, 2)

        def show(rows: Tensor, labels: Tensor) -> Tensor:
            return rows[:, -pixels:].unflatten(1, prior.image_shape)

        return Recipe(
            start,
            rounds.search,
            read=lambda state, labels, draws: state,
            show=show,
            bonus=base.bonus,
            select=base.select,
            latent_size=-pixels,
        )

    def _tuner(self, assets: Assets) -> PointTuning | AdversarialTuning:
        if self.measure == "vanilla":
            return AdversarialTuning(
                assets.require_public(),
                self.tuning,
                self.tuning_lr,
                self.tuning_batch,
                self.critic_steps,
                self.penalty,
                self.share,
            )
        features: Features = pixel_features
        if self.features == "embedder":
            assert assets.embedder is not None  # as `needs` says
            features = layer_features(assets.embedder)
        return PointTuning(
            DISTANCES[self.measure],
            features,
            self.inversion,
            self.inversion_lr,
            self.realism,
            self.tuning,
            self.tuning_lr,
        )


def _wasserstein(prior: Prior) -> bool:
    """Return whether a prior says that it is a WGAN, or something added to one."""
    info: Mapping[str, Any] = prior.info
    while "base" in info:
        info = info["base"]
    return info.get("method", {}).get("name", "wgan") == "wgan" and not prior.condition


@dataclass(frozen=True)
class _Found:
    """The images (R, D, C, H, W) of R searches, their latents, scores (R, D) and result."""

    images: Tensor
    latents: Tensor
    score: Tensor
    result: SearchResult

    def best(self, rows: slice, count: int) -> Tensor:
        """Return the best images of some searches; those that broke off have none."""
        score = self.score[rows].flatten()
        order = score.argsort(descending=True, stable=True)[:count]
        return self.images[rows].flatten(0, 1)[order[score[order] > -torch.inf]]

    def row(self) -> SearchResult:
        """Return all searches as one row, whose state has the latent and pixels of each image."""

        def per_image(column: Tensor) -> Tensor:
            if column.ndim == 1:
                column = column[:, None].expand(self.score.shape)
            return column.flatten()[None]

        result, parts = self.result, (self.latents.flatten(2), self.images.flatten(2))
        traces = result.traces(self.score.shape[1])
        return SearchResult(
            torch.cat(parts, dim=2).flatten(0, 1)[None],
            per_image(result.steps),
            per_image(result.finished),
            None if result.score is None else per_image(result.score),
            traces[0].flatten(0, 1)[None] if traces else None,
        )


@dataclass(frozen=True)
class _Rounds:
    """The attack bound to a view: a first round for all people, the others one person at a time."""

    attack: Ppdgmi
    view: ModelView
    base: Recipe
    assets: Assets
    copy: TunedCopy
    tuner: PointTuning | AdversarialTuning
    seed: int

    def search(self, state: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
        """Search all rounds of N sequences, whose S starts are `state` (N, S, ...)."""
        attack, prior = self.attack, self.assets.require_prior()
        places = torch.arange(attack.searches, device=draws.device) * attack.candidates
        numbers = (places + draws[:, None]).flatten()  # as the base numbers its searches
        each = labels.repeat_interleave(attack.searches)
        first = self._round(self.base, prior, state.flatten(0, 1), each, numbers, last=False)
        found = []
        for row, start in enumerate(state):
            rows = slice(row * attack.searches, (row + 1) * attack.searches)
            images = first.best(rows, attack.points)
            found.append(self._later_rounds(images, start, each[rows], numbers[rows]).row())
        return _stacked(found)

    def _later_rounds(
        self, images: Tensor, first_start: Tensor, labels: Tensor, numbers: Tensor
    ) -> _Found:
        """Search the rounds of one sequence that follow its first, which found `images`."""
        attack, whole = self.attack, slice(None)
        self.copy.reset()
        for number in range(1, attack.rounds):
            self._tune(images, labels, seed_for(self.seed, "tuning", number, int(numbers[0])))
            recipe = attack.base_attack.recipe(
                self.view,
                replace(self.assets, prior=self.copy.prior),
                seed=seed_for(self.seed, "round", number),
            )
            start = first_start
            if attack.reselect:
                start = recipe.start(labels[:1].cpu())[0][numbers]
            last = number + 1 == attack.rounds
            found = self._round(recipe, self.copy.prior, start, labels, numbers, last=last)
            images = found.best(whole, attack.points)
        return found

    def _tune(self, images: Tensor, labels: Tensor, seed: int) -> None:
        if not len(images):
            return  # no search finished, so there is nothing to learn from
        seed = seed_for(seed, int(labels[0]))
        self.tuner.run(self.copy, images, labels[:1].expand(len(images)), seed=seed)
        if not self.copy.finite():
            raise RunError("ppdgmi: the tuned generator is not finite: lower attack.tuning_lr")

    def _round(
        self,
        recipe: Recipe,
        prior: Prior,
        start: Tensor,
        labels: Tensor,
        numbers: Tensor,
        *,
        last: bool,
    ) -> _Found:
        """Search from starts (R, ...); images of the last round are scored by the caller."""
        base = self.attack.base_attack
        most = len(padded_rows(base.rows, base.batch_multiple))
        parts = []
        for rows in torch.arange(len(start), device=start.device).split(most):
            result = recipe.search(start[rows], labels[rows], numbers[rows])
            latents = recipe.read(result.state, labels[rows], numbers[rows])
            each = labels[rows].repeat_interleave(latents.shape[1])
            if last:
                images = _shown(recipe, prior, latents.flatten(0, 1), each)
                images = images.unflatten(0, latents.shape[:2])
                score = torch.zeros(latents.shape[:2], device=images.device)
            else:
                size = len(padded_rows(self.attack.batch))
                images, score, _ = read_out(self.view, recipe, prior, latents, labels[rows], size)
                score = score if result.score is None else _per_read(result.score, score)
                sound = _per_read(result.finished, score) & score.isfinite()
                score = torch.where(sound, score, -torch.inf)
            parts.append(_Found(images, latents[..., : recipe.latent_size], score, result))
        return _Found(
            torch.cat([part.images for part in parts]),
            torch.cat([part.latents for part in parts]),
            torch.cat([part.score for part in parts]),
            _stacked([part.result for part in parts]),
        )


def _shown(recipe: Recipe, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
    """Return the images of latents (N, ...), whatever the batch is."""
    rows = padded_rows(len(labels)).to(labels.device)
    with torch.no_grad():
        return (recipe.show or prior.images)(latents[rows], labels[rows])[: len(labels)]


def _per_read(column: Tensor, like: Tensor) -> Tensor:
    return column if column.ndim == 2 else column[:, None].expand_as(like)


def _stacked(results: list[SearchResult]) -> SearchResult:
    """Return the rows of all results, one after the other."""
    scores = [result.score for result in results if result.score is not None]
    traces = [result.trace for result in results if result.trace is not None]
    return SearchResult(
        torch.cat([result.state for result in results]),
        torch.cat([result.steps for result in results]),
        torch.cat([result.finished for result in results]),
        torch.cat(scores) if scores else None,
        torch.cat(traces) if traces else None,
    )
