"""KED-MI's GAN by parts: published shapes, minibatch discrimination, and losses by hand."""

import math

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.priors.kplus1 import (
    Kplus1,
    MinibatchDiscrimination,
    discriminator_loss,
    entropy,
    feature_gap,
    log_fake,
    log_real,
)
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import seeded
from worlds import PUBLIC, SMALL_GAN, images, rng

SMALL = Kplus1(**SMALL_GAN, kernels=3, kernel_size=2)


def shapes(module):
    return [tuple(p.shape) for p in module.parameters() if p.ndim == 4]


def test_published_shapes_at_64_pixels():
    generator, critic = Kplus1().networks((3, 64, 64), 1000)
    assert shapes(generator) == shapes(Wgan().networks((3, 64, 64))[0])
    assert shapes(critic) == [(64, 3, 5, 5), (128, 64, 5, 5), (256, 128, 5, 5), (256, 256, 3, 3)]
    assert tuple(critic.resemblance.weight.shape) == (4096, 64, 50)
    assert tuple(critic.head.weight.shape) == (1000, 4096 + 64)
    features, logits = critic.outputs(torch.rand(2, 3, 64, 64, generator=rng()))
    assert features.shape == (2, 4096)
    assert logits.shape == (2, 1000)
    norms = [layer for layer in critic.features if isinstance(layer, nn.InstanceNorm2d)]
    assert [norm.affine for norm in norms] == [True] * 4


def test_published_shapes_at_32_pixels():
    generator, critic = Kplus1().networks((1, 32, 32), 5)
    assert generator.eval()(torch.zeros(1, 100)).shape == (1, 1, 32, 32)
    assert shapes(critic) == [(64, 1, 5, 5), (128, 64, 5, 5), (256, 128, 5, 5)]
    assert tuple(critic.head.weight.shape) == (5, 4096 + 64)
    assert critic.outputs(torch.rand(2, 1, 32, 32, generator=rng()))[0].shape == (2, 4096)


@pytest.mark.parametrize(
    ("size", "features"), [(16, 2 * 8 * 16), (32, 4 * 8 * 16), (64, 4 * 8 * 16), (128, 4 * 8 * 16)]
)
def test_every_size_ends_at_four_by_four(size, features):
    generator, critic = Kplus1(width=4, critic_width=8, kernels=2, kernel_size=2).networks(
        (3, size, size), 3
    )
    images = generator.eval()(torch.randn(2, 100, generator=rng()))
    assert critic.outputs(images)[0].shape == (2, features)
    assert critic(images).shape == (2, 1)


def test_networks_that_cannot_be():
    with pytest.raises(ConfigError, match="16, 32, 64 or 128 pixels, got 40×40"):
        SMALL.networks((3, 40, 40), 4)
    with pytest.raises(ConfigError, match="got 1: it needs a target of at least 2"):
        SMALL.networks((3, 16, 16), 1)


def slow_resemblance(rows, others, skip_own):
    made = torch.zeros(rows.shape[:2], dtype=rows.dtype)
    for i in range(len(rows)):
        for j in range(len(others)):
            for b in range(rows.shape[1]):
                if not (skip_own and i == j):
                    made[i, b] += math.exp(
                        -sum(
                            abs(p - q)
                            for p, q in zip(rows[i, b].tolist(), others[j, b].tolist(), strict=True)
                        )
                    )
    return made


def small_discrimination():
    layer = MinibatchDiscrimination(7, 3, 2, others=4).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(7, 3, 2, generator=rng(1)) * 0.3)
        layer.reference.copy_(torch.randn(4, 3, 2, generator=rng(2)))
    return layer, torch.randn(5, 7, dtype=torch.double, generator=rng(3))


