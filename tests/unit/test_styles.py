"""StyleGAN2's networks against slow direct forms, published layer sizes, and block by block."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.networks.stylegan2.network import (
    StyleCritic,
    StyledConv,
    StyleGenerator,
    StyleSettings,
    SynthesisBlock,
    ToColours,
    doubled,
    low_passed,
    modulated,
)
from frostglass.runtime.seeding import generator_for, seeded

SMALL = StyleSettings(
    resolution=16, z_dim=5, w_dim=6, layers=2, channel_base=64, channel_max=7
)  # widths 7, 7, 4
TINY = StyleSettings(
    resolution=8, colours=1, z_dim=3, w_dim=3, layers=1, channel_base=16, channel_max=3
)  # widths 3, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(kind, settings: StyleSettings):
    """A network in double precision whose every tensor matters: what is initialised as zero or one is drawn, too."""
    with seeded(0, "tests", "styles"):
        made = kind(settings).double()
    for number, tensor in enumerate(made.state_dict().values()):
        if tensor.ndim < 2:
            tensor.add_(0.5 * drawn(*tensor.shape, seed=number))
    return made


# The slow forms: one row, one channel at a time, zeros written out.


def slow_filter(
    maps: Tensor, *, up: int = 1, down: int = 1, pads: tuple[int, int] = (0, 0), gain: float = 1.0
) -> Tensor:
    """Insert zeros behind each pixel, pad, convolve each map with the 4×4 kernel, keep every `down`-th pixel."""
    kernel = (
        torch.tensor([[a * b for a in (1, 3, 3, 1)] for b in (1, 3, 3, 1)], dtype=maps.dtype)
        / 64
        * gain
    )
    height, width = maps.shape[2:]
    stuffed = maps.new_zeros(*maps.shape[:2], height * up, width * up)
    stuffed[:, :, ::up, ::up] = maps
    padded = maps.new_zeros(*maps.shape[:2], height * up + sum(pads), width * up + sum(pads))
    padded[:, :, pads[0] : pads[0] + height * up, pads[0] : pads[0] + width * up] = stuffed
    rows = [
        [F.conv2d(one[None, None], kernel.flip(0, 1)[None, None])[0, 0] for one in row]
        for row in padded
    ]
    return torch.stack([torch.stack(row) for row in rows])[:, :, ::down, ::down]


def slow_modulated(
    maps: Tensor, weight: Tensor, styles: Tensor, *, up: bool = False, demodulate: bool = True
) -> Tensor:
    """Each row with kernels of its own, made by the paper's two formulas."""
    rows = []
    for row, style in zip(maps, styles, strict=True):
        own = weight * style[None, :, None, None]
        if demodulate:
            own = torch.stack([kernel / (kernel.square().sum() + 1e-8).sqrt() for kernel in own])
        if up:  # doubled first, then convolved in the strict sense of the word: with the mirrored kernel
            rows.append(
                F.conv2d(slow_filter(row[None], up=2, pads=(3, 2), gain=4.0), own.flip(2, 3))
            )
        else:
            rows.append(F.conv2d(row[None], own, padding=weight.shape[-1] // 2))
    return torch.cat(rows)


def slow_bent(maps: Tensor, clamp: float = math.inf) -> Tensor:
    return (torch.where(maps > 0, maps, 0.2 * maps) * math.sqrt(2)).clamp(-clamp, clamp)


def slow_dense(state: dict[str, Tensor], name: str, rows: Tensor, rate: float = 1.0) -> Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return rows @ (weight * rate / math.sqrt(weight.shape[1])).t() + bias * rate


def slow_pictures(
    made: StyleGenerator, z: Tensor, noises: list[Tensor], clamp: float = math.inf
) -> Tensor:
    """The whole generator from its tensors alone."""
    state = made.state_dict()
    w = z / (z.square().mean(1, keepdim=True) + 1e-8).sqrt()
    for layer in range(made.settings.layers):
        w = slow_bent(slow_dense(state, f"mapping.layers.{layer}", w, 0.01))

    def conv(name: str, maps: Tensor, noise: Tensor, up: bool) -> Tensor:
        maps = slow_modulated(
            maps, state[f"{name}.weight"], slow_dense(state, f"{name}.affine", w), up=up
        )
        return slow_bent(
            maps
            + noise * state[f"{name}.noise_strength"]
            + state[f"{name}.bias"].view(1, -1, 1, 1),
            clamp,
        )

    maps, rgb = state["synthesis.const"].expand(len(z), -1, -1, -1), None
    for block in range(len(made.settings.sizes)):
        name = f"synthesis.blocks.{block}"
        if block:
            maps = conv(f"{name}.conv0", maps, noises[2 * block - 1], up=True)
        maps = conv(f"{name}.conv1", maps, noises[2 * block], up=False)
        style = slow_dense(state, f"{name}.torgb.affine", w) / math.sqrt(maps.shape[1])
        added = slow_modulated(maps, state[f"{name}.torgb.weight"], style, demodulate=False)
        added = (added + state[f"{name}.torgb.bias"].view(1, -1, 1, 1)).clamp(-clamp, clamp)
        rgb = added if rgb is None else slow_filter(rgb, up=2, pads=(2, 1), gain=4.0) + added
    assert rgb is not None
    return rgb


def slow_opinion(made: StyleCritic, images: Tensor, group: int, clamp: float) -> Tensor:
    """The critic from its tensors alone, where sizes are halved after the convolution and not before."""
    state = made.state_dict()

    def conv(name: str, maps: Tensor, down: bool = False) -> Tensor:
        weight = state[f"{name}.weight"]
        weight = weight / math.sqrt(weight[0].numel())
        pad = weight.shape[-1] // 2 + down
        maps = F.conv2d(F.pad(maps, (pad, pad, pad, pad)), weight)
        return slow_filter(maps, down=2) if down else maps

    def bent(name: str, maps: Tensor, down: bool = False) -> Tensor:
        return slow_bent(conv(name, maps, down) + state[f"{name}.bias"].view(1, -1, 1, 1), clamp)

    maps = bent("fromrgb", images)
    for block in range(len(made.blocks)):
        inner = bent(f"blocks.{block}.conv1", bent(f"blocks.{block}.conv0", maps), down=True)
        maps = (inner + conv(f"blocks.{block}.skip", maps, down=True)) / math.sqrt(2)
    groups = len(maps) // group
    spread = torch.empty(len(maps), 1, 4, 4, dtype=maps.dtype)
    for first in range(groups):
        members = maps[first::groups]
        spread[first::groups] = ((members - members.mean(0)).square().mean(0) + 1e-8).sqrt().mean()
    maps = bent("conv", torch.cat([maps, spread], dim=1))
    return slow_dense(state, "out", slow_bent(slow_dense(state, "fc", maps.flatten(1))))


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
def test_pictures_are_those_of_the_slow_form(colours, clamp):
    made = network(
        StyleGenerator, StyleSettings(**{**vars_of(SMALL), "colours": colours, "clamp": clamp})
    )
    z = drawn(3, 5)
    convs = [part for part in made.modules() if isinstance(part, StyledConv)]
    noises = [part.noise_const for part in convs]
    expected = slow_pictures(made, z, noises, math.inf if clamp is None else clamp)
    assert expected.shape == (3, colours, 16, 16)
    assert torch.allclose(made(z), expected, atol=1e-10)
    none = slow_pictures(
        made, z, [torch.zeros_like(noise) for noise in noises], math.inf if clamp is None else clamp
    )
    assert torch.allclose(made(z, noise="none"), none, atol=1e-10)
    assert not torch.allclose(none, expected, atol=1e-3)


def vars_of(settings: StyleSettings) -> dict:
    return {name: getattr(settings, name) for name in StyleSettings.__dataclass_fields__}


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
    by_dice = made(z, noise=torch.Generator().manual_seed(3))
    assert torch.equal(by_dice, made(z, noise=noises))
    assert torch.allclose(by_dice, slow_pictures(made, z, noises), atol=1e-10)
    assert not torch.allclose(by_dice, made(z, noise=torch.Generator().manual_seed(4)), atol=1e-3)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(
        ConfigError,
        match=r"noise: expected 'const', 'none', a torch\.Generator or a tensor for each convolution, got 'random'",
    ):
        made(z, noise="random")


def test_rows_do_not_touch_each_other():
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


def test_the_published_way_to_enter_a_block_forgets_the_picture():
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
    """conv1 of block 0 reads style 0; block i reads 2i-1, 2i; a block paints with the style after its last convolution."""
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
            "blocks 2 to 2 cannot be run: expected 0 <= from_block < to_block <= 3",
        ),
        ({"to_block": 4}, "blocks 1 to 4 cannot be run"),
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
            "the picture that enters block 1 is missing: give it, or carry_rgb=False to begin a new one",
        ),
        ({"from_block": 0}, "the picture that enters block 0 is made by it and cannot be given"),
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
def test_opinions_are_those_of_the_slow_form(rows, group, clamp):
    critic, images = (
        network(StyleCritic, StyleSettings(**{**vars_of(SMALL), "clamp": clamp})),
        drawn(rows, 3, 16, 16),
    )
    found = critic(images)
    assert found.shape == (rows, 1)
    assert torch.allclose(
        found, slow_opinion(critic, images, group, math.inf if clamp is None else clamp), atol=1e-10
    )


