"""Balanced batches: every batch has the same composition, nearly every image is used once."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frostglass.core.errors import DataError
from frostglass.data._balanced import balanced_batches
from worlds import rng


def labels_of(counts, seed=0):
    """Shuffled labels with gaps between the names: identity i is called 3 i + 1."""
    labels = torch.cat(
        [torch.full((count,), 3 * number + 1) for number, count in enumerate(counts)]
    )
    return labels[torch.randperm(len(labels), generator=rng(seed + 1000))]


def uses(batches):
    return Counter(torch.cat(batches).tolist())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_every_batch_is_balanced_whatever_the_counts(counts, identities, images, seed):
    labels = labels_of(counts, seed)
    batches = balanced_batches(labels, identities, images, rng(seed))
    assert batches
    for batch in batches:
        shown = Counter(labels[batch].tolist())
        assert len(shown) == min(identities, len(counts))
        assert set(shown.values()) == {images}
        for identity in shown:
            own = batch[labels[batch] == identity]
            if counts[(identity - 1) // 3] >= images:  # images repeat only if there are too few
                assert len(set(own.tolist())) == images
            else:
                assert set(own.tolist()) == set((labels == identity).nonzero()[:, 0].tolist())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_no_image_repeats_more_often_than_padding_needs(counts, identities, images, seed):
    labels = labels_of(counts, seed)
    seen = uses(balanced_batches(labels, identities, images, rng(seed)))
    for number, count in enumerate(counts):
        own = [seen[index] for index in (labels == 3 * number + 1).nonzero()[:, 0].tolist()]
        if count >= images:
            assert max(own) <= 2
            assert sum(times == 2 for times in own) <= -count % images
        else:
            assert sum(own) in (0, images)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_there_are_as_many_batches_as_the_groups_allow(counts, identities, images, seed):
    groups = [-(-count // images) for count in counts]
    size = min(identities, len(counts))
    # An identity can be in a batch once: n batches need n x size groups, and each identity has at
    # most n of them.
    possible = max(
        n for n in range(1, sum(groups) + 1) if sum(min(own, n) for own in groups) >= n * size
    )
    assert len(balanced_batches(labels_of(counts, seed), identities, images, rng(seed))) == possible


def test_equal_counts_use_every_image_exactly_once():
    labels = labels_of([12] * 32)
    batches = balanced_batches(labels, 16, 4, rng())
    assert [len(batch) for batch in batches] == [64] * 6
    assert uses(batches) == dict.fromkeys(range(len(labels)), 1)


def test_uneven_counts_use_nearly_every_image():
    counts = [20 + number % 11 for number in range(50)]
    seen = uses(balanced_batches(labels_of(counts), 16, 4, rng()))
    assert len(seen) >= 0.97 * sum(counts)


def test_an_identity_with_many_images_is_not_shown_first():
    labels = labels_of([40] + [4] * 30)
    epochs = [balanced_batches(labels, 3, 4, rng(seed)) for seed in range(20)]
    assert all(sum(1 in labels[batch] for batch in batches) == 10 for batches in epochs)
    assert any(1 in labels[batches[-1]] for batches in epochs)
    assert not all(1 in labels[batches[0]] for batches in epochs)


def test_only_the_generator_decides():
    labels = labels_of([9, 7, 12, 5, 5])
    one, same, other = (balanced_batches(labels, 3, 4, rng(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert [batch.tolist() for batch in one] != [batch.tolist() for batch in other]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    balanced_batches(labels, 3, 4, rng())
    assert torch.equal(torch.get_rng_state(), before)


def test_identities_are_combined_differently():
    labels = labels_of([4] * 8)
    pairs = {
        frozenset(labels[balanced_batches(labels, 2, 4, rng(seed))[0]].tolist())
        for seed in range(60)
    }
    assert len(pairs) > 20  # of 28 pairs


@pytest.mark.parametrize(
    ("labels", "identities", "images"), [([], 2, 2), ([1, 2], 0, 2), ([1, 2], 2, 0)]
)
def test_nothing_to_balance_is_refused(labels, identities, images):
    with pytest.raises(
        DataError, match="need images, and at least 1 identity and 1 image of each, got"
    ):
        balanced_batches(torch.tensor(labels), identities, images, rng())
