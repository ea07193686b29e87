"""The Fréchet distance: known values, and a general square root as the slow reference."""

import pytest
import torch

from frostglass.core.errors import DataError
from frostglass.metrics._frechet import frechet_distance


def features(count: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(
        count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.double
    )


def test_nothing_is_far_from_itself():
    some = features(50, 6, 0)
    assert frechet_distance(some, some) == pytest.approx(0, abs=1e-9)


def test_a_shift_counts_by_its_square():
    some = features(50, 6, 0)
    assert frechet_distance(some, some + 0.5) == pytest.approx(6 * 0.25)


def test_a_stretch_of_one_feature_is_known():
    """(σ₁ - σ₂)² in one dimension."""
    some = features(50, 1, 0)
    sigma = some.std().item()
    mean = some.mean()
    assert frechet_distance(some, (some - mean) * 3 + mean) == pytest.approx((2 * sigma) ** 2)


def test_against_the_product_itself():
    """The eigenvalues of C₁C₂, which is not symmetric, are those of its symmetric form."""
    some, others = (
        features(40, 5, 0) @ features(5, 5, 1),
        features(60, 5, 2) @ features(5, 5, 3) + 1,
    )
    first, second = some.T.cov(), others.T.cov()
    shared = torch.linalg.eigvals(first @ second).sqrt().real.sum()
    expected = (
        ((some.mean(0) - others.mean(0)) ** 2).sum() + first.trace() + second.trace() - 2 * shared
    )
    assert frechet_distance(some, others) == pytest.approx(expected.item())


def test_fewer_images_than_features():
    assert frechet_distance(features(5, 20, 0), features(6, 20, 1)) > 0


def test_bad_features_are_refused():
    with pytest.raises(DataError, match=r"got \(5, 3\) and \(5, 4\)"):
        frechet_distance(features(5, 3, 0), features(5, 4, 0))
    with pytest.raises(DataError, match="at least 2"):
        frechet_distance(features(1, 3, 0), features(5, 3, 0))
