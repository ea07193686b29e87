"""The StyleGAN2 prior: losses by hand, resuming, files, memory budget, refusals."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import KIND
from frostglass.priors._diffaugment import changed
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.stylegan2 import (
    Stylegan2,
    StyleImages,
    image_bytes,
    path_length_variance,
    squared_gradient,
)
from frostglass.runtime.seeding import seeded
from frostglass.store.files import write_tensors
from worlds import PUBLIC, KilledError, MemoryWork, NoWork, images, rng, same_weights

SMALL = Stylegan2(
    latent=6,
    style=5,
    channel_base=64,
    channel_max=8,
    steps=6,
    batch=8,
    checkpoint_every=2,
    average=0.5,
    r1_every=2,
    path=1.0,
    path_every=2,
)


@pytest.fixture
def weights(tmp_path):
    """A file as `frostglass convert stylegan2` writes it, of 32 pixels and random weights."""
    made = StyleSettings(
        resolution=32, z_dim=6, w_dim=5, layers=3, channel_base=128, channel_max=8, clamp=256.0
    )
    with seeded(3, "tests"):
        network = StyleGenerator(made)
    path = tmp_path / "network.safetensors"
    write_tensors(path, network.state_dict(), {KIND: asdict(made)})
    return str(path), network.eval()


def test_r1_of_a_linear_critic_is_the_square_of_its_weights():
    critic = nn.Sequential(nn.Flatten(), nn.Linear(12, 1, bias=False))
    assert squared_gradient(
        critic, torch.rand(5, 3, 2, 2, generator=rng())
    ).item() == pytest.approx(critic[1].weight.square().sum().item(), rel=1e-5)


def test_r1_can_be_learned_from():
    critic = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Softplus(), nn.Linear(4, 1)).double()
    images = torch.rand(3, 3, 2, 2, generator=rng()).double()
    slow = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda x: critic(x[None])[0, 0], image)
            .square()
            .sum()
            for image in images
        ]
    ).mean()
    fast = squared_gradient(critic, images)
    assert torch.allclose(fast, slow)
    fast.backward()
    assert critic[1].weight.grad.abs().sum() > 0


def test_path_spread_against_a_slow_reference():
    """‖Jᵀy‖ of each row from its whole Jacobian, root of the mean over layers."""
    with seeded(0, "tests"):
        network = SMALL.networks((3, 8, 8))[0].network.double()
    ws = torch.randn(3, network.settings.num_ws, 5, generator=rng()).double().requires_grad_()
    fast = path_length_variance(network.synthesis(ws, "none"), ws, rng(4))
    noise = torch.randn(3, 3, 8, 8, generator=rng(4)).double() / 8
    lengths = []
    for row in range(3):
        jacobian = torch.autograd.functional.jacobian(
            lambda w: network.synthesis(w[None], "none")[0], ws[row].detach()
        )
        slopes = torch.einsum("chwld,chw->ld", jacobian, noise[row])
        lengths.append(slopes.square().sum(1).mean().sqrt())
    lengths = torch.stack(lengths)
    assert torch.allclose(fast, (lengths - lengths.mean()).square().mean())


@pytest.mark.parametrize("died_after", [1, 2])
def test_resumes_to_the_same_bytes(died_after):
    method = replace(SMALL, changes=("colour", "move", "cover"))
    whole = method.train(PUBLIC, None, seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        method.train(PUBLIC, None, seed=0, work=work)
    work.left = None
    assert same_weights(whole.generator, method.train(PUBLIC, None, seed=0, work=work).generator)


def test_every_term_of_the_losses_counts():
    plain = replace(SMALL, path=0.0, r1=0.0)
    kept = [
        method.train(PUBLIC, seed=0, work=NoWork()).generator
        for method in (
            plain,
            replace(plain, r1=1.0),
            replace(plain, path=1.0),
            replace(plain, changes=("move",)),
        )
    ]
    assert not any(same_weights(kept[0], other) for other in kept[1:])


@pytest.mark.slow
def test_learns_to_look_like_its_data():
    """Trained on images of one colour, the generator's mean image comes near that colour."""
    colour = torch.tensor([230, 60, 100], dtype=torch.uint8)
    public = replace(PUBLIC, pixels=colour[:, None, None].expand(40, 3, 16, 16).contiguous())
    method = Stylegan2(
        latent=8, style=8, channel_base=128, channel_max=16, steps=150, batch=16, average=0.9
    )
    trained, untrained = (
        replace(method, steps=steps).train(public, seed=0, work=NoWork()) for steps in (150, 1)
    )
    latents = torch.randn(64, 8, generator=rng())
    with torch.no_grad():
        near, far = (
            (prior.images(latents).mean((0, 2, 3)) - colour / 255).abs().max()
            for prior in (trained, untrained)
        )
    assert near < 0.1 < 0.2 < far  # seven seeds: 0.01 to 0.03, and 0.32 to 0.75


