"""StyleGAN2's generator against slow direct forms, and block by block."""

import math

import pytest
import torch

from frostglass.core.errors import ConfigError
from frostglass.networks.stylegan2.network import (
    StyledConv,
    StyleGenerator,
    StyleSettings,
    doubled,
    low_passed,
    modulated,
)
from frostglass.runtime.seeding import seeded
from slow_styles import (
    SMALL,
    drawn,
    network,
    slow_filter,
    slow_images,
    slow_modulated,
    vars_of,
)

# Parts


def test_low_pass_and_doubling_are_zero_insertion_and_convolution():
    maps = drawn(2, 3, 5, 6)
    assert torch.allclose(
        low_passed(maps, pad=1, gain=3.0), slow_filter(maps, pads=(1, 1), gain=3.0), atol=1e-12
    )
    assert torch.allclose(
        low_passed(maps, pad=1, stride=2), slow_filter(maps, pads=(1, 1), down=2), atol=1e-12
    )
    assert torch.allclose(doubled(maps), slow_filter(maps, up=2, pads=(2, 1), gain=4.0), atol=1e-12)
    assert torch.allclose(doubled(torch.ones(1, 1, 6, 6))[:, :, 2:-2, 2:-2], torch.ones(1, 1, 8, 8))


@pytest.mark.parametrize(("kernel", "up"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("demodulate", [False, True])
def test_modulated_convolution(kernel, up, demodulate):
    maps, weight, styles = (
        drawn(3, 4, 5, 5),
        drawn(2, 4, kernel, kernel, seed=1),
        drawn(3, 4, seed=2),
    )
    found = modulated(maps, weight, styles, up=up, demodulate=demodulate)
    assert found.shape == ((3, 2, 10, 10) if up else (3, 2, 5, 5))
    assert torch.allclose(
        found, slow_modulated(maps, weight, styles, up=up, demodulate=demodulate), atol=1e-12
    )


def test_demodulation_forgets_the_scale_of_a_style():
    maps, weight, styles = drawn(2, 4, 5, 5), drawn(3, 4, 3, 3, seed=1), drawn(2, 4, seed=2)
    assert torch.allclose(
        modulated(maps, weight, styles), modulated(maps, weight, 7 * styles), atol=1e-7
    )
    assert not torch.allclose(
        modulated(maps, weight, styles, demodulate=False),
        modulated(maps, weight, 7 * styles, demodulate=False),
    )


# The whole generator


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_images_match_the_slow_form(colours, clamp):
    made = network(
        StyleGenerator, StyleSettings(**{**vars_of(SMALL), "colours": colours, "clamp": clamp})
    )
    z = drawn(3, 5)
    convs = [part for part in made.modules() if isinstance(part, StyledConv)]
    noises = [part.noise_const for part in convs]
    expected = slow_images(made, z, noises, math.inf if clamp is None else clamp)
    assert expected.shape == (3, colours, 16, 16)
    assert torch.allclose(made(z), expected, atol=1e-10)
    none = slow_images(
        made, z, [torch.zeros_like(noise) for noise in noises], math.inf if clamp is None else clamp
    )
    assert torch.allclose(made(z, noise="none"), none, atol=1e-10)
    assert not torch.allclose(none, expected, atol=1e-3)


def test_the_clamp_bounds_maps_and_what_a_block_paints():
    made = network(StyleGenerator, StyleSettings(**{**vars_of(SMALL), "clamp": 0.25}))
    ws = made.mapping(drawn(3, 5))
    maps, rgb = made.synthesis.begin(ws)
    maps, rgb = made.synthesis.run(ws, features=maps, rgb=rgb, to_block=1)
    assert maps.abs().max() == rgb.abs().max() == 0.25


def test_random_noise_comes_from_what_is_given():
    made, z = network(StyleGenerator, SMALL), drawn(2, 5)
    sizes = [4, 8, 8, 16, 16]
    rng = torch.Generator().manual_seed(3)
    noises = [torch.randn(2, 1, size, size, generator=rng).double() for size in sizes]
    state = torch.random.get_rng_state()
    by_rng = made(z, noise=torch.Generator().manual_seed(3))
    assert torch.equal(by_rng, made(z, noise=noises))
    assert torch.allclose(by_rng, slow_images(made, z, noises), atol=1e-10)
    assert not torch.allclose(by_rng, made(z, noise=torch.Generator().manual_seed(4)), atol=1e-3)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(
        ConfigError,
        match=r"expected 'const', 'none', a torch\.Generator or a tensor for .* got 'random'",
    ):
        made(z, noise="random")


def test_rows_are_independent():
    made, z = network(StyleGenerator, SMALL), drawn(4, 5)
    assert torch.allclose(made(z)[1:2], made(z[1:2]), atol=1e-12)


def test_truncation_draws_styles_towards_the_mean():
    made, z = network(StyleGenerator, SMALL), drawn(4, 5)
    w, mean = made.mapping.w(z), made.mapping.w_avg
    assert made.mapping(z).shape == (4, SMALL.num_ws, 6)
    assert torch.equal(made.mapping(z), w[:, None].expand(-1, SMALL.num_ws, -1))
    half = mean + 0.5 * (w - mean)
    assert torch.allclose(
        made.mapping(z, truncation=0.5), half[:, None].expand(-1, SMALL.num_ws, -1), atol=1e-12
    )
    some = made.mapping(z, truncation=0.5, cutoff=2)
    assert torch.allclose(some[:, :2], half[:, None].expand(-1, 2, -1), atol=1e-12)
    assert torch.equal(some[:, 2:], made.mapping(z)[:, 2:])
    assert torch.allclose(
        made.mapping(z, truncation=0.0), mean.expand(4, SMALL.num_ws, -1), atol=1e-12
    )
    assert torch.equal(made(z, truncation=0.5, cutoff=2), made.synthesis(some))


def test_the_mapping_looks_only_at_directions():
    mapping, z = network(StyleGenerator, SMALL).mapping, drawn(4, 5)
    assert torch.allclose(mapping.w(z), mapping.w(30 * z), atol=1e-7)


def test_the_mean_style_follows_only_when_asked():
    mapping = network(StyleGenerator, SMALL).mapping.train()
    before, w = mapping.w_avg.clone(), mapping.w(drawn(8, 5))
    assert torch.equal(mapping.w_avg, before)
    mapping.follow(w, decay=0.9)
    assert torch.allclose(mapping.w_avg, 0.9 * before + 0.1 * w.mean(0), atol=1e-12)
    assert not mapping.w_avg.requires_grad


# Block by block


def test_a_synthesis_can_be_left_and_entered_at_every_block():
    made = network(StyleGenerator, SMALL)
    synthesis, ws = made.synthesis, drawn(2, SMALL.num_ws, 6)  # a style of its own for each layer
    whole = synthesis(ws)
    maps, rgb = synthesis.begin(ws)
    assert rgb is None
    assert torch.equal(maps, synthesis.const.expand(2, -1, -1, -1))
    for block in range(1, 3):
        maps, rgb = synthesis.run(ws, features=maps, rgb=rgb, from_block=block - 1, to_block=block)
        assert maps.shape == (2, SMALL.width(2 ** (block + 1)), 2 ** (block + 1), 2 ** (block + 1))
        assert torch.allclose(
            synthesis.run(ws, features=maps, rgb=rgb, from_block=block)[1], whole, atol=1e-12
        )


def test_the_published_way_to_enter_a_block_drops_the_image():
    synthesis, ws = network(StyleGenerator, SMALL).synthesis, drawn(2, SMALL.num_ws, 6)
    maps, rgb = synthesis.begin(ws)
    maps, rgb = synthesis.run(ws, features=maps, rgb=rgb, to_block=1)
    carried = synthesis.run(ws, features=maps, rgb=rgb, from_block=1)[1]
    dropped = synthesis.run(ws, features=maps, rgb=rgb, from_block=1, carry_rgb=False)[1]
    assert torch.equal(dropped, synthesis.run(ws, features=maps, from_block=1, carry_rgb=False)[1])
    assert torch.allclose(
        carried - dropped,
        slow_filter(slow_filter(rgb, up=2, pads=(2, 1), gain=4.0), up=2, pads=(2, 1), gain=4.0),
        atol=1e-12,
    )
    assert (carried - dropped).abs().max() > 0.1


def test_each_layer_reads_its_own_style():
    """conv1 of block 0 reads style 0, block i reads 2i-1, 2i; colours read the next style."""
    synthesis, ws = network(StyleGenerator, SMALL).synthesis, drawn(1, SMALL.num_ws, 6)
    maps, rgb = synthesis.begin(ws)
    steps = [(maps, rgb)]
    for block in range(3):
        steps.append(
            synthesis.run(
                ws, features=steps[-1][0], rgb=steps[-1][1], from_block=block, to_block=block + 1
            )
        )
    for block, (reads_maps, reads_rgb) in enumerate(
        [([0], [0, 1]), ([1, 2], [1, 2, 3]), ([3, 4], [3, 4, 5])]
    ):
        for layer in range(SMALL.num_ws):
            other = ws.clone()
            other[:, layer] += 1
            found = synthesis.run(
                other,
                features=steps[block][0],
                rgb=steps[block][1],
                from_block=block,
                to_block=block + 1,
            )
            assert torch.equal(found[0], steps[block + 1][0]) is (layer not in reads_maps)
            assert torch.equal(found[1], steps[block + 1][1]) is (layer not in reads_rgb)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"from_block": 2, "to_block": 2},
            "expected 0 <= from_block < to_block <= 3, got 2 and 2",
        ),
        ({"to_block": 4}, "to_block <= 3, got 1 and 4"),
        (
            {"ws": torch.zeros(2, 5, 6)},
            r"ws for block 1: expected shape \(2, 6, 6\), got \(2, 5, 6\)",
        ),
        (
            {"features": torch.zeros(2, 7, 8, 8)},
            r"features for block 1: expected shape \(2, 7, 4, 4\), got \(2, 7, 8, 8\)",
        ),
        (
            {"features": torch.zeros(1, 7, 4, 4)},
            r"features for block 1: expected shape \(2, 7, 4, 4\), got \(1, 7, 4, 4\)",
        ),
        (
            {"rgb": torch.zeros(2, 1, 4, 4)},
            r"rgb for block 1: expected shape \(2, 3, 4, 4\), got \(2, 1, 4, 4\)",
        ),
        (
            {"rgb": None},
            "block 1 needs rgb, the image so far, got none: pass it, or carry_rgb=False",
        ),
        ({"from_block": 0}, "block 0 starts the image: expected no rgb, got one"),
    ],
)
def test_what_does_not_fit_a_block_is_refused(change, message):
    with seeded(0, "tests"):
        synthesis = StyleGenerator(SMALL).synthesis
    given = {
        "ws": torch.zeros(2, 6, 6),
        "features": torch.zeros(2, 7, 4, 4),
        "rgb": torch.zeros(2, 3, 4, 4),
        "from_block": 1,
    }
    synthesis.run(**given)
    with pytest.raises(ConfigError, match=message):
        synthesis.run(**{**given, **change})