def test_minibatch_discrimination_against_a_slow_loop():
    layer, features = small_discrimination()
    rows = torch.einsum("nf,fbs->nbs", features, layer.weight).detach()
    with torch.no_grad():
        assert torch.allclose(
            layer.train()(features), slow_resemblance(rows, rows, True), rtol=0, atol=1e-12
        )
        assert torch.allclose(
            layer.eval()(features),
            slow_resemblance(rows, layer.reference, False),
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize("training", [True, False])
def test_minibatch_discrimination_gradients(training):
    layer, features = small_discrimination()
    layer.train(training)
    # `gradcheck` moves its inputs in place, so the layer's own weight can be one of them
    assert torch.autograd.gradcheck(
        lambda given, _: layer(given), (features.requires_grad_(), layer.weight)
    )


def test_the_published_start_of_minibatch_discrimination_says_nothing():
    """Rows start so far apart that every exp(-distance) and its gradient are zero."""
    with seeded(0, "tests", "kplus1"):
        critic = Kplus1().networks((3, 32, 32), 4)[1]
    with torch.no_grad():
        features = critic.features(images(16, 4, shape=(3, 32, 32)).floats())
        rows = critic.resemblance.project(features)
        assert (rows[0] - rows[1]).abs().sum(1).min() > 500
        assert critic.train().resemblance(features).abs().max() == 0


def logits(seed, rows=6, classes=4, scale=3.0):
    return scale * torch.randn(rows, classes, dtype=torch.double, generator=rng(seed))


def test_log_real_is_what_z_implies():
    a = logits(0)
    z = a.exp().sum(1)
    assert torch.allclose(log_real(a), (z / (1 + z)).log())
    assert torch.allclose(log_fake(a), (1 / (1 + z)).log())
    lse = a.logsumexp(1)
    assert torch.allclose(log_real(a), -nn.functional.softplus(-lse))
    assert torch.allclose(log_fake(a), -nn.functional.softplus(lse))
    assert torch.allclose(-log_fake(a) - lse, -log_real(a))  # sp(lse) - lse = sp(-lse)
    assert log_real(torch.full((1, 3), -1e4)).item() == pytest.approx(
        -1e4 + math.log(3), rel=1e-6
    )  # no overflow either way
    assert log_real(torch.full((1, 3), 1e4)).item() == 0.0
    assert log_fake(torch.full((1, 3), 1e4)).item() == pytest.approx(-1e4 - math.log(3), rel=1e-6)


def test_critic_is_log_real():
    critic = SMALL.networks((3, 16, 16), 4)[1].eval()
    images = PUBLIC.floats(torch.arange(6))
    z = critic.outputs(images)[1].exp().sum(1)
    assert torch.allclose(critic(images)[:, 0], (z / (1 + z)).log(), atol=1e-6)


def test_discriminator_loss_against_a_slow_reference():
    soft, labelled, real, fake = logits(0).softmax(1), logits(1), logits(2), logits(3)
    slow = 0.0
    for i in range(6):
        slow -= sum(soft[i, k].item() * labelled[i].log_softmax(0)[k].item() for k in range(4)) / 6
        z_real, z_fake = real[i].exp().sum().item(), fake[i].exp().sum().item()
        slow -= 0.5 * math.log(z_real / (1 + z_real)) / 6 + 0.5 * math.log(1 / (1 + z_fake)) / 6
    assert discriminator_loss(soft, labelled, real, fake).item() == pytest.approx(slow, rel=1e-12)


def test_generator_terms_against_slow_references():
    a = logits(4)
    expected = [-sum(p * math.log(p) for p in row.softmax(0).tolist()) for row in a]
    assert entropy(a).tolist() == pytest.approx(expected, rel=1e-12)
    made, real = logits(5, 3, 4), logits(6, 5, 4)
    gaps = [made[:, j].sum().item() / 3 - real[:, j].sum().item() / 5 for j in range(4)]
    assert feature_gap(made, real, "l1").item() == pytest.approx(sum(map(abs, gaps)) / 4, rel=1e-12)
    assert feature_gap(made, real, "l2").item() == pytest.approx(
        sum(gap**2 for gap in gaps), rel=1e-12
    )


@pytest.mark.parametrize("form", ["l1", "l2"])
def test_loss_gradients(form):
    assert torch.autograd.gradcheck(
        lambda made, real: feature_gap(made, real, form),
        (logits(5).requires_grad_(), logits(6).requires_grad_()),
    )
    given = tuple(logits(seed).requires_grad_() for seed in (1, 2, 3))
    assert torch.autograd.gradcheck(lambda *a: discriminator_loss(logits(0).softmax(1), *a), given)
    assert torch.autograd.gradcheck(entropy, (logits(4).requires_grad_(),))
