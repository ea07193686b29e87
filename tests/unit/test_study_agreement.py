"""Krippendorff's alpha: published examples, a slow reference, and the ends of its scale."""

from itertools import permutations

import pytest
import torch

from frostglass.runtime.seeding import generator_for
from frostglass.study.agreement import agreement, krippendorff_alpha, rating_counts


def units(*observers: str) -> dict[int, list[int]]:
    """The values of each unit; an observer's values are letters, and a point is no value."""
    return {
        place: [ord(value) for value in values if value != "."]
        for place, values in enumerate(zip(*observers, strict=True))
    }


def slow_alpha(ratings) -> float:
    """The definition by pairs of values, one by one."""
    kept = [values for values in ratings.values() if len(values) > 1]
    everything = [value for values in kept for value in values]
    observed = sum(
        sum(a != b for a, b in permutations(values, 2)) / (len(values) - 1) for values in kept
    ) / len(everything)
    pairs = list(permutations(everything, 2))
    expected = sum(a != b for a, b in pairs) / len(pairs)
    return 1 - observed / expected


# Krippendorff, "Computing Krippendorff's alpha-reliability", 2011: sections A, B and C.
BINARY = ("0100000010", "1110010000")
NOMINAL = ("aabbdcccedda", "babbbccceddd")


@pytest.mark.parametrize(
    ("observers", "expected"),
    [
        (BINARY, 0.095),
        (NOMINAL, 0.692),
        (("123321412...", "1233224125.3", ".3332342251.", "12332441251."), 0.743),
    ],
    ids=["binary", "nominal", "missing"],
)
def test_published_examples(observers, expected):
    ratings = units(*observers)
    assert krippendorff_alpha(rating_counts(ratings)).item() == pytest.approx(expected, abs=5e-4)
    assert slow_alpha(ratings) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("seed", range(10))
def test_it_equals_the_definition_by_pairs(seed):
    rng = generator_for(seed, "ratings")
    numbers = torch.randint(1, 6, (12,), generator=rng).tolist()
    ratings = {
        unit: torch.randint(4, (number,), generator=rng).tolist()
        for unit, number in enumerate(numbers)
    }
    fast = krippendorff_alpha(rating_counts(ratings)).item()
    assert fast == pytest.approx(slow_alpha(ratings), abs=1e-12)


def test_the_ends_of_the_scale():
    assert agreement({0: [0, 0, 0], 1: [1, 1]}).alpha == pytest.approx(1)
    assert agreement({0: [0, 1], 1: [1, 0]}).alpha < 0
    rng = generator_for(0, "chance")
    chance = agreement({n: torch.randint(5, (4,), generator=rng).tolist() for n in range(400)})
    assert abs(chance.alpha) < 0.05
    assert chance.low < 0 < chance.high
    assert (chance.items, chance.answers) == (400, 1600)


@pytest.mark.parametrize("ratings", [{}, {0: [1]}, {0: [1, 1], 1: [1, 1]}])
def test_without_variation_it_has_no_value(ratings):
    assert agreement(ratings).alpha is None


def test_single_answers_do_not_count():
    both = {0: [0, 0], 1: [1, 1], 2: [0, 1]}
    assert agreement({**both, 3: [0], 4: [1]}).alpha == agreement(both).alpha
