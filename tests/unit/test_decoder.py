"""Decoders: published layers, features of any shape, and training against a critic."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.networks.dcgan import build_generator
from frostglass.networks.decoder import (
    ChannelsFirst,
    DecoderGame,
    TokenMaps,
    build_decoder,
    critic_loss,
    decoder_loss,
    pixel_distance,
    standardised,
)
from frostglass.networks.perceptual import perceptual_distance
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, same_weights
from worlds import target as a_target

FEATURES = [
    ((6, 16, 16), (3, 64, 64)),  # maps
    ((6, 16, 16), (3, 16, 16)),  # of full size
    ((6, 20, 20), (3, 16, 16)),  # larger than the image
    ((5, 6, 7), (1, 50, 40)),  # no power of two, and not square
    ((30,), (3, 32, 32)),  # vectors
    ((1,), (1, 6, 6)),
    ((17, 12), (3, 32, 32)),  # tokens with one for the whole, without, and on no grid
    ((16, 12), (3, 32, 32)),
    ((7, 12), (3, 32, 32)),
    ((8, 8, 12), (3, 32, 32)),  # channels last
    ((2, 3, 2, 2), (3, 32, 32)),
]


def noise(*shape, seed=0, dtype=torch.float):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_images(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", ["mirrored", "adv_learn", "crafter"])
@pytest.mark.parametrize(("feature", "image"), FEATURES)
def test_any_feature_becomes_an_image(form, feature, image):
    with seeded(0):
        decoder = build_decoder(feature, image, width=4, form=form)
    made = decoder(noise(2, *feature))
    assert made.shape == (2, *image)
    assert made.min() > 0
    assert made.max() < 1
    made.sum().backward()
    assert all(weight.grad is not None for weight in decoder.parameters())


def layers(module):
    """Describe the layers of a network."""
    descriptions = []
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            descriptions.append((layer.in_features, layer.out_features))
        elif isinstance(layer, nn.ConvTranspose2d):
            sizes = (layer.kernel_size, layer.stride, layer.padding, layer.output_padding)
            descriptions.append(
                (layer.in_channels, layer.out_channels, *(size[0] for size in sizes))
            )
        elif isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.Sigmoid, nn.Conv2d)):
            descriptions.append(type(layer).__name__)
    return descriptions


def test_advlearns_figure_at_224_pixels():
    with torch.device("meta"):
        decoder = build_decoder((1000,), (3, 224, 224), form="adv_learn")
    between = ["BatchNorm2d", "ReLU"]
    assert layers(decoder) == [
        (1000, 2048), "ReLU", (2048, 2048 * 7 * 7), "ReLU",
        (2048, 1024, 3, 2, 1, 1), *between, (1024, 512, 3, 2, 1, 1), *between,
        (512, 256, 3, 2, 1, 1), *between,
        (256, 64, 3, 2, 1, 1), *between, (64, 3, 3, 2, 1, 1), "Sigmoid",
    ]  # fmt: skip
    assert decoder(torch.empty(2, 1000, device="meta")).shape == (2, 3, 224, 224)


@pytest.mark.parametrize(
    ("side", "first"), [(32, (8, 4)), (64, (16, 4)), (128, (32, 4)), (256, (32, 4)), (448, (32, 7))]
)
def test_advlearns_figure_at_other_sizes_has_its_last_stages(side, first):
    with torch.device("meta"):
        decoder = build_decoder((10,), (3, side, side), width=2, form="adv_learn")
    multiple, floor = first
    found = layers(decoder)
    assert found[:3] == [(10, 2 * multiple), "ReLU", (2 * multiple, 2 * multiple * floor**2)]
    assert found[-2:] == [(2, 3, 3, 2, 1, 1), "Sigmoid"]


def test_crafters_decoder_is_gmis_generator_on_the_flat_feature():
    with torch.device("meta"):
        decoder = build_decoder((64, 16, 16), (3, 64, 64), form="crafter")
        known = build_generator(64 * 16 * 16, 64, (3, 64, 64))
        larger = build_decoder((64, 32, 32), (3, 128, 128), form="crafter")
    assert layers(decoder) == layers(known)
    assert (64 * 16 * 16, 8192) in layers(decoder)
    assert layers(larger)[0] == (64 * 32 * 32, 8192)  # half a billion weights, as published
    assert layers(larger)[1:-2] == layers(known)[1:-2]
    assert layers(larger)[-2:] == [(64, 3, 5, 4, 1, 1), "Sigmoid"]
    assert larger(torch.empty(2, 64, 32, 32, device="meta")).shape == (2, 3, 128, 128)


def test_a_mirrored_decoder_grows_by_doubling_and_not_by_resizing():
    with seeded(0):
        decoder = build_decoder((6, 16, 16), (3, 64, 64), width=4)
    sizes = []
    for layer in decoder:
        layer.register_forward_hook(lambda _, args, output: sizes.append(tuple(output.shape[1:])))
    decoder(noise(2, 6, 16, 16))
    assert list(dict.fromkeys(sizes)) == [(16, 16, 16), (8, 32, 32), (4, 64, 64), (3, 64, 64)]


def test_tokens_stand_where_their_patches_stood():
    tokens = torch.arange(2 * 5 * 3).reshape(2, 5, 3).float()
    maps = TokenMaps(5)(tokens)
    assert maps.shape == (2, 6, 2, 2)
    for row in range(2):
        for column in range(2):
            assert torch.equal(maps[:, :3, row, column], tokens[:, 1 + 2 * row + column])
            assert torch.equal(maps[:, 3:, row, column], tokens[:, 0])
    assert torch.equal(TokenMaps(4)(tokens[:, 1:]), maps[:, :3])


def test_channels_that_come_last_are_brought_to_the_front():
    assert isinstance(build_decoder((8, 8, 12), (3, 32, 32), width=2)[0], ChannelsFirst)
    assert not isinstance(build_decoder((12, 8, 8), (3, 32, 32), width=2)[0], ChannelsFirst)
    assert not isinstance(build_decoder((8, 8, 8), (3, 32, 32), width=2)[0], ChannelsFirst)
    maps = noise(2, 4, 5, 6)
    assert torch.equal(ChannelsFirst()(maps)[1, 3], maps[1, :, :, 3])


@pytest.mark.parametrize("shape", [(), (0, 4, 4)])
def test_nothing_cannot_be_decoded(shape):
    with pytest.raises(ConfigError, match="a decoder needs non-empty features"):
        build_decoder(shape, (3, 32, 32))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7, 5), 1), ((7, 4, 5), 2), ((7, 5, 3, 3), 1), ((7, 3, 3, 5), 3), ((7, 3, 3, 3), 1)],
)
def test_standardised_features_have_mean_0_and_variance_1_in_each_channel(shape, axis):
    features = 3 + 5 * noise(*shape, dtype=torch.double)
    rows = standardised(features).movedim(axis, 0).flatten(1)
    reference = features.movedim(axis, 0).flatten(1)
    slow = torch.stack(
        [
            (row - row.mean())
            / (row.var(correction=0) + 1e-3 * reference.var(1, correction=0).mean()).sqrt()
            for row in reference
        ]
    )
    torch.testing.assert_close(rows, slow)
    assert rows.mean(1).abs().max() < 1e-12
    assert (rows.var(1, correction=0) - 1).abs().max() < 0.01


def test_the_proportions_of_the_image_tell_maps_apart():
    features = noise(7, 4, 4, 6, dtype=torch.double)
    seen = standardised(features, (3, 32, 48))  # 4 channels of 4×6, as high and wide as the image
    assert seen.mean((0, 2, 3)).abs().max() < 1e-12
    assert seen.mean((0, 1, 2)).abs().max() > 1e-3
    assert standardised(features).mean((0, 1, 2)).abs().max() < 1e-12  # 6 channels of 4×4


def test_neither_scale_nor_shift_of_features_can_be_seen():
    features = noise(6, 4, 3, 3, dtype=torch.double)
    seen = standardised(features)
    for other in (1e3 * features, 1e-3 * features, features - 7):
        torch.testing.assert_close(standardised(other), seen, rtol=1e-5, atol=1e-5)
    by_channel = torch.tensor([1.0, 2.0, 5.0, 0.5], dtype=torch.double).reshape(1, 4, 1, 1)
    torch.testing.assert_close(standardised(by_channel * features), seen, rtol=0.02, atol=0.02)
    # So there is nothing to win: a loss of them has no slope along the scale.
    scale = torch.ones((), dtype=torch.double, requires_grad=True)
    standardised(scale * features).pow(3).sum().backward()
    assert scale.grad.abs() < 1e-9


def test_a_faint_channel_stays_faint_and_a_dead_one_stays_zero():
    features = noise(50, 3, dtype=torch.double) * torch.tensor([1.0, 1e-6, 0.0], dtype=torch.double)
    seen = standardised(features.requires_grad_())
    assert seen[:, 1].abs().max() < 1e-3
    assert not seen[:, 2].any()
    (slope,) = torch.autograd.grad(seen.sum(1).square().sum(), features)
    assert slope.isfinite().all()
    assert standardised(torch.full((3, 2), 4.0)).eq(0).all()


def test_gradients_of_standardised_features():
    assert torch.autograd.gradcheck(
        standardised, noise(4, 3, 2, 2, dtype=torch.double).requires_grad_()
    )


def test_the_two_pixel_distances():
    made, images = random_images(2, 3, 4, 4), random_images(2, 3, 4, 4, seed=1)
    slow = sum(
        (a - b) ** 2
        for a, b in zip(made.flatten().tolist(), images.flatten().tolist(), strict=True)
    )
    assert pixel_distance(made, images, "mean_square").item() == pytest.approx(slow / 96, rel=1e-5)
    assert pixel_distance(made, images, "batch_norm").item() == pytest.approx(
        math.sqrt(slow), rel=1e-5
    )
    same = made.clone().requires_grad_()
    pixel_distance(same, made, "batch_norm").backward()
    assert same.grad.isfinite().all()


def perceptual():
    network = a_target()
    network.module.eval().requires_grad_(False)
    return replace(network, taps=("0", "2"))


def test_the_decoders_loss_is_the_sum_of_its_parts():
    features, images = noise(3, 5), random_images(3, *SHAPE)
    with seeded(0):
        decoder = nn.Sequential(nn.Linear(5, 768), nn.Sigmoid(), nn.Unflatten(1, SHAPE))
        critic = nn.Sequential(nn.Flatten(), nn.Linear(768, 1))
    made = decoder(features)
    loss = decoder_loss(
        made,
        images,
        adversarial=0.3,
        perceptual_weight=2.0,
        critic=critic,
        perceptual=perceptual(),
        norm="mean_square",
    )
    likes = torch.sigmoid(critic(made))
    slow = (
        (made - images).square().mean()
        - 0.3 * likes.log().mean()
        + 2 * perceptual_distance(perceptual(), made, images).mean()
    )
    torch.testing.assert_close(loss, slow)
    assert torch.equal(decoder_loss(made, images), F.mse_loss(made, images))


def test_a_weight_needs_its_network():
    with pytest.raises(ConfigError, match="with an adversarial weight needs a critic, got none"):
        decoder_loss(noise(2, 4), noise(2, 4), adversarial=0.1)
    with pytest.raises(
        ConfigError,
        match=r"needs a perceptual network, got none: pass perceptual=\.\.\.",
    ):
        decoder_loss(noise(2, 4), noise(2, 4), perceptual_weight=0.1)


def test_the_critic_pulls_against_the_decoder():
    """The loss is least if real images get large logits and reconstructions small ones.

    As printed in the paper it would be the other way round.
    """
    critic = nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(critic[1].weight, 2.0)
    real, made = torch.full((3, 1, 1, 1), 1.5), torch.full((3, 1, 1, 1), -0.5).requires_grad_()
    loss = critic_loss(critic, real, made)
    assert loss.item() == pytest.approx(
        -math.log(1 / (1 + math.exp(-3.0))) - math.log(1 - 1 / (1 + math.exp(1.0))), rel=1e-5
    )
    assert loss < critic_loss(critic, made.detach(), real)
    loss.backward()
    assert made.grad is None  # nothing of it reaches the decoder
    assert critic[1].weight.grad.item() < 0  # a larger weight tells them apart better
    # The decoder moves its images to where the critic accepts them.
    mover = nn.Parameter(torch.full((3, 1, 1, 1), -0.5))
    decoder_loss(mover, mover.detach(), adversarial=1.0, critic=critic).backward()
    assert (mover.grad < 0).all()


def game(**more):
    with seeded(0):
        return DecoderGame((4, 4, 4), (3, 16, 16), width=4, lr=1e-2, **more)


def played(some, turns, start=0):
    """Steps on features that are the images at a quarter of their size."""
    for turn in range(start, start + turns):
        images = F.interpolate(random_images(8, 3, 4, 4, seed=turn), scale_factor=4)
        features = torch.cat([images[:, :, ::4, ::4], images[:, :1, ::4, ::4]], 1)
        yield some.step(standardised(features), images)


def test_it_learns():
    losses = list(played(game(), 150))
    guess = 1 / 12  # the error of the best image that knows no feature
    assert losses[0] > 0.9 * guess
    assert sum(losses[-10:]) / 10 < 0.4 * guess


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"adversarial": 0.1},
        {"perceptual_weight": 0.5, "perceptual": perceptual()},
        {"norm": "batch_norm"},
    ],
)
def test_it_resumes_from_a_checkpoint_with_the_same_weights(more):
    whole, killed, resumed = (game(**more) for _ in range(3))
    list(played(whole, 4))
    list(played(killed, 2))
    resumed.restore({name: tensor.clone() for name, tensor in killed.tensors().items()})
    list(played(resumed, 2, start=2))
    assert same_weights(whole.decoder, resumed.decoder)
    assert not same_weights(whole.decoder, killed.decoder)
    assert (whole.critic is None) == ("adversarial" not in more)
    assert whole.critic is None or same_weights(whole.critic, resumed.critic)


def test_it_is_frozen_between_its_steps():
    some = game(adversarial=0.1)
    list(played(some, 2))
    for network in (some.decoder, some.critic):
        assert not any(part.training for part in network.modules())
        assert not any(weight.requires_grad for weight in network.parameters())
    before = {name: tensor.clone() for name, tensor in some.tensors().items()}
    features = noise(5, 4, 4, 4).requires_grad_()
    some.decoder(features).sum().backward()
    assert features.grad.abs().sum() > 0
    after = some.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_loss_that_is_not_finite_is_an_error():
    some = game()
    with pytest.raises(
        RunError,
        match=r"expected a finite loss of the decoder .* got nan: lower its learning rate",
    ):
        some.step(torch.full((2, 4, 4, 4), float("nan")), random_images(2, 3, 16, 16))


def test_a_critic_needs_images_of_a_minimal_size():
    with pytest.raises(
        ConfigError,
        match=r"a decoder's critic needs images of at least 8 pixels a side, got \(3, 6, 16\)",
    ):
        DecoderGame((4,), (3, 6, 16), width=2, adversarial=0.1)
    for side in (8, 12, 50):
        some = DecoderGame((4,), (3, side, side + 3), width=2, adversarial=0.1)
        assert math.isfinite(some.step(noise(2, 4), random_images(2, 3, side, side + 3)))
