"""A distribution for each layer of a StyleGAN, and VMI with it."""

import re

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from frostglass.attacks._search.families import Gaussian, Mixture
from frostglass.attacks._search.layered import Layered
from frostglass.attacks.base import invert, prior_only
from frostglass.attacks.model.vmi import Vmi
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.networks.flow import Flow
from frostglass.priors.stylegan2 import Stylegan2
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import generator_for
from worlds import SHAPE, NoWork, close_images, of_people, prior, styled_prior, target

SHAPES = {"depth": 2, "levels": 2, "hidden": 6}
ONES = {"flow": Flow(4, **SHAPES), "gaussian": Gaussian(4), "mixture": Mixture(4, 2)}
every_kind = pytest.mark.parametrize("each", list(ONES.values()), ids=list(ONES))


def normals(*shape, purpose="noise"):
    return torch.randn(shape, generator=generator_for(0, "tests", "layered", purpose))


def moved(family, rows=2):
    """A state off its start, different in each row and layer."""
    state = family.begin(torch.zeros(rows, family.latent))
    return state + 0.3 * normals(*state.shape, purpose="state").to(state)


# The family


@every_kind
def test_at_the_start_all_layers_are_the_one(each):
    """The same ε, and the same distribution around it: the unlayered sample in each led layer."""
    family, noise = Layered(each, 5, 3), normals(2, 6, each.noise + 4)
    latents = family.sample(family.begin(torch.zeros(2, 20)), noise).unflatten(2, (5, 4))
    alone = each.sample(each.begin(torch.zeros(2, 4)), noise[..., : each.noise])
    assert (family.latent, family.noise) == (20, each.noise + 4)
    for layer in range(3):
        assert torch.equal(latents[:, :, layer], alone)
    for layer in (3, 4):
        assert torch.equal(latents[:, :, layer], noise[..., each.noise :])


@every_kind
def test_each_layer_follows_its_own_state_and_the_shared_noise(each):
    family = Layered(each, 3, 3)
    state, noise = moved(family), normals(2, 6, family.noise)
    latents = family.sample(state, noise).unflatten(2, (3, 4))
    for layer in range(3):
        assert torch.allclose(latents[:, :, layer], each.sample(state[:, layer], noise), atol=1e-6)
    assert (latents[:, :, 0] - latents[:, :, 1]).abs().mean() > 0.05


@every_kind
def test_every_layer_begins_at_its_centre(each):
    family, centres = Layered(each, 4, 3), normals(2, 16, purpose="centres")
    state = family.begin(centres)
    for layer in range(3):
        assert torch.equal(state[:, layer], each.begin(centres.unflatten(1, (4, 4))[:, layer]))


@every_kind
@pytest.mark.parametrize("led", [3, 5])
def test_kl_is_the_mean_over_all_layers_and_free_ones_have_none(each, led):
    family = Layered(each, 5, led)
    state, noise = moved(family), normals(2, 6, family.noise)
    parts = torch.stack(
        [each.kl(state[:, layer], noise[..., : each.noise]) for layer in range(led)]
    )
    assert parts.abs().min() > 0.01
    assert torch.allclose(family.kl(state, noise), parts.sum(0) / 5, rtol=1e-5)


def test_the_kl_of_layers_of_gaussians_is_the_sum_of_their_closed_forms():
    """As the published code has it for Gaussians; its flows and mixtures have the mean."""
    known = styled_prior()
    family = Vmi(q="gaussian", layered=True).family(known)
    state, noise = moved(family), normals(2, 3, family.noise)
    standard = MultivariateNormal(torch.zeros(8), torch.eye(8))
    for row in range(2):
        means, roots = state[row, :, 0], state[row, :, 1:]
        exact = sum(
            kl_divergence(MultivariateNormal(mean, root @ root.T), standard)
            for mean, root in zip(means, roots, strict=True)
        )
        assert family.kl(state, noise)[row].item() == pytest.approx(exact.item(), rel=1e-4)
    assert family.layers == 6
    for q in ("flow", "mixture"):
        assert Vmi(q=q, layered=True, **SHAPES).family(known).reduction == "mean"


