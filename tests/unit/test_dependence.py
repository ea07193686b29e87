"""Dependence measures against slow references, known values, bounds and finite differences."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from frostglass.defenses.training._dependence import (
    centred,
    coco,
    gaussian_gram,
    hsic_nocco,
    hsic_trace,
    linear_gram,
    measure,
    normalised,
)

MEASURES = ("hsic_nocco", "hsic_trace", "coco_frobenius", "coco_spectral")


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels_4x4():
    return torch.arange(64) // 4


# Slow references, written as in the paper and the published code.


def slow_gaussian(features, sigma):
    rows = features.flatten(1).tolist()

    def kernel(one, other):
        distance = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
        return math.exp(-distance / (2 * sigma**2 * len(one)))

    values = [[kernel(one, other) for other in rows] for one in rows]
    return torch.tensor(values, dtype=torch.float64)


def one_sided(gram):
    """K H, which is not symmetric."""
    size = len(gram)
    means = [sum(row) / size for row in gram.tolist()]
    return torch.tensor(
        [[gram[i, j].item() - means[i] for j in range(size)] for i in range(size)],
        dtype=torch.float64,
    )


def two_sided(gram):
    """H K H."""
    return one_sided(one_sided(gram).T).T


def slow_nocco(one, other, epsilon=1e-5):
    def ratio(gram):
        half = one_sided(gram)
        return half @ torch.linalg.inv(
            half + epsilon * len(gram) * torch.eye(len(gram), dtype=torch.float64)
        )

    return torch.trace(ratio(one) @ ratio(other)).item()


def slow_trace(one, other):
    """Averages of products over pairs, triples and quadruples, as the estimator is derived."""
    m = len(one)
    k, ell = one.tolist(), other.tolist()
    pairs = sum(k[i][j] * ell[i][j] for i in range(m) for j in range(m))
    triples = sum(sum(k[i]) * sum(ell[i]) for i in range(m))
    quadruples = sum(map(sum, k)) * sum(map(sum, ell))
    return (pairs - 2 * triples / m + quadruples / m**2) / (m - 1) ** 2


def slow_coco(one, other, norm):
    m = len(one)
    a, b = two_sided(one).tolist(), two_sided(other).tolist()
    product = [[sum(a[i][k] * b[k][j] for k in range(m)) for j in range(m)] for i in range(m)]
    if norm == "frobenius":
        size = math.sqrt(sum(x * x for row in product for x in row))
    else:
        size = torch.linalg.svdvals(torch.tensor(product, dtype=torch.float64)).max().item()
    return math.sqrt(size) / m


def two_variables(m=12):
    return gaussian_gram(numbers(m, 3, 2, 2, seed=1)), gaussian_gram(numbers(m, 7, seed=2))


@pytest.mark.parametrize("sigma", [0.3, 5.0])
def test_gaussian_kernel_is_the_double_loop(sigma):
    features = numbers(6, 2, 3, 3)
    torch.testing.assert_close(
        gaussian_gram(features, sigma), slow_gaussian(features, sigma), rtol=1e-12, atol=1e-12
    )


def test_gaussian_kernel_has_an_exact_diagonal_and_nothing_above_one():
    gram = gaussian_gram(numbers(20, 50, dtype=torch.float32).repeat(2, 1))
    assert (gram.diagonal() == 1).all()
    assert (gram.diagonal(20) > 1 - 1e-6).all()
    assert gram.max() <= 1


def test_gaussian_kernel_of_single_precision_features_far_from_the_origin():
    features = numbers(16, 300) + 1000
    kept = features.float()
    torch.testing.assert_close(
        gaussian_gram(kept), gaussian_gram(kept.double()).float(), rtol=0, atol=3e-7
    )


def test_label_kernel_is_the_product_of_one_hot_rows():
    labels = torch.tensor([2, 0, 2, 1, 0])
    one_hot = torch.nn.functional.one_hot(labels, 3).float()
    assert torch.equal(linear_gram(labels), one_hot @ one_hot.T)


def test_centring_is_multiplication_with_the_centring_matrix():
    gram = two_variables()[0]
    middle = torch.eye(12, dtype=torch.float64) - 1 / 12
    torch.testing.assert_close(centred(gram), middle @ gram @ middle, rtol=0, atol=1e-14)


def test_normalised_hsic_is_the_one_sided_inverse_of_the_published_code():
    one, other = two_variables()
    assert hsic_nocco(one, other).item() == pytest.approx(slow_nocco(one, other), rel=1e-9)
    assert hsic_nocco(one, other, epsilon=1e-2).item() == pytest.approx(
        slow_nocco(one, other, 1e-2), rel=1e-9
    )
    assert abs(slow_nocco(one, other) - slow_nocco(one, other, 1e-2)) > 0.1


def test_normalised_hsic_is_right_in_single_precision():
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    features, labels = numbers(64, 512, seed=3, dtype=torch.float32), linear_gram(labels_4x4())
    one, other = gaussian_gram(images), gaussian_gram(features)
    assert hsic_nocco(one, other).item() == pytest.approx(
        slow_nocco(gaussian_gram(images.double()), gaussian_gram(features.double())), rel=1e-4
    )
    assert hsic_nocco(other, labels).item() == pytest.approx(
        slow_nocco(gaussian_gram(features.double()), labels.double()), rel=1e-4
    )


def test_trace_hsic_is_the_sum_over_pairs_triples_and_quadruples():
    one, other = two_variables()
    assert hsic_trace(one, other).item() == pytest.approx(slow_trace(one, other), rel=1e-9)


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_coco_is_the_loop(norm):
    one, other = two_variables()
    assert coco(one, other, norm).item() == pytest.approx(slow_coco(one, other, norm), rel=1e-9)


def test_known_values_for_sixteen_identities_of_four():
    labels = linear_gram(labels_4x4())
    assert hsic_nocco(labels, labels).item() == pytest.approx(14.99520, abs=5e-6)
    assert hsic_trace(labels, labels).item() == pytest.approx(0.0604686, abs=5e-8)
    assert coco(labels, labels).item() == pytest.approx(0.122999, abs=5e-7)
    assert coco(labels, labels, "spectral").item() == pytest.approx(0.0625, abs=1e-7)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_normalised_hsic_stays_within_its_bounds(scale):
    one, other = (gaussian_gram(scale * numbers(64, 40, seed=seed)) for seed in (1, 2))
    labels = linear_gram(labels_4x4()).double()
    assert 0 <= hsic_nocco(one, other) <= 63
    assert 0 <= hsic_nocco(one, labels) <= 15
    assert hsic_nocco(one, other) <= hsic_nocco(one, one) <= 63


def test_normalised_hsic_nearly_reaches_its_bound_against_labels_that_features_determine():
    features = 100 * torch.nn.functional.one_hot(labels_4x4(), 16).float()
    assert hsic_nocco(gaussian_gram(features), linear_gram(labels_4x4())) > 14.9


@pytest.mark.parametrize("name", MEASURES)
def test_measures_are_symmetric_and_ignore_the_order_of_samples(name):
    one, other = two_variables()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    value = measure(name)(one, other)
    torch.testing.assert_close(measure(name)(other, one), value, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        measure(name)(one[order][:, order], other[order][:, order]), value, rtol=1e-10, atol=0
    )
    assert (
        abs(measure(name)(one[order][:, order], other) / value - 1) > 1e-4
    )  # the pairing of samples does matter


@pytest.mark.parametrize("name", MEASURES)
def test_a_copy_depends_more_than_noise(name):
    one, other = gaussian_gram(numbers(64, 3)), gaussian_gram(numbers(64, 3, seed=5))
    compare = measure(name)
    assert compare(one, one) > 1.2 * compare(one, other)


@pytest.mark.parametrize("name", MEASURES)
def test_gradients_agree_with_finite_differences(name):
    images = gaussian_gram(numbers(6, 5, seed=1))
    labels = linear_gram(torch.tensor([0, 0, 1, 1, 2, 2])).double()
    features = numbers(6, 2, 2, 1, seed=2).requires_grad_()
    compare = measure(name, epsilon=1e-3)
    assert gradcheck(lambda z: compare(images, gaussian_gram(z, 1.0)), features)
    assert gradcheck(lambda z: compare(gaussian_gram(z, 1.0), labels), features)
    assert gradcheck(
        lambda z: compare(gaussian_gram(z, 1.0), gaussian_gram(z.square(), 1.0)), features
    )


def test_gradient_of_the_kernel_agrees_with_finite_differences_also_where_samples_coincide():
    features = numbers(3, 4)
    features = torch.cat([features, features[:1]]).requires_grad_()
    weights = numbers(4, 4, seed=1)
    assert gradcheck(lambda z: (weights * gaussian_gram(z, 1.0)).sum(), features)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_features_have_no_dependence_and_a_finite_gradient(name, dtype):
    features = torch.ones(8, 5, dtype=dtype, requires_grad=True)
    value = measure(name)(gaussian_gram(features), linear_gram(torch.arange(8) // 2).to(dtype))
    value.backward()
    assert 0 <= value.item() <= 1e-6
    assert features.grad.isfinite().all()


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("labels", [[3], [3, 3], [0, 1], [5, 5, 5, 5]])
def test_tiny_batches_and_single_identities_stay_finite(name, labels):
    features = numbers(len(labels), 6, dtype=torch.float32).requires_grad_()
    compare = measure(name)
    value = compare(gaussian_gram(features), linear_gram(torch.tensor(labels)))
    value.backward()
    assert value.isfinite()
    assert features.grad.isfinite().all()
    if len(set(labels)) == 1:
        assert value.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", MEASURES)
def test_diverged_features_give_nan_and_no_error(name):
    features = numbers(8, 5, dtype=torch.float32)
    features[2, 3] = torch.nan
    assert measure(name)(gaussian_gram(features), linear_gram(torch.arange(8) // 2)).isnan()


def test_a_kernel_that_is_not_positive_gives_nan():
    assert normalised(-linear_gram(torch.arange(8) // 2)).isnan().all()


@pytest.mark.parametrize("name", MEASURES)
def test_half_precision_and_autocast_are_computed_in_single(name):
    features, images = (
        numbers(16, 20, dtype=torch.float32),
        gaussian_gram(numbers(16, 9, seed=1, dtype=torch.float32)),
    )
    compare = measure(name)
    expected = compare(images, gaussian_gram(features))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = compare(images, gaussian_gram(features))
    assert torch.equal(within, expected)
    halved = compare(images, gaussian_gram(features.bfloat16()))
    assert halved.dtype == torch.float32
    assert torch.equal(halved, compare(images, gaussian_gram(features.bfloat16().float())))


@pytest.mark.parametrize("name", MEASURES)
def test_prepared_halves_make_the_whole(name):
    one, other = two_variables()
    compare = measure(name, epsilon=1e-3)
    whole = {
        "hsic_nocco": lambda: hsic_nocco(one, other, 1e-3),
        "hsic_trace": lambda: hsic_trace(one, other),
        "coco_frobenius": lambda: coco(one, other),
        "coco_spectral": lambda: coco(one, other, "spectral"),
    }[name]()
    assert torch.equal(compare.combine(compare.prepare(one), compare.prepare(other)), whole)
