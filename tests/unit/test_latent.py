"""The latent attack, on linear worlds whose answers are known."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feature_worlds import (
    FLAT,
    LATENT,
    Constant,
    affine_prior,
    draws,
    mean_error,
    public_images,
    run,
    view_of,
)
from frostglass.attacks.features.latent import Latent
from frostglass.core.assets import Assets
from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.runtime.seeding import generator_for
from worlds import conditional_prior, prior


def test_a_linear_world_is_inverted_exactly():
    linear, truth = affine_prior(), draws(3, LATENT)
    view = view_of(nn.Flatten(), linear.generator(truth).detach(), ["encoder"])
    result = run(Latent(steps=500, tries=2), view, Assets(prior=linear))
    assert result.latents.shape == (3, 2, LATENT)
    assert torch.allclose(result.latents, truth[:, None].expand(3, 2, LATENT), atol=1e-3)
    assert torch.allclose(result.confidence, torch.ones(3, 2), atol=1e-5)
    assert result.queries == view.queries == 3 * 2 * 500
    assert not result.broken.any()
    assert not result.partial.any()


def test_an_exact_amortizer_needs_no_search():
    class Inverse(nn.Module):
        def forward(self, features):
            return (features - 0.5) @ torch.linalg.pinv(linear.generator.weight.detach())

    linear, truth = affine_prior(), draws(4, LATENT)
    view = view_of(nn.Flatten(), linear.generator(truth).detach(), ["encoder"])
    attack = Latent(steps=0, tries=3, start="amortized", noise=0.25)
    result = run(attack, view, Assets(prior=linear, amortizer=Inverse()))
    assert torch.allclose(result.latents[:, 0], truth, atol=1e-5)
    distance = result.latents[:, 1:] - result.latents[:, :1]
    assert distance.std() == pytest.approx(0.25, rel=0.3)
    assert result.queries == 0


@pytest.mark.parametrize("coupling", [1, 128])
def test_the_published_search_follows_the_published_recursion(coupling):
    linear, truth = affine_prior(), draws(2, LATENT)
    view = view_of(nn.Flatten(), linear.generator(truth).detach(), ["encoder"])
    attack = Latent(
        gap="norm", scale=100.0, optimizer="momentum", lr=0.005, coupling=coupling, steps=9, tries=1
    )
    start = run(replace(attack, steps=0), view, Assets(prior=linear)).latents[:, 0]
    end = run(attack, view, Assets(prior=linear)).latents[:, 0]
    weight = linear.generator.weight.detach().double()
    for row in range(2):
        z, v = start[row].double(), 0
        for _ in range(9):
            difference = 0.5 + z @ weight - view.released[row].double()
            v = 0.9 * v + 100 / coupling**0.5 * (weight @ difference) / difference.norm()
            z = z - 0.005 * v
        assert torch.allclose(end[row].double(), z, atol=1e-4)


def test_published_parameters():
    why, sets = Latent.variants["published"]
    attack = Latent(**sets)
    assert (attack.gap, attack.scale, attack.optimizer, attack.momentum) == (
        "norm",
        100.0,
        "momentum",
        0.9,
    )
    assert (attack.lr, attack.steps, attack.tries, attack.critic_weight) == (0.005, 600, 3, 0.0)
    assert "three random starts" in why
    amortized = Latent(**Latent.variants["amortized"][1])
    assert (amortized.start, amortized.steps, amortized.critic_weight) == ("amortized", 100, 100.0)


@pytest.mark.parametrize("gap", ["mean_square", "norm"])
def test_gaps_equal_a_slow_computation(gap):
    attack = Latent(gap=gap)
    features, wanted = draws(3, 2, 4, 4).double(), draws(3, 2, 4, 4, seed=1).double()
    squares = [
        sum((a - b).item() ** 2 for a, b in zip(one.flatten(), other.flatten(), strict=True))
        for one, other in zip(features, wanted, strict=True)
    ]
    slow = [total / 32 if gap == "mean_square" else total**0.5 for total in squares]
    assert attack.gaps(features, wanted).tolist() == pytest.approx(slow)
    assert torch.autograd.gradcheck(lambda x: attack.gaps(x, wanted), features.requires_grad_())


@pytest.mark.parametrize("gap", ["mean_square", "norm"])
def test_differences_within_the_tolerance_do_not_count(gap):
    features = torch.tensor([[0.5, -3.0, 2.0], [0.9, 0.0, -1.0]], requires_grad=True)
    attack = Latent(gap=gap, tolerance=1.0)
    gaps = attack.gaps(features, torch.zeros(2, 3))
    beyond = torch.tensor([[0.0, -2.0, 1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(gaps, Latent(gap=gap).gaps(beyond, torch.zeros(2, 3)))
    (gradient,) = torch.autograd.grad(gaps[0], features)
    assert gradient[0, 0] == 0
    assert gradient[0, 1] < 0 < gradient[0, 2]
    assert (gradient[1] == 0).all()


def test_the_gradient_of_a_perfect_match_is_zero():
    feature = draws(2, 6).requires_grad_()
    gap = Latent(gap="norm").gaps(feature, feature.detach()).sum()
    (gradient,) = torch.autograd.grad(gap, feature)
    assert (gradient == 0).all()


def test_random_starts_are_the_best_of_the_pool():
    linear, truth = affine_prior(), draws(3, LATENT)
    images = linear.generator(truth).detach()
    view = view_of(nn.Flatten(), images, ["encoder"])
    result = run(Latent(steps=0, tries=2, pool=100), view, Assets(prior=linear))
    assert result.queries == view.queries == 100
    seed = generator_for(0, "latent", "start", "pool").initial_seed()
    pool = draws(100, LATENT, seed=seed)
    gaps = torch.cdist(linear.generator(pool).detach().flatten(1), view.released)
    assert torch.equal(result.latents, pool[gaps.T.argsort(1)[:, :2]])
    unranked = run(Latent(steps=0, tries=2), view, Assets(prior=linear))
    assert mean_error(result, images) < 0.5 * mean_error(unranked, images)


def test_the_critic_is_followed_where_features_are_constant():
    class Brightness(nn.Module):
        def forward(self, images):
            return images.flatten(1).mean(1, keepdim=True)

    linear = affine_prior(Brightness())
    view = view_of(Constant(), torch.full((2, *FLAT), 0.5), ["encoder"])
    attack = Latent(steps=50, tries=1, lr=0.01, optimizer="momentum", critic_weight=10.0)
    start, end, coupled = (
        run(replace(attack, **change), view, Assets(prior=linear)).latents[:, 0]
        for change in ({"steps": 0}, {}, {"coupling": 10})
    )
    uphill = linear.generator.weight.detach().mean(1)
    assert torch.allclose(F.cosine_similarity(end - start, uphill[None]), torch.ones(2))
    assert torch.allclose(end - start, 10 * (coupled - start), rtol=1e-3)


def test_the_adapted_generator_learns_what_the_encoder_discards():
    """The lower half of each image repeats the upper one, which alone is released."""

    class Upper(nn.Module):
        def forward(self, images):
            return images[:, :, :2].flatten(1)

    upper = torch.full((40, 8), 0.5)
    upper[:, :LATENT] += 0.25 * draws(40, LATENT).clamp(-1.5, 1.5)
    images = torch.cat([upper, upper], 1).unflatten(1, FLAT)
    linear = affine_prior()
    with torch.no_grad():  # its lower half is grey
        linear.generator.weight.copy_(0)
        linear.generator.weight[:, :LATENT] = torch.eye(LATENT)
    before = copy.deepcopy(linear.generator.state_dict())
    view = view_of(Upper(), images[:4], ["encoder", "protection"])
    plain, adapted = (
        run(
            Latent(steps=60, tries=1, adapt=adapt, adapt_rounds=3, adapt_epochs=40, adapt_lr=1e-2),
            view,
            Assets(public_images(images[4:]), linear),
        )
        for adapt in (0, 36)
    )
    assert mean_error(adapted, images[:4]) < 0.05 * mean_error(plain, images[:4])
    assert adapted.queries == 36 + 3 * 27 * 60 + 4 * 9 * 60 + 4 * 60
    after = linear.generator.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert linear.generator.weight.requires_grad
    assert linear.generator.weight.grad is None


def test_the_budget_counts_every_evaluation():
    attack = Latent(steps=7, tries=2, pool=20, adapt=20, adapt_rounds=3, adapt_epochs=4)
    budget = attack.budget(AuditSize(people=3, images_per_person=2))
    searches = 7 * (16 + 3 * 16 + 4 * 16)  # 12 rows, 15 training and 5 held-out ones, padded
    assert budget.evaluations == 2 * 20 + searches + 12
    assert budget.trained == 3 * 4 * 15
    assert replace(attack, adapt=0).budget(AuditSize(6)).evaluations == 20 + 7 * 16 + 12


def test_what_cannot_work_is_refused():
    view = view_of(nn.Flatten(), torch.full((2, *FLAT), 0.5), ["encoder"])
    linear = Assets(prior=affine_prior())
    for attack, assets, problem in (
        (Latent(), Assets(), r"latent needs assets\.prior, got none"),
        (Latent(start="amortized"), linear, r"latent needs assets\.amortizer, got none"),
        (Latent(critic_weight=1.0), linear, r"critic_weight must be 0 for a prior without a crit"),
        (Latent(), Assets(prior=prior()), "generates images of 3×16×16, the encoder takes 1×4×4"),
        (Latent(), Assets(prior=conditional_prior("label")), "got one that also takes a label"),
        (Latent(adapt=8), linear, r"latent\.adapt must be at most 0 \(the public images\), got 8"),
        (Latent(adapt=1), linear, r"latent\.adapt must be 0 or at least 2"),
        (
            Latent(start="amortized"),
            Assets(prior=affine_prior(), amortizer=nn.Identity()),
            r"the amortizer must predict latents of 5 numbers, got \(16,\)",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            run(attack, view, assets)
    with pytest.raises(ConfigError, match="pool must be 0 for start 'amortized'"):
        Latent(start="amortized", pool=10)
    with pytest.raises(ConfigError, match=r"pool must be 0 or at least tries \(3\), got 2"):
        Latent(pool=2)


def test_the_view_refuses_access_that_was_not_declared():
    class Undeclared(Latent):
        encoder_access = "encode"

    view = view_of(nn.Flatten(), torch.full((2, *FLAT), 0.5), ["encode"])
    with pytest.raises(AccessError, match="encoder"):
        run(Undeclared(steps=1), view, Assets(prior=affine_prior()))


def test_a_prior_of_another_size_is_resized_if_its_method_says_so():
    view = view_of(nn.Flatten(), torch.full((2, *FLAT), 0.5), ["encoder"])
    resized = replace(prior(), info={"resize": True})
    result = run(Latent(steps=2, tries=1), view, Assets(prior=resized))
    assert result.images.shape == (2, 1, *FLAT)


def test_failed_searches_are_marked_and_are_an_error_if_all_fail():
    class NotForBright(nn.Module):
        def forward(self, images):
            flat = images.flatten(1)
            return flat + torch.where(flat.mean(1, keepdim=True) > 0.6, torch.nan, 0.0)

    linear = affine_prior()
    view = view_of(NotForBright(), torch.full((6, *FLAT), 0.5), ["encoder"])
    start = run(Latent(steps=0, tries=1), view, Assets(prior=linear))
    with torch.no_grad():
        brightness = linear.generator(start.latents[:, 0]).flatten(1).mean(1)
        # One of the six starts becomes too bright.
        linear.generator.weight *= 0.1 / (brightness - 0.5).sort().values[-2:].mean()
    result = run(Latent(steps=3, tries=1, lr=1e-4), view, Assets(prior=linear), people=6)
    assert result.broken.sum() == 1
    assert result.partial.tolist() == result.broken[:, 0].tolist()
    with torch.no_grad():
        linear.generator.weight *= 1e-6
    view = view_of(nn.Flatten(), draws(2, *FLAT), ["encoder"])
    with pytest.raises(RunError, match="latent: no search finished for any of 2 people"):
        run(Latent(steps=3, tries=1, lr=1e30), view, Assets(prior=linear))
