"""LDA scores and earth mover's distances, each against a slow reference."""

import itertools

import numpy as np
import pytest
import torch

from evidence import rng
from frostglass.core.errors import DataError, RunError
from frostglass.metrics._emd import MAX_PAIRS, emd, pii_terms
from frostglass.metrics._lda import lda_chance, lda_score


def test_lda_score_against_the_scatter_matrices():
    groups = torch.tensor([4, 4, 4, 1, 1, 9, 9, 9, 9, 2])
    vectors = torch.randn(10, 6, generator=rng(), dtype=torch.double) + groups[:, None] / 3
    mean = vectors.mean(0)
    between, within = torch.zeros(6, 6, dtype=torch.double), torch.zeros(6, 6, dtype=torch.double)
    for group in groups.unique():
        some = vectors[groups == group]
        shift = some.mean(0) - mean
        between += len(some) * torch.outer(shift, shift)
        within += sum(torch.outer(v - some.mean(0), v - some.mean(0)) for v in some)
    assert lda_score(vectors, groups) == pytest.approx((between.trace() / within.trace()).item())
    assert lda_score(vectors * 100 + 7, groups) == pytest.approx(lda_score(vectors, groups))


def test_lda_score_by_hand_is_between_over_within():
    """People at ±3, each ±1 around: 4·9 / 4·1."""
    assert lda_score(
        torch.tensor([[2.0], [4], [-2], [-4]]), torch.tensor([0, 0, 1, 1])
    ) == pytest.approx(9)


def test_random_groups_score_as_chance():
    groups = torch.arange(40) // 4
    vectors = torch.randn(40, 200, generator=rng())
    drawn = [
        lda_score(vectors, groups[torch.randperm(40, generator=rng(seed))]) for seed in range(200)
    ]
    assert lda_chance(groups) == 9 / 30
    assert np.mean(drawn) == pytest.approx(9 / 30, rel=0.01)


def test_no_lda_score_without_spread():
    with pytest.raises(
        DataError, match="2 embeddings of one of them, got 3 embeddings of 3 people"
    ):
        lda_score(torch.rand(3, 2), torch.arange(3))
    with pytest.raises(DataError, match="3 embeddings of 1 people"):
        lda_score(torch.rand(3, 2), torch.zeros(3))
    with pytest.raises(DataError, match=r"got \(3, 2\) and \(2,\)"):
        lda_score(torch.rand(3, 2), torch.zeros(2))
    with pytest.raises(RunError, match="embeddings of each person do not differ"):
        lda_score(torch.tensor([[0.1, 0.7], [0.3, 0.2]]).repeat(3, 1), torch.tensor([0, 1] * 3))
    with pytest.raises(RunError, match="or some are not finite"):
        lda_score(torch.tensor([[0.1], [torch.nan], [0.3]]), torch.tensor([0, 0, 1]))
    with pytest.raises(DataError, match="at least 2 embeddings of one person, got 3"):
        lda_chance(torch.arange(3))


def test_emd_is_the_best_of_all_pairings():
    a, b = torch.rand(5, 2, 3, generator=rng(0)), torch.rand(5, 2, 3, generator=rng(1))
    slow = min(
        np.mean([(a[i] - b[j]).norm().item() for i, j in enumerate(order)])
        for order in itertools.permutations(range(5))
    )
    assert emd(a, b) == pytest.approx(slow, rel=1e-6)


def test_emd_of_numbers_is_known():
    """In one dimension, sorted against sorted; a shift moves everything by itself."""
    from scipy.stats import wasserstein_distance

    a, b = torch.randn(12, 1, generator=rng(0)), torch.randn(8, 1, generator=rng(1)) + 1
    assert emd(a, b) == pytest.approx(
        wasserstein_distance(a[:, 0].numpy(), b[:, 0].numpy()), rel=1e-6
    )  # 12 and 8 are repeated to 24
    assert emd(a, a + 2.5) == pytest.approx(2.5, rel=1e-6)


def test_emd_is_independent_of_order():
    a = torch.rand(40, 3, 16, 16, generator=rng())
    assert emd(a, a[torch.randperm(40, generator=rng(1))]) == 0
    assert emd(a, a.repeat(2, 1, 1, 1)) == 0


