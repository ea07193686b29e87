"""Crafter and Crafter-z: gradients in a linear world, protection, options and budgets."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from crafting_worlds import METHODS, TINY, drawn, encoder, first_state, linear_world, release, tiny
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize
from frostglass.defenses.base import defenses
from frostglass.defenses.release._critic import DistributionCritic
from frostglass.defenses.release._inversion import Inversion
from frostglass.defenses.release.crafter import Crafter
from frostglass.defenses.release.crafter_z import CrafterZ
from frostglass.runtime.freezing import frozen
from worlds import prior


def test_the_largest_curvature_is_kept():
    linear, network, _ = linear_world()
    state = first_state(tiny(Crafter), linear, network, torch.ones(3, 7))
    state.raise_curvature(torch.full((3,), 1e9), state.direction)
    state.raise_curvature(torch.zeros(3), state.direction)
    assert state.curvature.tolist() == [1e9] * 3


def test_the_gradient_in_a_linear_world():
    """It is ∂/∂F of β‖F - F₀‖² / d - D(G(K⁺F)), with the inversion written out."""
    linear, network, matrix = linear_world()
    inverse = torch.linalg.pinv(matrix).T
    method = tiny(
        Crafter,
        first_steps=400,
        beta=3.0,
        solver="conjugate_gradient",
        damping=0.0,
        terms=30,
        inner_momentum=0.5,
    )
    plain = torch.randn(5, 7, generator=torch.Generator().manual_seed(4))
    state = first_state(method, linear, network, plain)
    assert torch.allclose(state.latents, plain @ inverse, atol=1e-3)
    moved = plain + 0.1
    state.optimize_from(moved, 0.01)
    state.latents = moved @ inverse
    gradient = method.gradient(state)
    leaf = moved.clone().requires_grad_()
    scores = state.critic.scores(linear.images(leaf @ inverse))
    loss = 3.0 * (leaf - plain).square().sum(1) / 7 - scores
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-5)
    assert 4 <= state.facts["terms"] < 30  # about as many as the latent has directions
    series = replace(method, solver="neumann", terms=1000).gradient(state)
    assert torch.allclose(series, expected, rtol=1e-2, atol=1e-4)


def test_the_latent_gradient_in_a_linear_world():
    linear, network, matrix = linear_world()
    plain = torch.randn(3, 7, generator=torch.Generator().manual_seed(4))
    method = tiny(CrafterZ, beta=2.0)
    state = first_state(method, linear, network, plain)
    latents = state.variable.detach()
    scores = torch.autograd.functional.jacobian(
        lambda z: state.critic.scores(linear.images(z)).sum(), latents
    )
    expected = 2.0 * 2 / 7 * (latents @ matrix.T - plain) @ matrix - scores
    assert torch.allclose(method.gradient(state), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_beta_trades_utility_for_protection(method):
    settings = {"steps": 12, "lr": 0.01, "first_steps": 80}
    useful, protected = (
        release(tiny(method, **settings, beta=beta), drawn(8)).facts[0]["deviation"]
        for beta in (1e4, 0.0)
    )
    assert useful < 0.5 * protected


def test_an_inversion_of_crafted_features_finds_another_image():
    """Images from one corner of latent space: noise of the same size protects them less."""
    world, network = prior(), encoder()
    with frozen(world.generator), torch.no_grad():
        latents = 2.0 + 0.1 * torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
        images = world.images(latents)
    critic = {"critic_steps": 5, "critic_width": 8, "critic_lr": 5e-3, "index_steps": 60}
    method = Crafter(**TINY | critic | {"steps": 40, "first_steps": 100}, beta=5.0, lr=0.003)
    result = release(method, images, network=network, world=world)
    (row,) = result.facts
    assert row["emd_end"] < 0.4 * row["emd_start"]
    with frozen(network, world.generator):
        plain = network(images)
        noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5))
        noisy = plain + noise * (result.features - plain).square().mean().sqrt()
        undefended, random, crafted = (
            inversion_error(network, world, features, images)
            for features in (plain, noisy, result.features)
        )
    assert crafted > 100 * undefended
    assert crafted > 1.5 * random


def inversion_error(network, world, features, images):
    """Return the mean squared error of another inversion: from other starts, and by Adam."""
    rng = torch.Generator().manual_seed(9)
    latents = torch.randn(len(features), 6, generator=rng).requires_grad_()
    optimizer = torch.optim.Adam([latents], lr=0.1)
    for _ in range(150):
        loss = (network(world.images(latents)) - features).square().sum()
        (latents.grad,) = torch.autograd.grad(loss, latents)
        optimizer.step()
    return (world.images(latents) - images).square().mean().item()


def test_crafter_z_releases_features_of_generated_images():
    linear, network, matrix = linear_world()
    images = drawn(4, linear, 4) + 0.2
    result = release(tiny(CrafterZ), images, network=network, world=linear)
    projection = matrix @ torch.linalg.pinv(matrix)  # onto the range of Enc∘G
    assert torch.allclose(result.features @ projection.T, result.features, atol=1e-4)
    assert not torch.allclose(network(images) @ projection.T, network(images), atol=1e-2)
    assert "residual_end" not in result.facts[0]


def test_the_ceiling_is_the_feature_of_the_first_inversion():
    linear, network, matrix = linear_world()
    images = drawn(4, linear, 4) + 0.2
    longer = tiny(CrafterZ, first_steps=300, batch=2)
    result = release(longer, images, network=network, world=linear)
    best = network(images) @ (matrix @ torch.linalg.pinv(matrix)).T  # the nearest that is possible
    assert torch.allclose(result.ceiling, best, atol=1e-3)
    assert release(tiny(Crafter), drawn(4)).ceiling is None


@pytest.mark.parametrize("method", METHODS)
def test_of_several_first_inversions_the_best_is_kept(method):
    images = drawn(5, seed=3)
    residuals = [
        release(tiny(method, first_steps=6, pool=16, starts=starts, steps=1), images).facts[0][
            "residual_start"
        ]
        for starts in (1, 4, 16)
    ]
    assert residuals[0] > residuals[1] >= residuals[2]
    budgets = [tiny(method, starts=starts, pool=4).budget(AuditSize(5)) for starts in (1, 2)]
    # Two times four steps and twelve products of the curvature.
    assert budgets[1].evaluations - budgets[0].evaluations == 5 * (4 + 12)
    with pytest.raises(ConfigError, match=r"pool \(4\) must be at least the 5 random latents"):
        tiny(method, starts=5)


def test_the_amortizers_prediction_is_one_of_several_starts():
    latents = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    images, calls = drawn(5, seed=3), []

    def exact(features):
        calls.append(1)
        return latents

    chosen = tiny(CrafterZ, first_steps=0, pool=4, starts=3, steps=1, amortized=True)
    facts = release(chosen, images, amortizer=exact).facts[0]
    assert facts["residual_start"] < 1e-8  # no draw is as good
    assert calls == [1]


def test_an_exact_amortizer_needs_no_search():
    linear, network, matrix = linear_world()
    inverse = nn.Linear(7, 4, bias=False)
    inverse.weight.data = torch.linalg.pinv(matrix)
    world = {"network": network, "world": linear}
    method = tiny(Crafter, first_steps=0, amortized=True)
    assert method.needs == {"prior", "amortizer"}
    assert Crafter().needs == {"prior"}
    (row,) = release(method, drawn(4, linear, 4), **world, amortizer=inverse).facts
    assert row["residual_start"] < 1e-8
    assert row["gradient_start"] < 1e-4
    (random,) = release(tiny(Crafter, first_steps=0), drawn(4, linear, 4), **world).facts
    assert random["residual_start"] > 1e-3


@pytest.mark.parametrize(("warm", "calls"), [(True, 1), (False, 5)])
def test_cold_inversions_restart_at_a_prediction(warm, calls):
    linear, network, _ = linear_world()

    class Counting(nn.Linear):
        calls = 0

        def forward(self, features):
            Counting.calls += 1
            return super().forward(features)

    method = tiny(Crafter, amortized=True, warm=warm)
    world = {"network": network, "world": linear}
    release(method, drawn(4, linear, 4), **world, amortizer=Counting(7, 4))
    assert Counting.calls == calls  # for the plain features, and after each of four steps


def test_a_converged_batch_stops_early():
    assert release(tiny(CrafterZ, steps=12, tolerance=0.99), drawn()).facts[0]["steps"] == 10
    assert release(tiny(CrafterZ, steps=12), drawn()).facts[0]["steps"] == 12


def test_explicit_step_sizes_are_used():
    images = drawn(3)
    choices = ({}, {"inner_lr": 0.01}, {"alpha": 1e-3}, {"inner_lr": 0.01, "scale": 3.0})
    features = [release(tiny(Crafter, **more), images).features for more in choices]
    assert all(not torch.equal(a, b) for i, a in enumerate(features) for b in features[:i])
    # Step sizes from the curvature do not depend on the scale.
    scaled = release(tiny(Crafter, scale=3.0), images).features
    assert torch.allclose(scaled, features[0], atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_published_sizes(method):
    why, sizes = method.variants["published"]
    chosen = method(**sizes)
    assert "paper" in why
    assert chosen.amortized
    assert (chosen.batch, chosen.critic_width, chosen.critic_lr) == (128, 64, 5e-4)
    assert (chosen.critic_steps, chosen.critic_batch) == (10, 32)
    if method is Crafter:
        assert (chosen.steps, chosen.alpha, chosen.terms) == (450, 1e-3, 120)
        assert (chosen.inner_steps, chosen.lr, chosen.penalty) == (80, 0.01, 20.0)
        assert chosen.scale == 2000 / 128
    else:
        assert (chosen.steps, chosen.first_steps, chosen.lr) == (500, 110, 0.005)
        assert (chosen.penalty, chosen.beta) == (15.0, 20 / 16)


@pytest.mark.parametrize("method", METHODS)
def test_it_acts_at_release_only(method):
    assert method.releases
    assert method.takes_attributes
    assert defenses.get(method.name) is method
    assert method().replaces() == frozenset()


@pytest.mark.parametrize("method", METHODS)
def test_the_budget_counts_the_work_of_all_batches(method, monkeypatch):
    chosen = tiny(method, batch=3, steps=12)
    batches, searched = [], []
    train, descend = DistributionCritic.train, Inversion.descend

    def counting_train(self, inverted, steps, rng):
        batches.append(2 * steps * self.batch)
        return train(self, inverted, steps, rng)

    def counting_descend(self, features, latents, steps, *more):
        searched.append(steps * len(latents))
        return descend(self, features, latents, steps, *more)

    monkeypatch.setattr(DistributionCritic, "train", counting_train)
    monkeypatch.setattr(Inversion, "descend", counting_descend)
    release(chosen, drawn(7))
    budget = chosen.budget(AuditSize(7))
    assert budget.trained == sum(batches)
    products = 12 * (3 + 2) + 2 * 2 if method is Crafter else 12  # terms, and two checks
    assert budget.evaluations == sum(searched) + 7 * (1 + 12 + products) + 3 * chosen.pool


@pytest.mark.parametrize("method", METHODS)
def test_a_brief_copy_is_valid_and_does_less(method):
    size = AuditSize(300)
    for sets in ({}, method.variants["published"][1], method.disabled):
        chosen = method(**sets)
        brief = chosen.brief()
        assert type(brief) is method
        assert brief.brief() == brief
        assert (brief.batch, brief.needs) == (chosen.batch, chosen.needs)
        assert brief.budget(size).images <= chosen.budget(size).images
    assert len(release(tiny(method).brief(), drawn()).features) == 6
