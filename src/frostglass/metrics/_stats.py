"""Bootstrap intervals over people, and over seeds: a result must hold for others of both."""

from collections.abc import Callable

import torch
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.runtime.seeding import generator_for

MAX_GROUPS = 10  # of people that a jackknife leaves out in turn


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


def jackknife(
    without: Callable[[Tensor], float], value: float, people: int, *, level: float = 0.95
) -> tuple[float, float]:
    """Return the interval of a value of a whole set, over people, by leaving some of them out.

    `without(kept)` is the value of the people at places `kept`. Up to 10 groups of people are left
    out in turn (Tukey's delete-a-group jackknife): the standard error is √((G - 1)/G Σ(v_g - v̄)²),
    and the interval value ± t · error with G - 1 degrees of freedom. A bootstrap would count
    some people twice, whose images would then be too close to each other.
    """
    if people < 2:
        raise DataError(f"expected at least 2 people for an interval over people, got {people}")
    from scipy.special import stdtrit  # slow to import

    groups = torch.arange(people) % min(people, MAX_GROUPS)
    count = int(groups.max()) + 1
    values = torch.tensor(
        [without((groups != group).nonzero().flatten()) for group in range(count)],
        dtype=torch.double,
    )
    error = ((count - 1) / count * (values - values.mean()).square().sum()).sqrt().item()
    reach = float(stdtrit(count - 1, (1 + level) / 2)) * error
    return value - reach, value + reach
