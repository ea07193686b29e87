"""Bootstrap intervals over identities: results must generalise to other people, not to draws."""

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
