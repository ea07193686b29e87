"""Rounding: cells, signs, what it counts, and that it commutes with order and batches."""

import pytest
import torch

from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.defenses import Rounding
from frostglass.defenses.base import defenses
from frostglass.defenses.release.rounding import rounded
from worlds import NoWork

VALUES = torch.tensor([-100.0, -3.9, -2.0, -0.1, 0.0, 0.1, 1.9, 2.0, 3.9, 100.0])


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (1, [-2, -2, -2, -2, 2, 2, 2, 2, 2, 2]),
        (2, [-3, -3, -1, -1, 1, 1, 1, 3, 3, 3]),
        (3, [-3.5, -3.5, -1.5, -0.5, 0.5, 0.5, 1.5, 2.5, 3.5, 3.5]),
    ],
)
def test_numbers_become_the_centres_of_their_cells(bits, expected):
    assert rounded(VALUES, bits, 4.0).tolist() == expected


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (2, [-2, -2, -2, 0, 0, 0, 2, 2, 2, 2]),
        (3, [-3, -3, -2, 0, 0, 0, 2, 2, 3, 3]),
    ],
)
def test_zero_can_be_a_centre(bits, expected):
    assert rounded(VALUES, bits, 4.0, zero=True).tolist() == expected
    finer = rounded(VALUES, 12, 4.0, zero=True)
    assert (finer - VALUES.clamp(-4, 4)).abs().max() <= 4 / 2**11


def test_what_a_mask_weakened_is_removed_only_if_zero_is_kept():
    weak = 1e-9 * VALUES.abs()
    assert rounded(weak, 12, 8.0, zero=True).count_nonzero() == 0
    assert rounded(weak, 12, 8.0).min() > 0


@pytest.mark.parametrize("bits", [1, 2, 5, 16])
def test_as_many_values_as_bits_say_and_an_error_of_half_a_cell(bits):
    numbers = torch.linspace(-8, 8, 4097)[:-1]
    values = rounded(numbers, bits, 8.0)
    assert len(values.unique()) == min(2**bits, 4096)
    assert (values - numbers).abs().max() <= 8 / 2**bits + 1e-6
    assert torch.equal(values.sign(), torch.where(numbers < 0, -1.0, 1.0))
    torch.testing.assert_close(rounded(values, bits, 8.0), values)


def test_what_leaves_is_counted():
    encoder, images = torch.nn.Flatten(), torch.tensor([0.2, 0.9, 0.4, 3.0]).reshape(2, 2, 1, 1)
    released = Rounding(bits=3, limit=1.0).release(encoder, images, Assets(), seed=0, work=NoWork())
    assert released.features.shape == (2, 2)
    assert released.facts == ({"bits": 6, "beyond_limit": 0.25},)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 17}, "bits"),
        ({"bits": -1}, "bits"),
        ({"limit": 0.0}, "limit"),
        ({"bits": 1, "zero": True}, "zero = true needs at least 2 bits, got 1"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        defenses.build({"name": "rounding", **settings})
