"""Evolution strategies: known functions, a slow reference, independent rows."""

import math

import pytest
import torch

from frostglass.attacks._search.evolution import OnePlusOne, SeparableCma, evolve
from frostglass.attacks._search.row_rng import RowRng
from frostglass.runtime.seeding import generator_for

BOTH = pytest.mark.parametrize("strategy", [OnePlusOne, SeparableCma])


def rows_rng(count, first=0):
    labels = torch.arange(first, first + count)
    return RowRng.of(0, "evolution", labels, torch.zeros_like(labels))


def quadratic(points, rows):
    scales = torch.logspace(0, 2, points.shape[1])
    return (scales * (points - 1).square()).sum(1)


def rosenbrock(points, rows):
    x, y = points[:, :-1], points[:, 1:]
    return (100 * (y - x.square()).square() + (1 - x).square()).sum(1)


@BOTH
@pytest.mark.parametrize(
    ("function", "size", "evaluations", "tolerance"),
    [(quadratic, 6, 1500, 1e-2), (rosenbrock, 2, 2000, 0.1)],
)
def test_the_minimum_of_a_known_function_is_found(strategy, function, size, evaluations, tolerance):
    start = torch.zeros(4, size, dtype=torch.double)
    found = evolve(strategy(start, 0.5), function, rows_rng(4), evaluations=evaluations)
    assert (found.values < tolerance).all()
    assert torch.allclose(found.points, torch.ones_like(start), atol=0.6)
    assert torch.equal(function(found.points, None), found.values)


def test_a_diagonal_covariance_learns_the_scales():
    """It needs far fewer values where numbers differ in scale, which is what it is there for."""
    start = torch.zeros(3, 30, dtype=torch.double)
    plain, scaled = (
        evolve(strategy(start, 0.5), quadratic, rows_rng(3), evaluations=2000).values.max()
        for strategy in (OnePlusOne, SeparableCma)
    )
    assert scaled < plain / 20


def test_the_one_fifth_rule_by_hand():
    """The strategy of Nevergrad, one point after the other in plain numbers."""
    size, spent = 5, 200
    start = torch.full((1, size), 0.5)
    found = evolve(OnePlusOne(start, 1.0), quadratic, rows_rng(1), evaluations=spent)
    rng = generator_for(0, "evolution", 0, 0)

    def value(point):
        return sum(10 ** (2 * i / (size - 1)) * (x - 1) ** 2 for i, x in enumerate(point))

    best, sigma = [0.5] * size, 2.0  # the start is better than nothing
    for _ in range(spent - 1):
        noise = torch.randn((1, size), generator=rng)[0].tolist()
        point = [x + sigma * e for x, e in zip(best, noise, strict=True)]
        if value(point) < value(best):
            best, sigma = point, 2 * sigma
        else:
            sigma *= 0.84
    assert torch.allclose(found.points[0], torch.tensor(best), atol=1e-4)
    assert found.evaluations.tolist() == [spent]


def test_the_constants_of_the_covariance_are_the_published_ones():
    strategy = SeparableCma(torch.zeros(1, 10), 1.0)
    assert strategy.population == 4 + math.floor(3 * math.log(10)) == 10
    weights = [math.log(5.5) - math.log(i) for i in range(1, 6)]
    mass = sum(weights) ** 2 / sum(w**2 for w in weights)
    assert strategy.mass == pytest.approx(mass)
    assert strategy.c_sigma == pytest.approx((mass + 2) / (10 + mass + 5))
    assert strategy.c_one == pytest.approx(4 * 2 / (11.3**2 + mass))
    assert strategy.c_many == pytest.approx(4 * 2 * (mass - 2 + 1 / mass) / (144 + mass))


@BOTH
def test_rows_do_not_change_each_other(strategy):
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def at(rows):
        def values(points, places):
            return (points - rows[places][:, None]).square().sum(1)

        return values

    rows = torch.arange(6)
    whole = evolve(strategy(start, 1.0), at(rows), rows_rng(6), evaluations=80)
    for row in (0, 4):
        one = slice(row, row + 1)
        alone = evolve(
            strategy(start[one], 1.0), at(rows[one]), rows_rng(1, first=row), evaluations=80
        )
        assert torch.allclose(alone.points, whole.points[one])


@BOTH
def test_points_stay_in_the_box_and_rows_stop(strategy):
    seen = []

    def values(points, rows):
        seen.append(points)
        return points.square().sum(1)

    found = evolve(
        strategy(torch.full((3, 4), 3.0), 1.0),
        values,
        rows_rng(3),
        evaluations=200,
        clamp=lambda points: points.clamp(1, 2),
        settled=lambda rows, least, spent: (rows == 1) & (spent > 40),
    )
    assert all(((points >= 1) & (points <= 2)).all() for points in seen)
    assert found.values.max() < 4.5  # the corner
    spent = found.evaluations.tolist()
    assert spent[1] < 60 < spent[0] == spent[2] <= 200
    assert sum(map(len, seen)) == sum(spent)


@BOTH
def test_what_is_not_finite_is_never_the_best(strategy):
    def values(points, rows):
        return torch.where(points[:, 0] > 0, torch.nan, points.square().sum(1))

    start = torch.full((2, 3), -1.0)
    found = evolve(strategy(start, 0.5), values, rows_rng(2), evaluations=100)
    assert found.values.isfinite().all()
    assert (found.values < 3).all()
    assert (found.points[:, 0] <= 0).all()
