"""The tables of a study: shares chosen, classes of an identification, correlations with metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from frostglass.study.counted import Judgement
from frostglass.study.folder import Design
from frostglass.study.items import CANDIDATES
from frostglass.study.resampling import Estimate, estimate, share

CLASSES = (*"ABCD", "none")


@dataclass(frozen=True)
class Compared:
    """How often the reconstruction from `model` was chosen over that from `other`."""

    model: str
    other: str
    share: Estimate


@dataclass(frozen=True)
class Chosen:
    """How often reconstructions from a model were chosen, over all comparisons with others."""

    model: str
    share: Estimate


@dataclass(frozen=True)
class ClassScores:
    """How well one answer of an identification was given; None where it has no value."""

    name: str
    recall: Estimate | None
    precision: Estimate | None
    f1: Estimate | None


@dataclass(frozen=True)
class Identified:
    """How well people were found from the reconstructions from a model."""

    model: str
    accuracy: Estimate
    macro_f1: Estimate
    found: Estimate | None  # share of answers that are right where the person was among the four
    classes: tuple[ClassScores, ...]


def compared(design: Design, made: Sequence[Judgement]) -> list[Compared]:
    """Return a row for every two models that were compared."""
    rows = []
    for first, second in combinations(range(len(design.models)), 2):
        own = [each for each in made if set(each.item.models) == {first, second}]
        if result := _share_of(own, first):
            names = [design.models[model].label for model in (first, second)]
            rows.append(Compared(names[0], names[1], result))
    return rows


def chosen(design: Design, made: Sequence[Judgement]) -> list[Chosen]:
    """Return a row for each model: its share of the choices in which it was an option."""
    own = {
        model: [each for each in made if model in each.item.models]
        for model in range(len(design.models))
    }
    shares = {model: _share_of(some, model) for model, some in own.items()}
    return [Chosen(design.models[model].label, each) for model, each in shares.items() if each]


def identified(design: Design, made: Sequence[Judgement]) -> list[Identified]:
    """Return a row for each model; classes are the positions A to D, and none."""
    rows = []
    for model, facts in enumerate(design.models):
        own = [each for each in made if each.item.models == [model]]
        accuracy = _share(own, lambda each: each.choice == each.item.truth)
        macro = _not_certain(_estimate(own, lambda counts: f1_scores(counts).nanmean(-1)), accuracy)
        if not accuracy or not macro:
            continue
        shown = [each for each in own if each.item.truth != each.item.none]
        found = _share(shown, lambda each: each.choice == each.item.truth)
        rows.append(Identified(facts.label, accuracy, macro, found, _classes(own)))
    return rows


def f1_scores(confusion: Tensor) -> Tensor:
    """Return F1 = 2 TP / (2 TP + FP + FN) of each class, from counts (..., truth, answer).

    It is NaN for a class that nobody answered and that never was right; macro-F1 is the mean over
    the others.
    """
    hits = confusion.diagonal(dim1=-2, dim2=-1)
    return 2 * hits / (confusion.sum(-1) + confusion.sum(-2))


def _classes(made: Sequence[Judgement]) -> tuple[ClassScores, ...]:
    return tuple(_class(made, place, name) for place, name in enumerate(CLASSES))


def _class(made: Sequence[Judgement], place: int, name: str) -> ClassScores:
    true = [each for each in made if each.truth_position == place]
    said = [each for each in made if each.position == place]
    recall = _share(true, lambda each: each.position == place)
    precision = _share(said, lambda each: each.truth_position == place)
    f1 = _estimate(made, lambda counts: f1_scores(counts)[:, place])
    return ClassScores(name, recall, precision, _not_certain(f1, recall, precision))


def _not_certain(score: Estimate | None, *shares: Estimate | None) -> Estimate | None:
    """Give a score of 0 or 1, of which a bootstrap sees no spread, the widest of exact bounds."""
    known = [each for each in shares if each]
    if not score or score.value not in (0.0, 1.0) or not known:
        return score
    low, high = min(each.low for each in known), max(each.high for each in known)
    return replace(score, low=low, high=high)


def _estimate(made: Sequence[Judgement], statistic: Callable[[Tensor], Tensor]) -> Estimate | None:
    """Return a statistic of the counts (R, truth, answer) with its interval."""
    return estimate(
        lambda weights: statistic(_confusion(made, weights)),
        [each.participant for each in made],
        [each.item.person for each in made],
    )


def _confusion(made: Sequence[Judgement], weights: Tensor) -> Tensor:
    """Count weighted answers (R, N) by the position that was right and the one that was chosen."""
    size = CANDIDATES + 1
    cells = torch.zeros(len(made), size * size, dtype=torch.double)
    for row, each in enumerate(made):
        assert each.truth_position is not None
        cells[row, each.truth_position * size + each.position] = 1
    return (weights @ cells).unflatten(1, (size, size))


def _share_of(made: Sequence[Judgement], model: int) -> Estimate | None:
    """Return how often the reconstruction from a model was chosen."""
    return _share(made, lambda each: each.item.models[each.choice] == model)


def _share(made: Sequence[Judgement], hit: Callable[[Judgement], bool]) -> Estimate | None:
    return share(
        [hit(each) for each in made],
        [each.participant for each in made],
        [each.item.person for each in made],
    )
