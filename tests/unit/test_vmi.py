"""Tests of VMI."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from frostglass.attacks._search.families import Gaussian, Mixture
from frostglass.attacks.base import prior_only
from frostglass.attacks.model.vmi import Vmi
from frostglass.core.errors import ConfigError
from frostglass.networks.flow import Flow
from frostglass.runtime.seeding import generator_for
from worlds import prior, run_attack, target

SHAPES = {"depth": 2, "levels": 2, "hidden": 8}
FAMILIES = {"gaussian": Gaussian(6), "mixture": Mixture(6, 3), "flow": Flow(6, **SHAPES)}
every_family = pytest.mark.parametrize("q", list(FAMILIES))


def small(**more):
    return Vmi(**({"steps": 3, "points": 4, "draws": 5, "keep": 5, "lr": 0.05, **SHAPES} | more))


def test_defaults_are_the_published_ones():
    vmi = Vmi()
    assert (
        vmi.q,
        vmi.depth,
        vmi.levels,
        vmi.hidden,
        vmi.gamma,
        vmi.points,
        vmi.draws,
        vmi.keep,
    ) == ("flow", 10, 3, 100, 1e-3, 64, 50, 50)
    assert (vmi.loss, vmi.weight, vmi.critic_weight, vmi.coupling) == ("ce", 1, 0, 1)
    assert (vmi.optimizer, vmi.lr, vmi.momentum, vmi.steps) == ("momentum", 1e-4, 0.9, 157 * 20)


def class_loss(latents, label):
    """-log p_y of each image, one at a time."""
    module, generator = target().module.eval(), prior().generator.eval()
    return torch.stack([-module(generator(z[None]))[0].softmax(0)[label].log() for z in latents])


def followed(family, *, gamma, steps=3, lr=0.05, points=4, label=2):
    """Momentum written out on E[-log p_y] + γ · KL, each with its own noise."""
    state, v = family.begin(torch.zeros(1, 6)), 0.0
    rng = generator_for(0, "search", label, 0)
    for _ in range(steps):
        state = state.detach().requires_grad_()
        loss = class_loss(
            family.sample(state, torch.randn(1, points, family.noise, generator=rng))[0], label
        ).mean()
        if gamma:
            loss = (
                loss
                + gamma * family.kl(state, torch.randn(1, points, family.noise, generator=rng))[0]
            )
        (gradient,) = torch.autograd.grad(loss, state)
        v = 0.9 * v + gradient
        state = state - lr * v
    noise = torch.randn(1, 5, family.noise, generator=generator_for(0, "read", label, 0))
    return family.sample(state, noise)[0].detach()


@every_family
@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_a_few_steps_by_hand(q, gamma):
    some, expected = run_attack(small(q=q, gamma=gamma)), followed(FAMILIES[q], gamma=gamma)
    assert torch.allclose(some.latents[0], expected[some.draws[0]], atol=1e-4)


@every_family
def test_gamma_is_felt_once(q):
    """Another weight of KL gives another result: the comparison by hand can fail."""
    none, once, twice = (followed(FAMILIES[q], gamma=gamma) for gamma in (0.0, 0.3, 0.6))
    assert (none - once).abs().max() > 1e-3
    assert (twice - once).abs().max() > 1e-3


def test_the_gaussian_without_its_family():
    """z = m + L ε and torch's own KL between Gaussians, with the momentum of torch's SGD."""
    m, whole = torch.zeros(6, requires_grad=True), torch.eye(6).requires_grad_()
    rule, rng = torch.optim.SGD([m, whole], lr=0.05, momentum=0.9), generator_for(0, "search", 2, 0)
    standard = MultivariateNormal(torch.zeros(6), torch.eye(6))
    for _ in range(3):
        latents = m + torch.randn(4, 6, generator=rng) @ whole.T
        loss = class_loss(latents, 2).mean() + 0.3 * kl_divergence(
            MultivariateNormal(m, whole @ whole.T), standard
        )
        torch.randn(
            4, 6, generator=rng
        )  # drawn for an estimate of KL, which this family does not need
        rule.zero_grad()
        loss.backward()
        rule.step()
    some = run_attack(small(q="gaussian", gamma=0.3))
    expected = m + torch.randn(5, 6, generator=generator_for(0, "read", 2, 0)) @ whole.T
    assert torch.allclose(some.latents[0], expected[some.draws[0]], atol=1e-4)


@every_family
def test_it_starts_at_the_generators_own_distribution(q):
    """A mixture has standard normal centres; the others are N(0, I) itself, with a KL of 0."""
    latents = run_attack(small(q=q, steps=0, draws=600, keep=600)).latents[0]
    if q == "mixture":
        assert 1 < latents.std() < 1.7
        return
    assert latents.mean().item() == pytest.approx(0, abs=0.06)
    assert latents.std().item() == pytest.approx(1, abs=0.05)
    noise = torch.randn(1, 50, 6, generator=generator_for(0, "tests"))
    assert FAMILIES[q].kl(FAMILIES[q].begin(torch.zeros(1, 6)), noise).item() == pytest.approx(
        0, abs=1e-5
    )


SEARCH = {"steps": 100, "points": 16, "draws": 20, "keep": 20, "lr": 0.05, "optimizer": "adam"}


@every_family
def test_it_beats_prior_only_draws(q):
    """No selection: all that is drawn from q against as many prior-only draws."""
    some, draws = (
        run_attack(small(q=q, **SEARCH), labels=(0, 1, 2, 3)),
        prior_only(prior(), range(4), 20, seed=0),
    )

    def sure(images):
        with torch.no_grad():
            scores = target().module.eval()(images.flatten(0, 1)).softmax(1)
        return (
            scores.gather(1, torch.arange(4).repeat_interleave(20)[:, None])
            .unflatten(0, (4, 20))
            .mean(1)
        )

    assert (sure(some.images) > sure(draws.images) + 0.2).all()
    assert sure(some.images).mean() > sure(draws.images).mean() + 0.4


@every_family
def test_q_is_as_wide_and_as_unsure_as_gamma_wants_it(q):
    some = [
        run_attack(small(q=q, gamma=gamma, **SEARCH), labels=(0, 1, 2, 3))
        for gamma in (0.1, 1.0, 3.0)
    ]
    narrow, middle, wide = (one.latents.std(1).mean().item() for one in some)
    assert narrow < middle - 0.03 < wide - 0.06
    assert wide == pytest.approx(1, abs=0.1)  # almost nothing but the prior
    sure = [one.confidence.mean().item() for one in some]
    assert sure[0] > sure[1] + 0.1 > sure[2] + 0.2


def test_queries_are_counted_and_foretold():
    attack = small(points=4, steps=3, draws=5, keep=2)
    assert attack.search_effort == ("3 steps of 4 images", 12)
    assert run_attack(attack, labels=(0, 1)).queries == 2 * (3 * 4 + 5)


def test_the_entropy_of_a_gaussian_and_what_its_weight_does():
    state = Gaussian(6).begin(torch.zeros(1, 6))
    state[:, 1:] += 0.1 * torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(0))
    lower = state[0, 1:].double()
    known = MultivariateNormal(torch.zeros(6).double(), lower @ lower.T)
    assert Gaussian(6).entropy(state).item() == pytest.approx(known.entropy().item(), rel=1e-5)
    narrow, wide = (
        run_attack(small(q="gaussian", gamma=0.0, entropy=weight, steps=40, draws=30, keep=30))
        for weight in (0.0, 0.5)
    )
    assert wide.latents.std(1).mean() > 1.2 * narrow.latents.std(1).mean()


def test_what_cannot_be_is_refused():
    for more in ({"q": "flow"}, {"q": "gaussian", "layered": True}):
        with pytest.raises(ConfigError, match=r'entropy \(0.1\) is for q = "gaussian" without'):
            small(entropy=0.1, **more)
    with pytest.raises(ConfigError, match=r'smoothing \(0.1\) is for loss "ce", got \'margin\''):
        small(loss="margin", smoothing=0.1)
    with pytest.raises(ConfigError, match=r"keep .9. must not exceed candidates · draws .5."):
        small(keep=9)
    with pytest.raises(
        ConfigError, match="q: expected 'gaussian', 'mixture' or 'flow', got 'glow'"
    ):
        small(q="glow")
    with pytest.raises(ConfigError, match="gamma"):
        small(gamma=-1.0)
    with pytest.raises(ConfigError, match=r"vmi\.critic_weight is 1, but .* has no critic"):
        run_attack(small(critic_weight=1.0), prior(critic=False))
    run_attack(small(steps=1), prior(critic=False))
