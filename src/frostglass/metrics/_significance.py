"""Is an attack better than chance? A paired test with the number of people in it."""

import torch
from scipy.stats import binom
from torch import Tensor

from frostglass.runtime.seeding import generator_for

LEVEL = 0.01  # probability of calling a useless attack better than the prior-only baseline
POWER = 0.8
EXACT = 14  # people that differ, up to which all signs are enumerated
RESAMPLES = 20_000
MOST_PEOPLE = 100_000


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


def people_needed(share: float, level: float = LEVEL) -> int | None:
    """Return how many people show an attack that recognises this share, in 4 of 5 audits.

    Assumes that the baseline recognises nobody: then the test passes when enough people are
    recognised (7 at a level of 1 %). None if more than 100,000 would be needed.
    """
    if share <= 0:
        return None
    wins = next(count for count in range(1, 64) if 0.5**count < level)
    low, high = wins, MOST_PEOPLE
    if binom.sf(wins - 1, high, share) < POWER:
        return None
    while low < high:
        middle = (low + high) // 2
        enough = binom.sf(wins - 1, middle, share) >= POWER
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
