"""The networks of the conditional prior: published shapes, and each part by hand."""

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.priors._residual import (
    DownBlock,
    LabelledGenerator,
    LabelledNorm,
    ProjectionCritic,
    UpBlock,
)
from frostglass.priors.conditional import Conditional
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, rng


@pytest.fixture(autouse=True)
def networks_begin_alike():
    """Seed initialisers, which draw from the global generator: tests must not depend on order."""
    with seeded(0, "tests", "conditional"):
        yield


# Shapes


def test_published_shapes_and_parameter_counts():
    classes = 10
    generator, critic = Conditional().networks((3, 64, 64), classes)
    assert [tuple(block.conv1.weight.shape) for block in generator.blocks] == [
        (512, 1024, 3, 3),
        (256, 512, 3, 3),
        (128, 256, 3, 3),
        (64, 128, 3, 3),
    ]
    # Linear 128 → 1024·4·4; blocks of two 3×3, a 1×1 and two norms of γ and β for each class; norm;
    # 1×1 to colours.
    up = sum(
        9 * a * b + b + 9 * b * b + b + a * b + b + 2 * classes * (a + b)
        for a, b in [(1024, 512), (512, 256), (256, 128), (128, 64)]
    )
    assert (
        sum(p.numel() for p in generator.parameters())
        == 129 * 16384 + up + 2 * 64 + 65 * 3
        == 12_270_979
    )
    assert [tuple(block.conv2.weight.shape) for block in critic.blocks] == [
        (64, 64, 3, 3),
        (128, 64, 3, 3),
        (256, 128, 3, 3),
        (512, 256, 3, 3),
        (1024, 512, 3, 3),
    ]
    first = (27 * 64 + 64) + (9 * 64 * 64 + 64) + (3 * 64 + 64)
    down = sum(
        9 * a * a + a + 9 * a * b + b + a * b + b
        for a, b in [(64, 128), (128, 256), (256, 512), (512, 1024)]
    )
    assert (
        sum(p.numel() for p in critic.parameters())
        == first + down + 1025 + 1024 * classes
        == 10_151_681
    )
    with torch.no_grad():
        images = generator(torch.zeros(2, 128), torch.tensor([0, 9]))
        assert images.shape == (2, 3, 64, 64)
        assert critic.blocks(images).shape == (2, 1024, 2, 2)
        assert critic(images, torch.tensor([0, 9])).shape == (2,)


@pytest.mark.parametrize(("size", "first"), [(16, 16), (32, 32), (64, 64), (128, 128)])
def test_every_size_maps_to_itself(size, first):
    generator, critic = Conditional(latent=6, width=4).networks((1, size, size), 3)
    assert (
        generator.blocks[0].conv1.weight.shape[1] == first
    )  # 4 channels at the end, twice as many before each doubling from 4 pixels
    assert critic.like.weight.shape == (3, first)
    labels = torch.arange(3)
    images = generator.eval()(50 * torch.randn(3, 6, generator=rng()), labels)
    assert images.shape == (3, 1, size, size)
    assert images.min() >= 0
    assert images.max() <= 1
    assert critic.blocks(images).shape[2:] == (2, 2)
    assert critic(images, labels).shape == (3,)


def test_critic_width_is_the_generators_unless_given():
    assert Conditional(width=8).networks(SHAPE, 2)[1].blocks[0].conv1.weight.shape[0] == 8
    assert (
        Conditional(width=8, critic_width=4).networks(SHAPE, 2)[1].blocks[0].conv1.weight.shape[0]
        == 4
    )


def test_size_that_does_not_fit():
    for shape in ((3, 40, 40), (3, 32, 64)):
        with pytest.raises(ConfigError, match="16, 32, 64 or 128 pixels"):
            Conditional().networks(shape, 2)


# Networks against slow references


def test_labelled_norm_is_plain_batch_norm_of_each_rows_class():
    layer = LabelledNorm(5, 3).eval()
    assert (layer.scale.weight == 1).all()
    assert (layer.shift.weight == 0).all()
    for tensor in (layer.scale.weight, layer.shift.weight, layer.norm.running_mean):
        tensor.data.normal_(generator=rng(1))
    layer.norm.running_var.uniform_(0.5, 2, generator=rng(2))
    maps, labels = torch.randn(4, 5, 2, 2, generator=rng(3)), torch.tensor([2, 0, 2, 1])
    together = layer(maps, labels)
    for row, label in enumerate(labels.tolist()):
        plain = nn.BatchNorm2d(5).eval()
        plain.load_state_dict(
            layer.norm.state_dict()
            | {"weight": layer.scale.weight[label], "bias": layer.shift.weight[label]}
        )
        torch.testing.assert_close(together[row : row + 1], plain(maps[row : row + 1]))


