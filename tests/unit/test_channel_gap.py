"""Attacks that see channels up to their size, against a device that weakens channels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feature_worlds import (
    LATENT,
    affine_prior,
    blobs,
    draws,
    mean_error,
    public_images,
    run,
    view_of,
)
from frostglass.attacks.features._channels import channel_gaps, channels_at_length_one
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.hybrid import Hybrid
from frostglass.attacks.features.latent import Latent
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError

LEFT = torch.tensor([1.0, 1e-3, 1e-9, 1e-25])  # what a mask leaves of the four channels


class Mixed(nn.Module):
    """An invertible linear encoder from images (1, 4, 4) to four channels of 2×2."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linalg.qr(draws(16, 16, seed=5)).Q)

    def forward(self, images):
        return (images.flatten(1) @ self.weight).unflatten(1, (4, 2, 2))


class Weakened(Mixed):
    """Multiplies the channels by what is left of them, in an order of each image's own."""

    def forward(self, images):
        features = super().forward(images)
        order = features.detach().sum((2, 3)).argsort(1)
        return features * LEFT.expand(len(images), 4).gather(1, order)[:, :, None, None]


def test_the_gap_is_the_mean_over_channels_of_their_distance_at_length_one():
    wanted = torch.tensor([[[[3.0, 4.0]], [[1.0, 0.0]]]])  # one feature, two channels of 1×2
    features = torch.tensor([[[[6.0, 8.0]], [[0.0, 2.0]]]])
    # The first channel differs by a factor, the second is orthogonal: (0 + 2) / 2.
    assert channel_gaps(features, wanted).item() == pytest.approx(1.0)
    opposite = torch.tensor([[[[-6.0, -8.0]], [[9.0, 0.0]]]])
    assert channel_gaps(opposite, wanted).item() == pytest.approx(2.0)  # (4 + 0) / 2


@pytest.mark.parametrize("shape", [(3, 4, 5), (6, 3)])
def test_the_size_of_a_channel_does_not_count(shape):
    features, wanted = draws(2, *shape), draws(2, *shape, seed=1)
    channels = torch.tensor([1e-30, 1.0, 1e20])
    factors = channels[:, None, None] if len(shape) == 3 else channels
    gaps = channel_gaps(features, wanted)
    torch.testing.assert_close(channel_gaps(factors * features, wanted), gaps)
    torch.testing.assert_close(channel_gaps(features, factors * wanted), gaps)
    assert (gaps > 0.1).all()


def test_a_channel_that_is_gone_does_not_count():
    features, wanted = draws(2, 3, 4, 4), draws(2, 3, 4, 4, seed=1)
    gone = wanted * torch.tensor([1.0, 0.0, 1.0])[:, None, None]
    expected = channel_gaps(features[:, [0, 2]], wanted[:, [0, 2]])
    torch.testing.assert_close(channel_gaps(features, gone), expected)
    assert (channel_gaps(features, torch.zeros_like(wanted)) == 0).all()


def test_its_gradient():
    features = draws(2, 3, 2, 2).double().requires_grad_()
    wanted = draws(2, 3, 2, 2, seed=1).double()
    assert torch.autograd.gradcheck(lambda each: channel_gaps(each, wanted), features)
    zero = torch.zeros(1, 3, 2, 2, requires_grad=True)
    channel_gaps(zero, wanted[:1].float()).sum().backward()
    assert zero.grad.isfinite().all()


def test_it_reads_an_image_through_weakened_channels():
    linear, truth = affine_prior(), draws(3, LATENT)
    images = linear.generator(truth).detach()
    view = view_of(Weakened(), images, ["encoder"])
    plain, knowing = (
        mean_error(run(Latent(gap=gap, steps=500, tries=1), view, Assets(prior=linear)), images)
        for gap in ("mean_square", "channels")
    )
    assert knowing < 1e-5
    assert plain > 1e-3


def test_hybrid_takes_it_too():
    images = (0.5 + 0.1 * draws(3, 1, 4, 4)).clamp(0, 1)
    view = view_of(Weakened(), images, ["encoder"])
    attack = Hybrid(start="noise", gap="channels", steps=800, lr=0.02)
    reached = run(attack, view).images[:, 0]
    with torch.no_grad():
        assert (channel_gaps(Mixed()(reached), Mixed()(images)) < 1e-2).all()


class Faint(nn.Module):
    """Multiplies each of twelve channels by a number that depends on the image alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", draws(12, 3, 3, 3, seed=6))

    def forward(self, images):
        features = 1 + F.conv2d(images, self.weight, padding=1)
        keys = 1e3 * features.detach().mean((2, 3))
        return features * torch.exp(-9 * (keys - keys.floor()))[:, :, None, None]


def test_channels_at_length_one():
    features = torch.tensor([[[[3.0, 4.0]], [[0.0, 0.0]]], [[[3e-30, 4e-30]], [[0.0, 2.0]]]])
    expected = torch.tensor([[[[0.6, 0.8]], [[0.0, 0.0]]], [[[0.6, 0.8]], [[0.0, 1.0]]]])
    torch.testing.assert_close(channels_at_length_one(features), expected)
    tokens = draws(2, 6, 3)
    slow = torch.stack([torch.stack([c / c.norm() for c in each.T]).T for each in tokens])
    torch.testing.assert_close(channels_at_length_one(tokens), slow)


def test_a_decoder_reads_weakened_channels_if_their_size_does_not_count():
    private, assets = blobs(6, 1), Assets(public_images(blobs(200, 2)))
    view = view_of(Faint(), private, ["encode"])
    short = {"epochs": 20, "batch": 16, "width": 8, "flips": False}
    plain, knowing = (
        mean_error(run(Decoder(unit_channels=units, **short), view, assets), private)
        for units in (False, True)
    )
    assert knowing < 0.5 * plain


def test_the_decoder_refuses_vectors():
    images = blobs(2, 1)
    attack = Decoder(unit_channels=True, epochs=1, width=4)
    with pytest.raises(ConfigError, match=r"decoder\.unit_channels needs channels of several"):
        run(attack, view_of(nn.Flatten(), images, ["encode"]), Assets(public_images(blobs(9, 2))))


@pytest.mark.parametrize("attack", [Latent(gap="channels"), Hybrid(start="noise", gap="channels")])
def test_features_without_channels_of_several_numbers_are_refused(attack):
    images = affine_prior().generator(draws(2, LATENT)).detach()
    view = view_of(nn.Flatten(), images, ["encoder"])
    with pytest.raises(ConfigError, match=r"channels of several numbers, got vectors of 16"):
        run(attack, view, Assets(prior=affine_prior()))


def test_a_tolerance_for_sizes_is_refused():
    with pytest.raises(ConfigError, match=r"tolerance must be 0 for gap \"channels\".*got 0\.5"):
        Latent(gap="channels", tolerance=0.5)