@every_kind
def test_free_layers_do_not_depend_on_the_state(each):
    family = Layered(each, 4, 2)
    state, noise = moved(family).requires_grad_(), normals(2, 3, family.noise)
    latents = family.sample(state, noise).unflatten(2, (4, 4))
    assert (
        not torch.autograd.grad(
            latents[:, :, :2].sum() + 0 * latents[:, :, 2:].sum(), state, retain_graph=True
        )[0]
        .eq(0)
        .all()
    )
    assert torch.autograd.grad(latents[:, :, 2:].sum(), state)[0].abs().max() == 0


def test_a_layers_gradient_stays_in_its_layer():
    family = Layered(ONES["flow"], 3, 3)
    state = moved(family).requires_grad_()
    latents = family.sample(state, normals(2, 3, family.noise)).unflatten(2, (3, 4))
    (slope,) = torch.autograd.grad(latents[:, :, 1].sum(), state)
    assert slope[:, [0, 2]].abs().max() == 0
    assert slope[:, 1].abs().max() > 0


def test_gradients_are_right():
    gaussian = Layered(Gaussian(2), 3, 2)
    state, noise = moved(gaussian).double().requires_grad_(), normals(2, 3, gaussian.noise).double()
    assert torch.autograd.gradcheck(lambda s: gaussian.sample(s, noise), (state,))
    assert torch.autograd.gradcheck(lambda s: gaussian.kl(s, noise), (state,))
    flow = Layered(Flow(2, depth=1, levels=1, hidden=2), 3, 2)
    state, noise = moved(flow).requires_grad_(), normals(2, 2, flow.noise).double()
    assert state.dtype == torch.double
    assert torch.autograd.gradcheck(lambda s: flow.kl(s, noise), (state,))


def test_gradients_through_the_images_are_right():
    known = styled_prior()
    known.generator.double()
    latents = 0.1 * normals(2, 48).double()
    weights = normals(2, *SHAPE, purpose="weights").double()
    inside = Vmi(layered=True).images(known, latents, torch.zeros(2))
    assert ((inside > 0) & (inside < 1)).double().mean() > 0.5  # where nothing is cut off
    assert torch.autograd.gradcheck(
        lambda z: (Vmi(layered=True).images(known, z, torch.zeros(2)) * weights).sum(),
        (latents.requires_grad_(),),
    )


def test_what_a_family_cannot_be():
    for led in (0, 4):
        with pytest.raises(ConfigError, match=f"led must lie in 1..3, got {led}"):
            Layered(Gaussian(2), 3, led)
    with pytest.raises(
        ConfigError, match=r"Layered needs noise of shape \(2, samples, 4\), got \(2, 5, 2\)"
    ):
        Layered(Gaussian(2), 3, 2).sample(moved(Layered(Gaussian(2), 3, 2)), normals(2, 5, 2))


# VMI


def small(**more):
    return Vmi(
        **(
            {"steps": 3, "points": 4, "draws": 5, "keep": 5, "lr": 0.05, "layered": True, **SHAPES}
            | more
        )
    )


def found(attack, known=None, labels=(2,)):
    return invert(
        attack,
        target().view(["gradients"]),
        Assets(prior=known or styled_prior()),
        people=labels,
        seed=0,
        work=NoWork(),
    )


def test_the_style_of_each_latent_is_used_at_its_layer():
    known, latents = styled_prior(), normals(3, 48)
    network = known.generator.network
    with torch.no_grad():
        styles = torch.stack([network.mapping.w(z) for z in latents.split(8, dim=1)], dim=1)
        expected = (network.synthesis(styles) / 2 + 0.5).clamp(0, 1)
        images = small().images(known, latents, torch.zeros(3))
        assert torch.allclose(images, expected, atol=1e-5)
        swapped = small().images(
            known, latents.unflatten(1, (6, 8)).flip(1).flatten(1), torch.zeros(3)
        )
        assert (swapped - expected).abs().mean() > 0.02
        same = small().images(known, latents[:, :8].repeat(1, 6), torch.zeros(3))
        assert torch.allclose(same, known.images(latents[:, :8]), atol=1e-5)


