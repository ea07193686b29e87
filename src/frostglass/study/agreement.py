"""Krippendorff's alpha: how far people agree, beyond what chance would give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.runtime.seeding import generator_for
from frostglass.study.resampling import ENDS

RESAMPLES = 1000


@dataclass(frozen=True)
class Agreement:
    """Alpha with its bootstrap interval over items; None where it has no value."""

    alpha: float | None
    low: float | None
    high: float | None
    items: int  # with at least two answers
    answers: int


def agreement(ratings: Mapping[int, Sequence[int]], seed: int = 0) -> Agreement:
    """Return the agreement of nominal ratings, given by item."""
    counts = rating_counts(ratings)
    items, answers = len(counts), int(counts.sum())
    alpha = krippendorff_alpha(counts).item()
    if math.isnan(alpha):
        return Agreement(None, None, None, items, answers)
    rng = generator_for(seed, "alpha", items)
    drawn = torch.randint(items, (RESAMPLES, items), generator=rng)
    values = krippendorff_alpha(counts[drawn])
    low, high = torch.nanquantile(values, torch.tensor(ENDS, dtype=torch.double)).tolist()
    return Agreement(alpha, low, high, items, answers)


def rating_counts(ratings: Mapping[int, Sequence[int]]) -> Tensor:
    """Count each value in each item that has at least two, (items, values)."""
    kept = [values for values in ratings.values() if len(values) > 1]
    known = list(dict.fromkeys(value for values in kept for value in values))
    return torch.tensor(
        [[sum(each == value for each in values) for value in known] for values in kept],
        dtype=torch.double,
    ).reshape(len(kept), len(known))


def krippendorff_alpha(counts: Tensor) -> Tensor:
    """Return alpha of nominal values from their counts (..., items, values); NaN without variation.

    α = 1 - D_o / D_e, with coincidences o_cc' = Σ_u n_uc (n_uc' - [c = c']) / (m_u - 1), where m_u
    is the number of values of item u, n_c = Σ_c' o_cc' and n = Σ_c n_c:
    D_o = 1 - Σ_c o_cc / n and D_e = 1 - Σ_c n_c (n_c - 1) / (n (n - 1)).

    Krippendorff, Content Analysis, 2004, chapter 11.
    """
    per_item, per_value = counts.sum(-1, keepdim=True), counts.sum(-2)
    total = per_value.sum(-1)
    same = (counts * (counts - 1) / (per_item - 1)).sum((-2, -1))
    expected = 1 - (per_value * (per_value - 1)).sum(-1) / (total * (total - 1))
    # Without a disagreement to expect, everybody always said the same: there is no agreement.
    alpha = 1 - (1 - same / total) / expected
    return torch.where(expected > 0, alpha, torch.nan)
