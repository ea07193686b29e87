"""Bootstrap intervals over people, and over seeds: a result must hold for others of both."""

import torch
from torch import Tensor

from frostglass.runtime.seeding import generator_for


def interval(
    values: Tensor, *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean over identities, values (I,).

    If all values are 0, or all are 1, the bootstrap sees no spread and would claim certainty. The
    exact binomial bound is used instead (all of 30 gives 0.884 to 1, not 1 to 1).
    """
    values = values.double()
    count, tail = len(values), (1 - level) / 2
    if bool((values == values[0]).all()) and values[0].item() in (0.0, 1.0):
        bound = tail ** (1 / count)
        return (bound, 1.0) if values[0] == 1 else (0.0, 1 - bound)
    rng = generator_for(seed, "bootstrap", count)
    means = values[torch.randint(count, (resamples, count), generator=rng)].mean(1)
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.double))
    return low.item(), high.item()


def interval_over_seeds(
    values: Tensor, *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap interval of the mean over people and seeds, values (S, I).

    People are resampled with their means over seeds. If there are several seeds, their means are
    resampled too, as deviations from the common mean, widened by √(S / (S - 1)): the deviations of
    so few seeds are too small by that. All values 0, or all 1, give the exact bound over people.
    """
    values = values.double()
    people, effects = values.mean(0), values.mean(1) - values.mean()
    count, seeds = len(people), len(effects)
    if seeds == 1 or bool((values == values[0, 0]).all()):
        return interval(people, resamples=resamples, level=level, seed=seed)
    rng = generator_for(seed, "bootstrap over seeds", count, seeds)
    means = people[torch.randint(count, (resamples, count), generator=rng)].mean(1)
    shifts = effects[torch.randint(seeds, (resamples, seeds), generator=rng)].mean(1)
    means += shifts * (seeds / (seeds - 1)) ** 0.5
    tail = (1 - level) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.double))
    return max(low.item(), values.min().item()), min(high.item(), values.max().item())
