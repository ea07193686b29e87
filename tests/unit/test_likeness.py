"""Which image a candidate is compared with, and how similar it is."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from evidence import (
    IMAGES,
    PEOPLE,
    TRIES,
    bytes_of,
    evidence,
    reconstructions,
    smooth,
    victims,
)
from frostglass.core.errors import RunError
from frostglass.metrics.base import measure
from frostglass.metrics.likeness import Likeness, likeness

# Which true image belongs to which candidate


def test_each_candidate_is_compared_with_its_own_image():
    true = victims()
    originals = evidence(victims=true).originals
    slow = torch.stack([true[i, k // TRIES] for i in range(PEOPLE) for k in range(IMAGES * TRIES)])
    assert torch.equal(originals, slow)


def test_unknown_originals_are_refused():
    with pytest.raises(
        RunError, match=r"expected 3 people and .* divides 4 candidates, got 3 people with 3 images"
    ):
        _ = evidence(victims=bytes_of(3, 3, 3, 16, 16)).originals
    with pytest.raises(RunError, match=r"expected 3 people .* got 2 people with 2 images each"):
        _ = evidence(victims=bytes_of(2, 2, 3, 16, 16)).originals


def test_sorted_candidates_are_refused():
    candidates = bytes_of(PEOPLE, 4, 3, 16, 16)
    ranked = reconstructions(candidates, draws=torch.arange(4).expand(3, 4))
    with pytest.raises(RunError, match="got candidates in the order of guesses"):
        _ = replace(evidence(victims=victims()), reconstructions=ranked).originals


def slow_ssim(one, other, side):
    """SSIM of one image (C, H, W) by definition: every window inside, one after the other."""
    reach = np.arange(side) - side // 2
    weights = np.exp(-(reach[:, None] ** 2 + reach[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    found = []
    for x, y in zip(one, other, strict=True):
        for top, left in itertools.product(
            range(x.shape[0] - side + 1), range(x.shape[1] - side + 1)
        ):
            a, b = x[top : top + side, left : left + side], y[top : top + side, left : left + side]
            ma, mb = (weights * a).sum(), (weights * b).sum()
            va, vb, cov = (
                (weights * (a - ma) ** 2).sum(),
                (weights * (b - mb) ** 2).sum(),
                (weights * (a - ma) * (b - mb)).sum(),
            )
            found.append(
                (2 * ma * mb + 1e-4)
                * (2 * cov + 9e-4)
                / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
            )
    return np.mean(found)


@pytest.mark.parametrize(
    ("channels", "side", "window"), [(3, 16, 11), (1, 20, 11), (3, 10, 9), (1, 8, 7)]
)
def test_ssim_and_psnr_against_slow_references(channels, side, window):
    one, other = bytes_of(3, channels, side, side, seed=4), smooth(3, channels, side)
    mixed = 0.7 * other + 0.3 * one
    found = likeness(mixed, other)
    for row in range(3):
        a, b = mixed[row].double().numpy(), other[row].double().numpy()
        assert found["ssim"][row].item() == pytest.approx(slow_ssim(a, b, window), abs=1e-5)
        error = np.mean((a - b) ** 2)
        assert found["mse"][row].item() == pytest.approx(error, rel=1e-5)
        assert found["psnr"][row].item() == pytest.approx(10 * math.log10(1 / error), abs=1e-4)


def test_likeness_of_known_pairs():
    black, white = torch.zeros(1, 1, 16, 16), torch.ones(1, 1, 16, 16)
    far = likeness(black, white)
    assert far["mse"].item() == 1
    assert far["psnr"].item() == 0
    assert far["ssim"].item() == pytest.approx(1e-4 / (1 + 1e-4), rel=1e-3)
    step = torch.full((1, 1, 16, 16), 0.5)
    assert likeness(step, step + 0.1)["psnr"].item() == pytest.approx(20, abs=1e-4)


@pytest.mark.parametrize(("channels", "side"), [(3, 16), (1, 16), (3, 32), (1, 64), (1, 8)])
def test_a_copy_is_most_similar_and_noise_is_not(channels, side):
    true = smooth(channels=channels, side=side)
    copy, noise = likeness(true, true), likeness(bytes_of(*true.shape, seed=5), true)
    blurred = likeness(nn.functional.avg_pool2d(true, 3, 1, 1, count_include_pad=False), true)
    assert (copy["psnr"] == 100).all()
    assert (copy["mse"] == 0).all()
    assert torch.allclose(
        torch.stack([copy["ssim"], copy["fsim"]]), torch.ones(2, len(true)), atol=1e-5
    )
    for name in ("ssim", "psnr", "fsim"):
        assert (copy[name] > blurred[name]).all()
        assert (blurred[name] > noise[name] + 0.02).all()


def test_fsim_sees_colour_where_there_is_some():
    """The same luminance in other colours: FSIM alone would call the two the same."""
    true = smooth() * 0.5 + 0.25
    shift = torch.tensor([0.2, -0.2 * 0.299 / 0.587, 0])[None, :, None, None]
    assert likeness(true + shift, true)["fsim"].max() < 0.999
    grey_pair = [
        (images * torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]).sum(1, keepdim=True)
        for images in (true + shift, true)
    ]
    assert likeness(*grey_pair)["fsim"].min() > 0.9999


@pytest.mark.parametrize("channels", [1, 3])
def test_likeness_columns_are_by_person_and_candidate(channels):
    true = victims(channels)
    reconstructed = true.repeat_interleave(TRIES, 1).clone()
    reconstructed[1, 3] = 1 - reconstructed[1, 3]
    rows = measure([Likeness()], evidence(reconstructed, true))
    assert list(rows.columns) == ["ssim", "psnr", "fsim", "mse"]
    expected = torch.zeros(PEOPLE, IMAGES * TRIES)
    expected[1, 3] = (1 - 2 * true[1, 1]).square().mean()
    assert torch.allclose(rows.columns["mse"], expected, atol=1e-6)
    assert ((rows.columns["psnr"] == 100) == (expected == 0)).all()
    assert rows.score("mse").values == pytest.approx((0, expected[1, 3].item() / 4, 0))


def test_reconstructions_are_compared_as_8_bit_images():
    true = victims()
    nearly = (true.repeat_interleave(TRIES, 1) + 0.4 / 255).clamp(max=1)
    assert (Likeness().columns(evidence(nearly, true))["mse"] == 0).all()


def test_chunks_change_nothing(monkeypatch):
    whole = Likeness().columns(evidence(victims=victims()))
    monkeypatch.setattr("frostglass.metrics.likeness.CHUNK", 5)
    parts = Likeness().columns(evidence(victims=victims()))
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5) for name in whole)


def test_images_that_cannot_be_compared_are_refused():
    with pytest.raises(RunError, match=r"got \(2, 3, 16, 16\) and \(2, 3, 8, 8\)"):
        likeness(bytes_of(2, 3, 16, 16), bytes_of(2, 3, 8, 8))
    with pytest.raises(RunError, match="grey or colour images"):
        likeness(bytes_of(2, 2, 16, 16), bytes_of(2, 2, 16, 16))
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(RunError, match=r"expected images in \[0, 1\]"):
            likeness(torch.full((1, 1, 16, 16), wrong), torch.zeros(1, 1, 16, 16))
