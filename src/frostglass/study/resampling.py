"""Intervals over participants and people at once: a result must hold for others of both."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.metrics._stats import interval
from frostglass.runtime.seeding import generator_for

RESAMPLES = 1000
ENDS = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, and the number of answers behind it."""

    value: float
    low: float
    high: float
    answers: int


def estimate(
    statistic: Callable[[Tensor], Tensor],
    participants: Sequence[str],
    people: Sequence[int],
    seed: int = 0,
) -> Estimate | None:
    """Return a statistic of weighted answers with its interval, by a pigeonhole bootstrap.

    Each answer has a participant and a person. Both are resampled, and an answer's weight is the
    product of how often its participant and its person were drawn (Owen 2007), because answers of
    one participant, or about one person, are not independent. `statistic(weights)` takes weights
    (R, N) of N answers and returns R values, NaN where there is none.
    """
    count = len(participants)
    if not count:
        return None
    value = statistic(torch.ones(1, count, dtype=torch.double)).item()
    if math.isnan(value):
        return None
    rng = generator_for(seed, "study bootstrap", count)
    found = statistic(_drawn(participants, rng) * _drawn(people, rng))
    low, high = torch.nanquantile(found, torch.tensor(ENDS, dtype=torch.double)).tolist()
    return Estimate(value, low, high, count)


def share(
    hits: Sequence[float], participants: Sequence[str], people: Sequence[int]
) -> Estimate | None:
    """Return the share of hits, each from 0 to 1, with its interval.

    If all answers are hits, or none is, a bootstrap sees no spread and would claim certainty: the
    exact bound over people, or over participants if they are fewer, is used instead.
    """
    column = torch.tensor([float(hit) for hit in hits], dtype=torch.double)
    result = estimate(lambda weights: weights @ column / weights.sum(1), participants, people)
    if result and result.value in (0.0, 1.0):
        independent = min(len(set(participants)), len(set(people)))
        low, high = interval(torch.full((independent,), result.value))
        return Estimate(result.value, low, high, result.answers)
    return result


def _drawn(owners: Sequence[str] | Sequence[int], rng: torch.Generator) -> Tensor:
    """Draw owners with replacement; return how often that of each answer was, (resamples, N)."""
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    places = torch.tensor([numbers[owner] for owner in owners])
    drawn = torch.randint(len(numbers), (RESAMPLES, len(numbers)), generator=rng)
    times = torch.zeros(RESAMPLES, len(numbers), dtype=torch.double)
    times.scatter_add_(1, drawn, torch.ones_like(times))
    return times[:, places]