def test_the_mean_style_follows_the_styles():
    trained = SMALL.train(PUBLIC, seed=0, work=NoWork())
    assert trained.generator.network.mapping.w_avg.abs().sum() > 0


def test_images_are_cut_off_and_paint_is_not():
    generator = SMALL.networks((3, 16, 16))[0]
    with torch.no_grad():
        generator.network.synthesis.blocks[-1].torgb.bias += 5
        latents = torch.randn(4, 6, generator=rng())
        assert generator(latents).max() == 1
        painted = generator.paint(generator.network.mapping(latents))
        assert painted.max() > 1
        assert torch.equal(painted.clamp(0, 1), generator(latents))
        assert torch.equal(generator.paint(generator.network.mapping.w(latents)), painted)


def test_file_round_trip(tmp_path):
    prior = SMALL.train(PUBLIC, seed=0, work=NoWork())
    write_prior(prior, tmp_path / "p.safetensors")
    again = read_prior(tmp_path / "p.safetensors")
    latents = torch.randn(3, 6, generator=rng())
    assert torch.equal(again.images(latents), prior.images(latents))
    assert again.critic is None
    assert torch.equal(again.seen_identities, prior.seen_identities)


def test_converted_weights_make_the_networks_own_images(weights, tmp_path):
    path, network = weights
    prior = Stylegan2(weights=path).train(images(4, 2, (3, 32, 32)))
    latents = torch.randn(3, 6, generator=rng())
    with torch.no_grad():
        assert torch.equal(prior.images(latents), (network(latents) / 2 + 0.5).clamp(0, 1))
    assert prior.latent == 6
    write_prior(prior, tmp_path / "p.safetensors")
    assert torch.equal(
        read_prior(tmp_path / "p.safetensors").images(latents), prior.images(latents)
    )


def test_crop_and_size(weights, tmp_path):
    """The middle 20 of 32 pixels at 16; the same from a stored prior."""
    path, network = weights
    prior = Stylegan2(weights=path, crop=20, resize=True).train(PUBLIC)
    assert prior.image_shape == (3, 16, 16)
    latents = torch.randn(3, 6, generator=rng())
    with torch.no_grad():
        middle = (network(latents) / 2 + 0.5)[:, :, 6:26, 6:26]
        expected = torch.nn.functional.interpolate(
            middle, size=16, mode="bilinear", antialias=True
        ).clamp(0, 1)
        assert torch.allclose(prior.images(latents), expected, atol=1e-6)
    write_prior(prior, tmp_path / "p.safetensors")
    again = read_prior(tmp_path / "p.safetensors")
    assert again.image_shape == (3, 16, 16)
    assert torch.equal(again.images(latents), prior.images(latents))


@pytest.mark.parametrize("memory", [1e-9, 3e-4])
def test_parts_that_fit_the_memory_make_the_same_images_and_gradients(memory):
    with seeded(0, "tests"):
        network = SMALL.networks((3, 16, 16))[0].network.double()
    latents = torch.randn(16, 6, generator=rng()).double()
    together, parts = StyleImages(network, 4.0), StyleImages(network, memory)
    assert together.rows_at_once >= 16
    assert parts.rows_at_once == max(
        1,
        2
        ** int(
            torch.tensor(memory * 2**30 / image_bytes(network.settings)).log2().floor().clamp(min=0)
        ),
    )
    results = []
    for generator in (together, parts):
        z = latents.clone().requires_grad_()
        images = generator(z)
        results.append((images.detach(), torch.autograd.grad(images.square().sum(), z)[0]))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*results, strict=True))


