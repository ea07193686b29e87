"""The anticipated inversion and the critic of Crafter and Crafter-z, against slow versions."""

import pytest
import torch
from torch import nn

from frostglass.defenses.release._critic import DistributionCritic
from frostglass.defenses.release._inversion import Inversion, reciprocal
from frostglass.networks.dcgan import build_critic
from frostglass.priors.wgan import gradient_penalty
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, prior, same_weights


def encoder():
    with seeded(0, "tests", "encoder"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )


@pytest.fixture
def inversion():
    world, network = prior(), encoder()
    with frozen(network, *world.modules):
        yield Inversion(network, world, scale=3.0, realism=0.5)


def test_losses_and_descent_equal_slow_computations(inversion):
    latents, features = torch.randn(2, 6), torch.randn(2, 6, 4, 4)
    images = inversion.prior.images(latents)
    for row in range(2):
        image = images[row : row + 1]
        error = (inversion.encoder(image)[0] - features[row]).norm() ** 2 / (6 * 4 * 4)
        expected = (3.0 * error - 0.5 * inversion.prior.critic(image)[0, 0]).item()
        assert inversion.losses(features, latents)[row].item() == pytest.approx(expected, rel=1e-4)
    slow, velocity = latents.clone(), torch.zeros(2, 6)
    for _ in range(3):
        leaf = slow.clone().requires_grad_()
        inversion.losses(features, leaf).sum().backward()
        velocity = 0.9 * velocity + leaf.grad
        slow = slow - torch.stack([0.1 * velocity[0], 0.3 * velocity[1]])
    fast = inversion.descend(features, latents, 3, torch.tensor([0.1, 0.3]), 0.9)
    assert torch.allclose(fast, slow, atol=1e-5)


def test_curvature_is_the_largest_eigenvalue(inversion):
    latents, features = torch.randn(2, 6), torch.randn(2, 6, 4, 4)
    hessian = torch.autograd.functional.hessian(
        lambda z: inversion.losses(features[:1], z[None]).sum(), latents[0]
    )
    largest, _ = inversion.curvature(features, latents, torch.randn(2, 6), 60)
    expected = torch.linalg.eigvalsh(hessian).abs().max().item()
    assert largest[0].item() == pytest.approx(expected, rel=1e-2)


def test_the_nearest_draw_has_the_nearest_feature(inversion):
    features = torch.randn(2, 6, 4, 4)
    pool = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    gaps = [[(inversion.encode(z[None])[0] - f).norm().item() for z in pool] for f in features]
    chosen = inversion.nearest(features, 9, torch.Generator().manual_seed(2), best=2)
    for place in range(2):
        assert torch.equal(chosen[place], pool[[row.index(sorted(row)[place]) for row in gaps]])


@pytest.mark.parametrize("steep", [False, True])
def test_one_step_of_the_critic_equals_a_slow_one(steep):
    real, inverted = torch.rand(5, *SHAPE), torch.rand(4, *SHAPE)
    critic = DistributionCritic(real, width=4, lr=1e-2, batch=3, penalty=7.0, seed=1)
    with seeded(1, "critic"):
        slow = build_critic(4, 3, 16)
    assert same_weights(slow, critic.network)
    if steep:
        with torch.no_grad():
            for network in (slow, critic.network):
                network[-2].weight *= 400
    rng = torch.Generator().manual_seed(6)
    some, others = (
        real[torch.randint(5, (3,), generator=rng)],
        inverted[torch.randint(4, (3,), generator=rng)],
    )
    penalty = gradient_penalty(slow, some, others, rng)
    assert (penalty > 1).item() is steep
    gap = slow(some).mean() - slow(others).mean()
    ((14.0 if steep else 7.0) * penalty - gap).backward()
    before = [p.detach().clone() for p in critic.network.parameters()]
    distance = critic.train(inverted, 1, torch.Generator().manual_seed(6))
    assert distance == pytest.approx(gap.item(), rel=1e-4, abs=1e-5)
    atol = 1e-4 * max(p.grad.abs().max().item() for p in slow.parameters())
    for expected, trained, start in zip(
        slow.parameters(), critic.network.parameters(), before, strict=True
    ):
        assert torch.allclose(expected.grad, trained.grad, rtol=1e-3, atol=atol)
        assert (trained - start).abs().max().item() <= 1e-2 * (1 + 1e-3)  # Adam's first stride


def test_a_critic_learns_to_tell_left_from_right():
    left = torch.rand(6, *SHAPE) * torch.linspace(1, 0, 16)
    right = left.flip(3)
    critic = DistributionCritic(left, width=4, lr=5e-3, batch=6, penalty=10.0, seed=0)
    before = critic.distance(right)
    critic.train(right, 40, torch.Generator().manual_seed(0))
    assert critic.distance(right) > before + 1
    expected = (critic.scores(left).mean() - critic.scores(right).mean()).item()
    assert critic.distance(right) == pytest.approx(expected, rel=1e-5)


def test_nothing_is_divided_by_zero():
    assert reciprocal(torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.5]
