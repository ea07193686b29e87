"""What Crafter and Crafter-z share, by hand: the inversion they foresee and the critic they play against."""

import pytest
import torch
from torch import nn

from frostglass.defenses.release._crafting import Inversion, Judge, reciprocal
from frostglass.priors.wgan import build_critic, gradient_penalty
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, prior


def encoder():
    with seeded(0, "tests", "encoder"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )


def test_the_inversion_by_hand():
    made, network = prior(), encoder()
    with frozen(network, *made.modules):
        inversion = Inversion(network, made, scale=3.0, realism=0.5)
        latents, features = torch.randn(2, 6), torch.randn(2, 6, 4, 4)
        pictures_ = made.images(latents)
        for row in range(2):
            error = (network(pictures_[row : row + 1])[0] - features[row]).norm() ** 2 / (6 * 4 * 4)
            wanted = 3.0 * error - 0.5 * made.critic(pictures_[row : row + 1])[0, 0]
            assert inversion.losses(features, latents)[row].item() == pytest.approx(
                wanted.item(), rel=1e-4
            )
        rate, slow, speed = torch.tensor([0.1, 0.3]), latents.clone(), torch.zeros(2, 6)
        for _ in range(3):
            leaf = slow.clone().requires_grad_()
            inversion.losses(features, leaf).sum().backward()
            speed = 0.9 * speed + leaf.grad
            slow = slow - torch.stack([0.1 * speed[0], 0.3 * speed[1]])
        assert torch.allclose(inversion.descend(features, latents, 3, rate, 0.9), slow, atol=1e-5)
        hessian = torch.autograd.functional.hessian(
            lambda z: inversion.losses(features[:1], z[None]).sum(), latents[0]
        )
        largest, _ = inversion.curvature(features, latents, torch.randn(2, 6), 60)
        assert largest[0].item() == pytest.approx(
            torch.linalg.eigvalsh(hessian).abs().max().item(), rel=1e-2
        )
        pool = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
        gaps = [
            [(network(made.images(z[None]))[0] - f).norm().item() for z in pool] for f in features
        ]
        chosen = inversion.nearest(features, 9, torch.Generator().manual_seed(2))
        assert torch.equal(chosen, pool[[row.index(min(row)) for row in gaps]])


@pytest.mark.parametrize("steep", [False, True])
def test_one_step_of_the_critic_by_hand(steep):
    real, found = torch.rand(5, *SHAPE), torch.rand(4, *SHAPE)
    judge = Judge(real, width=4, lr=1e-2, batch=3, penalty=7.0, seed=1)
    with seeded(1, "critic"):
        slow = build_critic(4, 3, 16)
    assert all(
        torch.equal(a, b)
        for a, b in zip(slow.parameters(), judge.network.parameters(), strict=True)
    )
    if steep:
        with torch.no_grad():
            for network in (slow, judge.network):
                network[-2].weight *= 400
    rng = torch.Generator().manual_seed(6)
    some, others = (
        real[torch.randint(5, (3,), generator=rng)],
        found[torch.randint(4, (3,), generator=rng)],
    )
    penalty = gradient_penalty(slow, some, others, rng)
    assert (penalty > 1).item() is steep
    gap = slow(some).mean() - slow(others).mean()
    ((14.0 if steep else 7.0) * penalty - gap).backward()
    before = [p.detach().clone() for p in judge.network.parameters()]
    assert judge.learn(found, 1, torch.Generator().manual_seed(6)) == pytest.approx(
        gap.item(), rel=1e-4, abs=1e-5
    )
    for expected, learned, start in zip(
        slow.parameters(), judge.network.parameters(), before, strict=True
    ):
        assert torch.allclose(
            expected.grad,
            learned.grad,
            rtol=1e-3,
            atol=1e-4 * max(p.grad.abs().max() for p in slow.parameters()),
        )
        assert (learned - start).abs().max().item() <= 1e-2 * (1 + 1e-3)  # Adam's first stride


def test_a_critic_learns_to_tell_left_from_right():
    left = torch.rand(6, *SHAPE) * torch.linspace(1, 0, 16)
    right = left.flip(3)
    judge = Judge(left, width=4, lr=5e-3, batch=6, penalty=10.0, seed=0)
    before = judge.distance(right)
    judge.learn(right, 40, torch.Generator().manual_seed(0))
    assert judge.distance(right) > before + 1
    assert judge.distance(right) == pytest.approx(
        (judge.opinion(left).mean() - judge.opinion(right).mean()).item(), rel=1e-5
    )


def test_nothing_is_divided_by_zero():
    assert reciprocal(torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.5]