def test_the_budget_bounds_what_gradients_keep():
    """Fewer bytes are kept for the backward pass when images are made in parts."""
    with seeded(0, "tests"):
        network = SMALL.networks((3, 16, 16))[0].network

    def kept(memory: float) -> int:
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            StyleImages(network, memory)(torch.randn(16, 6, generator=rng()).requires_grad_()).sum()
        return total

    assert kept(1e-9) < kept(4.0) / 10


@pytest.mark.parametrize(
    ("method", "shape", "message"),
    [
        (Stylegan2(), (3, 24, 24), "square images of 8, 16, ..., 1024 pixels, got 24×24"),
        (Stylegan2(), (3, 16, 32), "got 16×32"),
        (Stylegan2(crop=8), (3, 16, 16), "are for weights from a file"),
        (Stylegan2(resolution=32), (3, 16, 16), "are for weights from a file"),
        (Stylegan2(weights="nowhere.safetensors"), (3, 16, 16), "no file at 'nowhere.safetensors'"),
    ],
)
def test_what_cannot_be_made_is_refused(method, shape, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        method.train(images(8, 2, shape), work=NoWork())


def test_weights_of_another_size_are_refused(weights):
    path, _ = weights
    with pytest.raises(
        CheckpointError,
        match=r"makes images of 32×32 pixels, the data has 16×16: set prior.resize",
    ):
        Stylegan2(weights=path).train(PUBLIC)
    with pytest.raises(ConfigError, match=r"prior.crop \(40\) is larger than the 32 pixels"):
        Stylegan2(weights=path, crop=40, resize=True).train(PUBLIC)


def test_bad_parameters_are_refused():
    with pytest.raises(ConfigError, match="multiple of 4"):
        Stylegan2(batch=30)


def test_changes_keep_shapes_rows_and_gradients():
    images = torch.randn(6, 3, 8, 8, generator=rng()).double().requires_grad_()
    for change in ("colour", "move", "cover"):
        seen = changed(images, (change,), rng(1))
        assert seen.shape == images.shape
        (slope,) = torch.autograd.grad(seen[2].sum(), images)
        assert slope[2].abs().sum() > 0
        assert slope[[0, 1, 3, 4, 5]].abs().sum() == 0
        assert not torch.equal(seen, changed(images, (change,), rng(2)))
    assert changed(images, (), rng()) is images


def test_moving_against_a_slow_reference():
    images = torch.randn(5, 2, 16, 8, generator=rng())
    down, right = (
        torch.randint(-far, far + 1, (5, 1), generator=draw) for draw in [rng(3)] for far in (2, 1)
    )
    expected = torch.zeros_like(images)
    for n in range(5):
        for row in range(16):
            for column in range(8):
                y, x = row - int(down[n]), column - int(right[n])
                if 0 <= y < 16 and 0 <= x < 8:
                    expected[n, :, row, column] = images[n, :, y, x]
    assert torch.equal(changed(images, ("move",), rng(3)), expected)


def test_covering_hides_a_square_of_half_the_side():
    hidden = (changed(torch.ones(400, 1, 16, 16), ("cover",), rng()) == 0).sum((1, 2, 3))
    assert hidden.max() == 64
    assert hidden.min() >= 16  # at least a quarter lies inside
    assert len(hidden.unique()) > 5


def test_colours_by_hand():
    image = torch.tensor([[[[0.2]], [[0.4]], [[0.9]]]])
    bright, saturation, contrast = torch.rand(3, 1, 1, 1, 1, generator=rng(2)).flatten().tolist()
    moved = image + bright - 0.5
    vivid = moved.mean() + (moved - moved.mean()) * 2 * saturation
    expected = vivid.mean() + (vivid - vivid.mean()) * (contrast + 0.5)
    assert torch.allclose(changed(image, ("colour",), rng(2)), expected)


def test_a_resolution_that_is_not_the_files_is_refused(weights):
    path, _ = weights
    with pytest.raises(ConfigError, match=r"prior.resolution \(64\) is not the 32 pixels a side"):
        Stylegan2(weights=path, resolution=64, resize=True).train(PUBLIC)
    with pytest.raises(ConfigError, match="makes square images, and the data has 16×32"):
        Stylegan2(weights=path, resize=True).train(images(4, 2, (3, 16, 32)))
