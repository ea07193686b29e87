"""Do metrics measure what people see? Each metric of the run beside people's judgement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.runtime.seeding import generator_for
from frostglass.study.counted import Judgement
from frostglass.study.folder import Design
from frostglass.study.resampling import ENDS, Estimate, share

RESAMPLES = 500
Metrics = Mapping[tuple[int, int], Mapping[str, float]]  # of each (model, person)


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation with its interval over people; None where there is no variation.

    `items` are the reconstructions, or the pairs of them, that it is over.
    """

    rho: float | None
    low: float | None
    high: float | None
    items: int


@dataclass(frozen=True)
class MetricRow:
    """A metric beside people's judgement.

    `preferred` is how often people chose the reconstruction with the higher value; equal values
    count as half. `pairwise` correlates the share that chose a reconstruction with the difference
    of the values, `identification` the share that found the person with the value.
    """

    metric: str
    preferred: Estimate | None
    pairwise: Correlation | None
    identification: Correlation | None


def metric_rows(
    design: Design, compared: Sequence[Judgement], identified: Sequence[Judgement]
) -> list[MetricRow]:
    """Return a row for each metric that every reconstruction has."""
    metrics = {(each.model, each.person): each.metrics for each in design.reconstructions}
    # Those that were to be found: of a person who is not shown, nobody can find the face.
    present = [each for each in identified if each.item.truth != each.item.none]
    return [
        MetricRow(
            name,
            _preferred(metrics, name, compared),
            _pairs(metrics, name, compared) if compared else None,
            _found(metrics, name, present) if present else None,
        )
        for name in design.metrics
    ]


def _preferred(metrics: Metrics, name: str, made: Sequence[Judgement]) -> Estimate | None:
    halves = []
    for each in made:
        values = [metrics[model, each.item.person][name] for model in each.item.models]
        ahead = values[each.choice] - values[1 - each.choice]
        halves.append(0.5 if ahead == 0 else float(ahead > 0))
    participants = [each.participant for each in made]
    return share(halves, participants, [each.item.person for each in made])


def _pairs(metrics: Metrics, name: str, made: Sequence[Judgement]) -> Correlation:
    people, shares, values = [], [], []
    for judged in _by_item(made):
        item = judged[0].item
        first, second = (metrics[model, item.person][name] for model in item.models)
        people.append(item.person)
        shares.append(sum(each.choice == 0 for each in judged) / len(judged))
        values.append(first - second)
    return _correlation(people, shares, values)


def _found(metrics: Metrics, name: str, made: Sequence[Judgement]) -> Correlation:
    people, shares, values = [], [], []
    for judged in _by_item(made):
        item = judged[0].item
        people.append(item.person)
        shares.append(sum(each.choice == item.truth for each in judged) / len(judged))
        values.append(metrics[item.models[0], item.person][name])
    return _correlation(people, shares, values)


def _by_item(made: Sequence[Judgement]) -> list[list[Judgement]]:
    groups: dict[int, list[Judgement]] = {}
    for each in made:
        groups.setdefault(each.number, []).append(each)
    return list(groups.values())


def _correlation(
    people: Sequence[int], shares: Sequence[float], values: Sequence[float]
) -> Correlation:
    """Correlate; the interval is by bootstrap over people, with all items of each."""
    first, second = (torch.tensor(each, dtype=torch.double) for each in (shares, values))
    owners, places = torch.tensor(people).unique(return_inverse=True)
    count = len(owners)
    rng = generator_for(0, "study correlation", count)
    drawn = torch.randint(count, (RESAMPLES, count), generator=rng)
    times = torch.zeros(RESAMPLES, count, dtype=torch.double)
    times.scatter_add_(1, drawn, torch.ones_like(times))
    weights = torch.cat([torch.ones(1, len(people), dtype=torch.double), times[:, places]])
    found = spearman(first, second, weights)
    if found[0].isnan():
        return Correlation(None, None, None, len(people))
    low, high = torch.nanquantile(found[1:], torch.tensor(ENDS, dtype=torch.double)).tolist()
    return Correlation(found[0].item(), low, high, len(people))


def spearman(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    """Return the rank correlation of two columns (N,) for each row of weights (R, N).

    A weight says how often a row counts, as if it were repeated. Equal values share a rank. NaN if
    a column has one value alone.
    """
    total = weights.sum(1, keepdim=True)
    ranks = []
    for column in (first, second):
        values, places = column.unique(return_inverse=True)
        equal = torch.zeros(len(weights), len(values), dtype=torch.double)
        equal.index_add_(1, places, weights)
        below = equal.cumsum(1) - equal
        rank = (below + (equal + 1) / 2)[:, places]
        ranks.append(rank - (weights * rank).sum(1, keepdim=True) / total)
    both, one, other = ((weights * ranks[a] * ranks[b]).sum(1) for a, b in ((0, 1), (0, 0), (1, 1)))
    varied = torch.minimum(one, other) > 1e-9 * total.flatten()
    return torch.where(varied, (both / (one * other).sqrt()).clamp(-1, 1), torch.nan)