def test_the_critic_refuses_rows_without_a_group():
    with (
        seeded(0, "tests"),
        pytest.raises(
            ConfigError,
            match="groups of 4 pictures: expected a multiple of it \\(or fewer\\), got 6",
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
def test_every_resolution_makes_pictures_of_its_size(size):
    with torch.device("meta"):
        generator, critic = (
            StyleGenerator(StyleSettings(resolution=size)),
            StyleCritic(StyleSettings(resolution=size)),
        )
        pictures = generator(torch.empty(2, 512))
        assert pictures.shape == (2, 3, size, size)
        assert critic(pictures).shape == (2, 1)


def parameters_of(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("wide", "narrow", "size", "up", "count"),
    [(512, 512, 64, False, 2622465), (512, 256, 128, True, 1442561), (256, 256, 128, False, 721409), (256, 128, 256, True, 426369), (128, 128, 256, False, 213249)],
)  # fmt: skip
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
    """1024 pixels, two mapping layers. NVIDIA's buffers also hold a 4×4 filter in each of the 17 convolutions and 9 blocks."""
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
    judge = 3 * widths[size] + widths[size] + (513 * 512 * 9 + 512) + (512 * 16 * 512 + 512) + 513
    judge += sum(
        w * w * 9 + w + w * widths[s // 2] * 9 + widths[s // 2] + w * widths[s // 2]
        for s, w in widths.items()
        if s > 4
    )
    with torch.device("meta"):
        generator, critic = StyleGenerator(settings), StyleCritic(settings)
    assert (parameters_of(generator), parameters_of(critic)) == (total, judge)


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
def test_settings_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        StyleSettings(**given)


def test_a_fresh_network_keeps_the_scale_of_its_signals():
    """What the gains are for: whatever the widths, maps have about unit mean square, and pictures do not explode."""
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