def test_labelled_norm_in_training_takes_its_statistics_from_all_classes():
    layer = LabelledNorm(2, 2)
    maps = torch.randn(6, 2, 3, 3, generator=rng(4))
    seen = layer(maps, torch.tensor([0, 0, 0, 1, 1, 1]))
    torch.testing.assert_close(seen, nn.BatchNorm2d(2, affine=False)(maps))


def test_up_block_as_published():
    """The published shortcut doubles first and convolves then; the other order is the same."""
    block, plain = UpBlock(6, 4, 3).double().eval(), nn.functional.interpolate
    maps, labels = (
        torch.randn(2, 6, 4, 4, generator=rng(), dtype=torch.double),
        torch.tensor([1, 2]),
    )
    nn.init.normal_(block.norm1.scale.weight, generator=rng(5))
    inner = block.conv1(plain(block.norm1(maps, labels).relu(), scale_factor=2, mode="bilinear"))
    expected = block.conv2(block.norm2(inner, labels).relu()) + block.shortcut(
        plain(maps, scale_factor=2, mode="bilinear")
    )
    torch.testing.assert_close(block(maps, labels), expected)


@pytest.mark.parametrize("image", [True, False])
def test_down_block_as_published(image):
    block, pool = DownBlock(4, 6, takes_image=image).double().eval(), nn.functional.avg_pool2d
    maps = torch.randn(2, 4, 8, 8, generator=rng(), dtype=torch.double)
    inner = block.conv2(block.conv1(maps if image else maps.relu()).relu())
    torch.testing.assert_close(block(maps), pool(inner, 2) + pool(block.shortcut(maps), 2))


def test_critic_projects_on_the_vector_of_the_class():
    critic = ProjectionCritic(4, SHAPE, 3).eval()
    images, labels = torch.rand(4, *SHAPE, generator=rng()), torch.tensor([0, 2, 1, 2])
    features = critic.blocks(images).clamp(min=0).sum((2, 3))
    slow = [
        critic.real.weight[0] @ h + critic.real.bias[0] + critic.like.weight[y] @ h
        for h, y in zip(features, labels, strict=True)
    ]
    torch.testing.assert_close(critic(images, labels), torch.stack(slow))
    # Between two classes only the projection differs.
    gap = critic(images, labels) - critic(images, torch.zeros_like(labels))
    torch.testing.assert_close(
        gap,
        ((critic.like.weight[labels] - critic.like.weight[0]) * features).sum(1),
        atol=1e-5,
        rtol=1e-4,
    )


def test_every_weight_of_the_critic_has_spectral_norm_one_and_the_generator_none():
    generator, critic = Conditional(latent=5, width=4).networks(SHAPE, 7)
    layers = [m for m in critic.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.Embedding)]
    assert len(layers) == 3 * 3 + 2
    images, labels = torch.rand(4, *SHAPE, generator=rng()), torch.arange(4)
    for _ in range(200):
        critic(images, labels)  # in training every pass is one more power iteration
    critic.eval()
    for layer in layers:
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() == pytest.approx(
            1, abs=0.02
        )
    assert not any("parametrizations" in name for name in generator.state_dict())


def test_generator_by_hand():
    generator = LabelledGenerator(5, 4, SHAPE, 3).eval()
    latents, labels = torch.randn(3, 5, generator=rng()), torch.tensor([2, 0, 2])
    maps = (latents @ generator.start[0].weight.T + generator.start[0].bias).view(3, 16, 4, 4)
    for block in generator.blocks:
        maps = block(maps, labels)
    expected = generator.end[2](generator.end[0](maps).relu()).sigmoid()
    made = generator(latents, labels)
    torch.testing.assert_close(made, expected)
    assert made.is_contiguous()
    torch.testing.assert_close(
        (generator.end[2](generator.end[0](maps).relu()).div(2).tanh() + 1) / 2, expected
    )  # a tanh brought to [0, 1]
