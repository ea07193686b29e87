"""Crafter's privacy index (ε-PII): do reconstructions look like anyone?"""

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import match_shape
from frostglass.metrics._emd import pii_terms
from frostglass.metrics._stats import jackknife
from frostglass.metrics.base import Evidence, Metric, Score, metrics

MAX_SAMPLES = 1000  # images of each set


@metrics.register
@parameters
class Pii(Metric):
    """Are the reconstructions, as a set, like draws of the prior, which show anyone?

    ε = W₁(reconstructions, draws), the earth mover's distance in pixels, is `pii`. W₁ is a metric,
    which bounds what a release with this ε gives away: W₁(reconstructions, originals) ≥
    W₁(originals, draws) - ε. The terms: `pii_originals` = W₁(originals, draws), what a perfect
    attack would have; `pii_bound`, the right-hand side, at least 0; `pii_error` =
    W₁(reconstructions, originals), which the bound holds for; `pii_floor` = W₁ of draws and other
    draws, which is not 0 for finite samples. Private is an ε near the floor while the bound is
    near `pii_originals`. The index ignores whom an image shows, and images blurred towards the mean
    come out below the floor.

    Values are of the whole set, of at most 1000 images, and depend on how many there are. Intervals
    are over people, by a jackknife.

    Use: to compare with Crafter's privacy index. It does not ask whose an image is.
    Paper: Wang et al., Crafter, NDSS 2024, arXiv 2401.07205 (ε-PII).

    Differs: The paper estimates the distance with a critic, the largest E D(draws) - E D(
    reconstructions); ours is exact for the samples, and only for them: it holds for the attack that
    was run, not for every attack. The bound is the triangle inequality of W₁; the paper's Eq. 17
    and 34 were not at hand, and their terms may be others.
    """

    title: ClassVar[str] = "Privacy index ε-PII"
    uses_draws: ClassVar[bool] = True

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        return {}

    def summaries(self, evidence: Evidence) -> dict[str, Score]:
        if evidence.draws is None:
            raise ConfigError("pii needs two sets of draws of the prior, got none: pass draws=...")
        people, candidates = evidence.reconstructions.images.shape[:2]
        shape = (people, candidates)
        draws = (each.flatten(0, 1) for each in evidence.draws)
        size = (evidence.images.shape[1], *evidence.images.shape[2:])
        sets = [
            match_shape(images[:], size).unflatten(0, shape)
            for images in (evidence.images, _originals(evidence), *draws)
        ]

        @cache
        def terms(kept: tuple[int, ...]) -> dict[str, float]:
            chosen = _spread(len(kept) * candidates)
            return pii_terms(*(images[list(kept)].flatten(0, 1)[chosen] for images in sets))

        names = {
            "pii": "reconstructions", "pii_floor": "floor", "pii_originals": "originals",
            "pii_error": "error", "pii_bound": "bound",
        }  # fmt: skip
        everyone = tuple(range(people))

        def score(name: str, term: str) -> Score:
            value = terms(everyone)[term]
            low, high = jackknife(lambda kept: terms(tuple(kept.tolist()))[term], value, people)
            return Score(name, value, max(0.0, low), high, ())

        return {name: score(name, term) for name, term in names.items()}


def _originals(evidence: Evidence) -> Tensor:
    """Return true images, as many as reconstructions: the attacked ones, or private ones.

    Private ones are spread over each person's images, whatever the reconstructions look like.
    """
    if evidence.victims is not None:
        return evidence.originals
    candidates, chosen = evidence.reconstructions.images.shape[1], []
    for _, _, own in evidence.by_person():
        chosen.append(own[torch.linspace(0, len(own) - 1, candidates).long()])
    return evidence.private.floats(torch.cat(chosen))


def _spread(count: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, MAX_SAMPLES)).long()