def followed(family, known, *, gamma, steps=3, lr=0.005, points=4, label=0):
    """Momentum written out, the class loss and KL with noise of their own."""
    module, network = target().module.eval(), known.generator.network
    state, v = family.begin(torch.zeros(1, 48)), 0.0
    rng = generator_for(0, "search", label, 0)
    for _ in range(steps):
        state = state.detach().requires_grad_()
        latents = family.sample(state, torch.randn(1, points, family.noise, generator=rng))[0]
        styles = torch.stack([network.mapping.w(z) for z in latents.split(8, dim=1)], dim=1)
        loss = (
            -module((network.synthesis(styles) / 2 + 0.5).clamp(0, 1))
            .log_softmax(1)[:, label]
            .mean()
        )
        loss = (
            loss + gamma * family.kl(state, torch.randn(1, points, family.noise, generator=rng))[0]
        )
        (gradient,) = torch.autograd.grad(loss, state)
        v = 0.9 * v + gradient
        state = state - lr * v
    return family.sample(
        state, torch.randn(1, 5, family.noise, generator=generator_for(0, "read", label, 0))
    )[0].detach()


@pytest.mark.parametrize("q", ["flow", "gaussian"])
@pytest.mark.parametrize("led", [None, 4])
def test_a_few_steps_by_hand(q, led):
    known = styled_prior()
    each, reduction = (Flow(8, **SHAPES), "mean") if q == "flow" else (Gaussian(8), "sum")
    family = Layered(each, 6, led or 6, reduction)
    some = found(small(q=q, identity_layers=led, gamma=5.0, lr=0.005), known, labels=(0,))
    expected = followed(family, known, gamma=5.0)
    assert some.latents.shape == (1, 5, 48)
    assert torch.allclose(some.latents[0], expected[some.draws[0]], atol=1e-4)
    assert (
        expected - followed(family, known, gamma=0.0)
    ).abs().max() > 1e-3  # the comparison can fail


@pytest.mark.parametrize("q", list(ONES))
def test_it_beats_prior_only_draws(q):
    """No selection: all that is drawn from q against as many prior-only draws."""
    known, module = styled_prior(), target().module.eval()
    some = found(
        small(q=q, steps=20, points=8, draws=20, keep=20, lr=0.1, optimizer="adam"),
        known,
        labels=(0, 1, 2, 3),
    )
    draws = prior_only(known, range(4), 20, seed=0)

    def sure(images):
        with torch.no_grad():
            scores = module(images.flatten(0, 1)).softmax(1)
        return (
            scores.gather(1, torch.arange(4).repeat_interleave(20)[:, None])
            .unflatten(0, (4, 20))
            .mean(1)
        )

    assert sure(some.images).mean() > sure(draws.images).mean() + 0.3


def test_other_people_order_and_batch_change_nothing():
    whole = found(small(identity_layers=4), labels=(0, 1, 2, 3))
    for batch, labels in ((1, (2,)), (7, (3, 0)), (100, (1, 2, 0))):
        some = found(small(identity_layers=4, batch=batch), labels=labels)
        assert close_images(some, of_people(whole, list(labels)))


def test_what_cannot_be_is_refused():
    none = r"vmi\.layered needs the layers of a StyleGAN2, but this prior's generator has none"
    with pytest.raises(ConfigError, match=none):
        found(small(), prior())
    shape = (3, 32, 32)
    view = target(shape=shape).view("gradients")
    (problem,) = small().problems(view, Assets(prior=Wgan().untrained(shape, 4)))
    assert re.search(none, problem)
    with pytest.raises(
        ConfigError,
        match=r"vmi\.identity_layers must be at most 6, .* got 7: lower it",
    ):
        found(small(identity_layers=7))
    with pytest.raises(
        ConfigError, match="identity_layers is for layered distributions: set layered to true"
    ):
        Vmi(identity_layers=3)
    untrained = Stylegan2(channel_max=8).untrained(shape, 4)
    assert not small(identity_layers=8).problems(view, Assets(prior=untrained))
