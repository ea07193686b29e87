"""StyleGAN2's gradients and critic, and published layer sizes."""

import math

import pytest
import torch

from frostglass.core.errors import ConfigError
from frostglass.networks.stylegan2.critic import StyleCritic
from frostglass.networks.stylegan2.network import (
    StyledConv,
    StyleGenerator,
    StyleSettings,
    SynthesisBlock,
    ToColours,
)
from frostglass.runtime.seeding import generator_for, seeded
from slow_styles import (
    SMALL,
    TINY,
    drawn,
    network,
    slow_critic,
    vars_of,
)

# Gradients


def test_gradients_of_the_generator():
    made = network(StyleGenerator, TINY).requires_grad_(False)
    assert torch.autograd.gradcheck(lambda z: made(z, truncation=0.7), drawn(2, 3).requires_grad_())
    names, values = zip(
        *((name, value.clone().requires_grad_()) for name, value in made.named_parameters()),
        strict=True,
    )
    z = drawn(2, 3)
    assert torch.autograd.gradcheck(
        lambda *given: torch.func.functional_call(made, dict(zip(names, given, strict=True)), z),
        values,
    )


def test_gradients_reach_the_maps_between_blocks():
    synthesis, ws = network(StyleGenerator, TINY).synthesis.requires_grad_(False), drawn(2, 4, 3)
    maps, rgb = synthesis.begin(ws)
    maps, rgb = synthesis.run(ws, features=maps, rgb=rgb, to_block=1)
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (ws, maps, rgb)]
    assert torch.autograd.gradcheck(
        lambda w, m, r: synthesis.run(w, features=m, rgb=r, from_block=1)[1], inputs
    )


def test_second_gradients_of_the_critic_exist_and_are_right():
    """R1 needs them."""
    critic = network(StyleCritic, TINY).requires_grad_(False)
    images = drawn(2, 1, 8, 8).requires_grad_()
    assert torch.autograd.gradcheck(critic, images)
    assert torch.autograd.gradgradcheck(
        lambda part: critic(torch.cat([part, images[:, :, 1:]], dim=2)),
        drawn(2, 1, 1, 8, seed=5).requires_grad_(),
    )


# The critic


@pytest.mark.parametrize(
    ("rows", "group", "clamp"), [(8, 4, None), (4, 4, 0.5), (2, 2, None), (1, 1, None)]
)
def test_the_critic_matches_the_slow_form(rows, group, clamp):
    critic, images = (
        network(StyleCritic, StyleSettings(**{**vars_of(SMALL), "clamp": clamp})),
        drawn(rows, 3, 16, 16),
    )
    found = critic(images)
    assert found.shape == (rows, 1)
    assert torch.allclose(
        found, slow_critic(critic, images, group, math.inf if clamp is None else clamp), atol=1e-10
    )


def test_the_critic_refuses_rows_without_a_group():
    with (
        seeded(0, "tests"),
        pytest.raises(
            ConfigError,
            match="groups of 4 images: expected a multiple of it \\(or fewer\\), got 6",
        ),
    ):
        StyleCritic(SMALL)(torch.zeros(6, 3, 16, 16))


# Sizes


def test_number_of_styles():
    counts = {
        size: StyleSettings(resolution=size).num_ws for size in (8, 16, 32, 64, 128, 256, 512, 1024)
    }
    assert counts == {size: 2 * int(math.log2(size)) - 2 for size in counts}
    assert [counts[size] for size in (64, 256, 512, 1024)] == [10, 14, 16, 18]


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
def test_every_resolution_makes_images_of_its_size(size):
    with torch.device("meta"):
        generator, critic = (
            StyleGenerator(StyleSettings(resolution=size)),
            StyleCritic(StyleSettings(resolution=size)),
        )
        images = generator(torch.empty(2, 512))
        assert images.shape == (2, 3, size, size)
        assert critic(images).shape == (2, 1)


def parameters_of(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("wide", "narrow", "size", "up", "count"),
    [
        (512, 512, 64, False, 2622465),
        (512, 256, 128, True, 1442561),
        (256, 256, 128, False, 721409),
        (256, 128, 256, True, 426369),
        (128, 128, 256, False, 213249),
    ],
)
def test_layers_have_as_many_parameters_as_in_the_published_training_logs(
    wide, narrow, size, up, count
):
    """out·in·9 weights, out biases, a noise strength, and in·(512 + 1) for the style."""
    with torch.device("meta"):
        assert (
            parameters_of(StyledConv(wide, narrow, size, 0, StyleSettings(resolution=1024), up=up))
            == count
        )
    assert count == narrow * wide * 9 + narrow + 1 + wide * 513


