"""Is an attack better than chance? A paired test with the number of people in it."""

import numpy as np
import torch
from torch import Tensor

from frostglass.runtime.seeding import generator_for

LEVEL = 0.01  # probability of calling a useless attack better than the prior-only baseline
POWER = 0.8
EXACT = 14  # people that differ, up to which all signs are enumerated
RESAMPLES = 20_000
MOST_PEOPLE = 100_000
RARE = 1e-9  # probability that is left out of a sum


def paired_test(attack: Tensor, baseline: Tensor) -> float:
    """Return the p-value that an attack is no better than its baseline, one value per person.

    A sign-flip permutation test: if both were alike, each person's difference would be as likely to
    have the other sign. Exact for up to 14 people with a difference, by resampling beyond that.
    """
    differences = (attack.double() - baseline.double()).cpu()
    differences = differences[differences != 0]
    count, total = len(differences), differences.sum()
    if not count:
        return 1.0
    if count <= EXACT:
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.double)] * count)
        sums = signs.reshape(-1, count) @ differences
        return (sums >= total - 1e-9).double().mean().item()
    rng = generator_for(0, "paired test", count)
    signs = torch.randint(0, 2, (RESAMPLES, count), generator=rng).double() * 2 - 1
    better = int((signs @ differences >= total - 1e-9).sum())
    return (better + 1) / (RESAMPLES + 1)


def people_needed(better: float, worse: float = 0.0, level: float = LEVEL) -> int | None:
    """Return how many people show a difference as large as this, in 4 of 5 audits.

    Args:
        better: share of people whom the attack recognises more often than the baseline.
        worse: share of people whom the baseline recognises more often than the attack.
        level: of the test.

    The test is taken for a sign test of these people. None if more than 100,000 would be needed.
    """
    if better <= worse or _power(MOST_PEOPLE, better, worse, level) < POWER:
        return None
    low, high = 1, MOST_PEOPLE
    while low < high:
        middle = (low + high) // 2
        enough = _power(middle, better, worse, level) >= POWER
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _power(people: int, better: float, worse: float, level: float) -> float:
    """Return how often a sign test over so many people finds the attack better."""
    from scipy.stats import binom  # slow to import

    differing = better + worse
    # Other numbers of people with a difference hardly occur.
    first, last = binom.ppf([RARE, 1 - RARE], people, differing)
    counts = np.arange(first, last + 1)
    required = binom.isf(level, counts, 0.5) + 1  # people with the better attack, of these
    passed = binom.sf(required - 1, counts, better / differing)
    return float(binom.pmf(counts, people, differing) @ passed)