def test_sets_that_cannot_be_matched_are_refused():
    with pytest.raises(
        DataError, match=f"at most {MAX_PAIRS} pairs, got 5997 for sets of 1999 and 3"
    ):
        emd(torch.zeros(1999, 1), torch.zeros(3, 1))
    with pytest.raises(DataError, match=r"one shape, got \(2, 3\) and \(2, 4\)"):
        emd(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(DataError, match=r"got \(0, 3\)"):
        emd(torch.zeros(0, 3), torch.zeros(2, 3))
    with pytest.raises(RunError, match="not finite"):
        emd(torch.full((2, 3), torch.inf), torch.zeros(2, 3))


def test_a_blur_towards_the_mean_comes_out_below_the_floor():
    """√d against √(2d) in many dimensions: a small index is no proof."""
    draws, other = (torch.randn(40, 400, generator=rng(seed)) for seed in range(2))
    found = pii_terms(0.1 * other, other, draws, torch.randn(40, 400, generator=rng(2)))
    assert found["reconstructions"] < 0.8 * found["floor"]


def test_the_privacy_index_stands_between_its_floor_and_the_true_images():
    draws, other, hidden = (torch.randn(60, 4, generator=rng(seed)) for seed in range(3))
    true = torch.randn(60, 4, generator=rng(3)) * 0.2 + 3
    failed, perfect = pii_terms(hidden, true, draws, other), pii_terms(true, true, draws, other)
    assert failed["floor"] == perfect["floor"] == emd(draws, other) > 0
    assert failed["reconstructions"] == pytest.approx(failed["floor"], rel=0.2)
    assert (
        perfect["reconstructions"]
        == perfect["originals"]
        == emd(true, draws)
        > 3 * failed["reconstructions"]
    )
    with pytest.raises(DataError, match="number, got 59, 60, 60, 60"):
        pii_terms(hidden[:59], true, draws, other)


def test_the_terms_of_the_privacy_index_of_shifted_sets_are_known():
    """W₁ of a shift is its length, so that on one line the bound is the error itself."""
    draws = torch.randn(30, 3, 4, 4, generator=rng(), dtype=torch.double)
    direction = torch.randn(3, 4, 4, generator=rng(1), dtype=torch.double)
    direction /= direction.norm()
    turned = torch.zeros_like(direction)
    turned[0, 0, :2] = torch.tensor([direction[0, 0, 1], -direction[0, 0, 0]])
    turned /= turned.norm()  # at right angles
    terms = pii_terms(draws + 2 * direction, draws + 5 * direction, draws, draws.flip(0))
    expected = {"reconstructions": 2, "floor": 0, "originals": 5, "error": 3, "bound": 3}
    assert terms == pytest.approx(expected, abs=1e-6)
    terms = pii_terms(draws + 3 * turned, draws + 4 * direction, draws, draws)
    expected = {"reconstructions": 3, "floor": 0, "originals": 4, "error": 5, "bound": 1}
    assert terms == pytest.approx(expected, abs=1e-6)
    terms = pii_terms(draws - 7 * direction, draws + direction, draws, draws)
    assert (terms["bound"], terms["error"]) == pytest.approx((0, 8), abs=1e-6)


def test_no_critic_finds_more_than_the_privacy_index_and_the_best_one_finds_it():
    """E D(draws) - E D(reconstructions) of critics with slope 1, as Crafter's critic is."""
    draws = torch.randn(30, 6, generator=rng(), dtype=torch.double)
    shift = torch.tensor([3.0, 0, 4, 0, 0, 0], dtype=torch.double)
    index = pii_terms(draws + shift, draws, draws, draws)["reconstructions"]
    critics = torch.nn.functional.normalize(
        torch.cat([-shift[None], torch.randn(50, 6, generator=rng(1), dtype=torch.double)])
    )
    gaps = (draws @ critics.T).mean(0) - ((draws + shift) @ critics.T).mean(0)
    assert gaps[0].item() == pytest.approx(index) == 5
    assert gaps[1:].max() < index