@pytest.mark.parametrize(("width", "count"), [(512, 264195), (256, 132099), (128, 66051)])
def test_colours_have_as_many_parameters_as_in_the_published_training_logs(width, count):
    with torch.device("meta"):
        assert parameters_of(ToColours(width, StyleSettings(resolution=1024))) == count
    assert count == 3 * width + 3 + width * 513


def test_whole_networks_have_as_many_parameters_as_in_a_published_training_log():
    """1024 pixels, two mapping layers.

    NVIDIA's buffers also hold a 4×4 filter in each of the 17 convolutions and 9 blocks.
    """
    settings = StyleSettings(resolution=1024, layers=2)
    with torch.device("meta"):
        generator, critic = StyleGenerator(settings), StyleCritic(settings)
    assert (parameters_of(generator), parameters_of(critic)) == (28794124, 29012513)
    assert sum(buffer.numel() for buffer in generator.buffers()) == 2797104 - (17 + 9) * 16


@pytest.mark.parametrize(
    ("size", "base", "layers"), [(64, 16384, 2), (256, 16384, 8), (512, 32768, 8), (1024, 32768, 8)]
)
def test_parameters_of_whole_networks_by_hand(size, base, layers):
    settings = StyleSettings(resolution=size, channel_base=base, layers=layers)
    widths = {
        side: min(base // side, 512)
        for side in (4, 8, 16, 32, 64, 128, 256, 512, 1024)
        if side <= size
    }
    total = layers * 512 * 513 + 512 * 16  # mapping and constant
    for side, width in widths.items():
        inputs = ([widths[side // 2]] if side > 4 else []) + [width]
        total += (
            sum(width * one * 9 + width + 1 + one * 513 for one in inputs)
            + 3 * width
            + 3
            + width * 513
        )
    discriminator = (
        3 * widths[size] + widths[size] + (513 * 512 * 9 + 512) + (512 * 16 * 512 + 512) + 513
    )
    discriminator += sum(
        w * w * 9 + w + w * widths[s // 2] * 9 + widths[s // 2] + w * widths[s // 2]
        for s, w in widths.items()
        if s > 4
    )
    with torch.device("meta"):
        generator, critic = StyleGenerator(settings), StyleCritic(settings)
    assert (parameters_of(generator), parameters_of(critic)) == (total, discriminator)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resolution": 48}, "resolution: expected a power of two, got 48"),
        ({"resolution": 4}, "resolution: expected at least 8"),
        ({"resolution": 2048}, "resolution: expected at most 1024"),
        ({"resolution": 64, "colours": 2}, "colours: expected 1 or 3"),
        (
            {"resolution": 64, "channel_base": 32},
            "channel_base: 32 leaves no channel at 64 pixels: raise it",
        ),
        ({"resolution": 64, "clamp": math.inf}, "clamp: expected a finite number"),
    ],
)
def test_invalid_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        StyleSettings(**given)


def test_a_fresh_network_keeps_the_scale_of_its_signals():
    """Because of the gains, maps of any width have about unit mean square."""
    settings = StyleSettings(
        resolution=64, z_dim=64, w_dim=64, layers=8, channel_base=1024, channel_max=64
    )
    with seeded(0, "tests", "scale"):
        made = StyleGenerator(settings).eval()
    with torch.no_grad():
        ws = made.mapping(torch.randn(16, 64, generator=generator_for(0, "z")))
        assert 0.5 < ws.square().mean().sqrt() < 2
        maps, rgb = made.synthesis.begin(ws)
        maps, rgb = made.synthesis.run(ws, features=maps, rgb=rgb)
    assert 0.25 < maps.square().mean().sqrt() < 4
    assert 0.5 < rgb.square().mean().sqrt() < 8
    assert rgb.is_contiguous()
    assert isinstance(made.synthesis.blocks[0], SynthesisBlock)
    assert not hasattr(made.synthesis.blocks[0], "conv0")
