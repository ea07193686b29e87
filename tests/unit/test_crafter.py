"""Crafter and Crafter-z: the gradient in a linear world where it is known, resuming, refusals, and that they protect."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from torch import nn

from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.prior import Prior
from frostglass.defenses.base import defenses
from frostglass.defenses.release._crafting import Inversion
from frostglass.defenses.release.crafter import Crafter
from frostglass.defenses.release.crafter_z import CrafterZ
from frostglass.priors.base import identity_hashes
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, KilledError, MemoryWork, NoWork, conditional_prior, prior

TINY = {
    "steps": 4,
    "critic_steps": 2,
    "critic_batch": 8,
    "critic_width": 4,
    "index_steps": 2,
    "first_steps": 4,
    "pool": 4,
}
OWN = {Crafter: {"inner_steps": 2, "terms": 3}, CrafterZ: {}}
METHODS = tuple(OWN)


def tiny(method, **more):
    return method(**TINY | OWN[method] | more)


def encoder(seed=0):
    with seeded(seed, "tests", "encoder"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )


def pictures(count=6, seed=0):
    """Draws of the prior, so that an inversion can find them."""
    made = prior()
    with frozen(made.generator), torch.no_grad():
        return made.images(torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)))


def released(method, images, *, network=None, made=None, seed=0, work=None, amortizer=None):
    assets = Assets(prior=made or prior(), amortizer=amortizer)
    return method.release(network or encoder(), images, assets, seed=seed, work=work or NoWork())


class Spread(nn.Module):
    """z ↦ ½ + M z as a picture of 3×16×16: linear, and never cut off."""

    def __init__(self, latent, seed=0):
        super().__init__()
        self.register_buffer(
            "mixing", torch.randn(768, latent, generator=torch.Generator().manual_seed(seed)) / 10
        )

    def forward(self, latents):
        return 0.5 + (latents @ self.mixing.T).view(-1, *SHAPE)


class Reading(nn.Module):
    """x ↦ R (x - ½), as many values as the latent has and some more."""

    def __init__(self, features, seed=1):
        super().__init__()
        self.register_buffer(
            "rows", torch.randn(features, 768, generator=torch.Generator().manual_seed(seed)) / 28
        )

    def forward(self, images):
        return (images - 0.5).flatten(1) @ self.rows.T


def linear_world(latent=4, features=7):
    """Enc∘G = K, a matrix: the inversion of F is K⁺F."""
    generator, network = Spread(latent), Reading(features)
    made = Prior(
        generator=generator,
        critic=None,
        latent=latent,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
        key="linear",
    )
    return made, network, network.rows @ generator.mixing


def craft_of(method, made, network, originals, seed=0):
    craft = method._untouched(
        Inversion(network, made, method.scale, method.realism), None, originals, seed
    )
    method._open(craft, seed)
    return craft


@pytest.mark.parametrize("method", METHODS)
def test_off_releases_the_plain_features_to_the_bit(method):
    network, images = encoder(), pictures()
    made = method(**method.off).release(network, images, Assets(), seed=0, work=NoWork())
    with frozen(network), torch.no_grad():
        assert torch.equal(made.features, network(images))
    assert made.facts == ()
    assert method(**method.off).needs == frozenset()


@pytest.mark.parametrize("method", METHODS)
def test_networks_and_global_draws_are_left_as_they_were(method):
    network, made = encoder(), prior()
    network[1].weight.grad = torch.ones(6)
    before = {
        id(m): {k: t.clone() for k, t in m.state_dict().items()} for m in (network, *made.modules)
    }
    state = torch.random.get_rng_state()
    images = pictures()
    out = released(tiny(method), images, network=network, made=made)
    assert torch.equal(torch.random.get_rng_state(), state)
    for module in (network, *made.modules):
        assert module.training
        assert all(p.requires_grad for p in module.parameters())
        assert all(torch.equal(t, before[id(module)][k]) for k, t in module.state_dict().items())
    assert torch.equal(network[1].weight.grad, torch.ones(6))
    assert network[0].weight.grad is None
    with frozen(network), torch.no_grad():
        plain = network(images)
    assert not out.features.requires_grad
    assert out.features.shape == plain.shape
    assert (out.features - plain).abs().mean() > 1e-4


@cache
def undisturbed(method):
    return released(tiny(method, checkpoint_every=2, batch=3), pictures(6))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("died_after", [1, 2, 3, 5])
def test_a_killed_release_ends_with_the_same_bytes(method, died_after):
    chosen, images, whole = (
        tiny(method, checkpoint_every=2, batch=3),
        pictures(6),
        undisturbed(method),
    )
    work = MemoryWork(
        saves_before_death=died_after
    )  # each of two batches saves its opening, its middle and its end
    with pytest.raises(KilledError):
        released(chosen, images, work=work)
    work.left = None
    resumed = released(chosen, images, work=work)
    assert torch.equal(whole.features, resumed.features)
    assert whole.facts == resumed.facts
    assert len(whole.facts) == 2


def test_a_release_killed_between_two_looks_ends_with_the_same_bytes():
    chosen = tiny(
        Crafter,
        steps=24,
        checkpoint_every=7,
        critic_steps=1,
        inner_steps=1,
        terms=1,
        lr=0.05,
        tolerance=0.3,
    )
    whole, work = released(chosen, pictures(3)), MemoryWork(saves_before_death=3)
    with pytest.raises(KilledError):
        released(chosen, pictures(3), work=work)
    assert work.kept["crafter"][1]["done"] == 14
    work.left = None
    resumed = released(chosen, pictures(3), work=work)
    assert torch.equal(whole.features, resumed.features)
    assert whole.facts == resumed.facts


@pytest.mark.parametrize("method", METHODS)
def test_every_part_of_a_batch_is_restored(method):
    made, network, _ = linear_world()
    chosen, originals = tiny(method), torch.randn(3, 7, generator=torch.Generator().manual_seed(4))
    craft = craft_of(chosen, made, network, originals)
    for number in range(3):
        chosen._step(craft, torch.Generator().manual_seed(number), "")
    craft.anchor, craft.direction, craft.still = craft.anchor + 1, craft.direction + 1, True
    other = chosen._untouched(craft.inversion, None, originals, 0)
    work = MemoryWork()
    work.save("craft", *craft.saved(0))
    other.restore(*work.load("craft"), chosen.lr)
    for part in fields(craft):
        one, two = getattr(craft, part.name), getattr(other, part.name)
        if part.name not in ("judge", "rule"):  # those are seen in what they do next
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, part.name
    assert other.done == 3
    chosen._step(craft, torch.Generator().manual_seed(3), "")
    chosen._step(other, torch.Generator().manual_seed(3), "")
    assert torch.equal(craft.latents, other.latents)
    craft.note(torch.full((3,), 1e9), craft.direction)
    craft.note(torch.zeros(3), craft.direction)
    assert craft.curvature.tolist() == [1e9] * 3  # the largest met is kept


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_near_equal_and_on_their_own(method):
    chosen, images = tiny(method, batch=3), pictures(7)
    made = released(chosen, images)
    assert [row["pictures"] for row in made.facts] == [3, 2, 2]
    first = released(chosen, images[:3])
    assert torch.allclose(
        made.features[:3], first.features, atol=1e-6
    )  # the same seed, number and company
    assert [row["pictures"] for row in released(chosen, images[:3]).facts] == [
        3
    ]  # nobody is left alone
    assert not torch.equal(released(chosen, images, seed=1).features, made.features)


@pytest.mark.parametrize("method", METHODS)
def test_facts_are_what_can_be_measured_from_outside(method):
    network, made, images = encoder(), prior(), pictures(5)
    out = released(tiny(method), images, network=network, made=made)
    (row,) = out.facts
    with frozen(network), torch.no_grad():
        plain = network(images)
    assert row["deviation"] == pytest.approx(
        (out.features - plain).square().flatten(1).sum(1).mean().item() / plain[0].numel(), rel=1e-4
    )
    assert row["pictures"] == 5
    assert row["steps"] == 4
    own = {"residual_end", "gradient_end", "terms", "fewest_terms"} if method is Crafter else set()
    assert (
        set(row)
        == {
            "pictures",
            "steps",
            "emd_start",
            "emd_end",
            "deviation",
            "residual_start",
            "gradient_start",
        }
        | own
    )
    assert all(isinstance(value, float | int) for value in row.values())


def test_the_gradient_in_a_linear_world():
    """∂/∂F of β‖F - F₀‖² / d - D(G(K⁺F)), the inversion written out."""
    made, network, matrix = linear_world()
    method = tiny(
        Crafter,
        first_steps=400,
        beta=3.0,
        solver="conjugate_gradient",
        damping=0.0,
        terms=30,
        inner_momentum=0.5,
    )
    originals = torch.randn(5, 7, generator=torch.Generator().manual_seed(4))
    craft = craft_of(method, made, network, originals)
    assert torch.allclose(craft.latents, originals @ torch.linalg.pinv(matrix).T, atol=1e-3)
    moved = originals + 0.1
    craft.let_go(moved, 0.01)
    craft.latents = moved @ torch.linalg.pinv(matrix).T
    found = method.slope(craft)
    leaf = moved.clone().requires_grad_()
    loss = 3.0 * (leaf - originals).square().sum(1) / 7 - craft.judge.opinion(
        made.images(leaf @ torch.linalg.pinv(matrix).T)
    )
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert 4 <= craft.facts["terms"] < 30  # about as many as the latent has directions
    series = replace(method, solver="neumann", terms=1000).slope(craft)
    assert torch.allclose(series, expected, rtol=1e-2, atol=1e-4)


def test_the_latent_gradient_by_hand():
    made, network, matrix = linear_world()
    originals = torch.randn(3, 7, generator=torch.Generator().manual_seed(4))
    method = tiny(CrafterZ, beta=2.0)
    craft = craft_of(method, made, network, originals)
    latents = craft.free.detach()
    opinion = torch.autograd.functional.jacobian(
        lambda z: craft.judge.opinion(made.images(z)).sum(), latents
    )
    expected = 2.0 * 2 / 7 * (latents @ matrix.T - originals) @ matrix - opinion
    assert torch.allclose(method.slope(craft), expected, rtol=1e-3, atol=1e-5)


def test_beta_decides_between_use_and_protection():
    images = pictures(8)
    settings = {"steps": 12, "lr": 0.01, "first_steps": 80}
    for method in METHODS:
        useful, hidden = (
            released(tiny(method, **settings, beta=beta), images).facts[0]["deviation"]
            for beta in (1e4, 0.0)
        )
        assert useful < 0.5 * hidden


def test_an_inversion_of_crafted_features_finds_somebody_else():
    """Pictures of one corner of the latent space: what is rebuilt of their crafted features has gone towards the draws, noise of the same
    size has not."""
    made, network = prior(), encoder()
    with frozen(made.generator), torch.no_grad():
        latents = 2.0 + 0.1 * torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
        images = made.images(latents)
    settings = TINY | {
        "steps": 40,
        "critic_steps": 5,
        "critic_width": 8,
        "first_steps": 100,
        "index_steps": 60,
    }
    out = released(
        Crafter(**settings, beta=5.0, lr=0.003, critic_lr=5e-3), images, network=network, made=made
    )
    (row,) = out.facts
    assert row["emd_end"] < 0.4 * row["emd_start"]
    with frozen(network, made.generator):
        plain = network(images)
        noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5))
        noisy = plain + noise * (out.features - plain).square().mean().sqrt()
        errors = {
            name: rebuilt_error(network, made, features, images)
            for name, features in (("plain", plain), ("noisy", noisy), ("crafted", out.features))
        }
    assert errors["crafted"] > 100 * errors["plain"]
    assert errors["crafted"] > 1.5 * errors["noisy"]


def rebuilt_error(network, made, features, images):
    """Mean squared error of what another inversion, from other starts and by Adam, makes of features."""
    latents = torch.randn(
        len(features), 6, generator=torch.Generator().manual_seed(9)
    ).requires_grad_()
    rule = torch.optim.Adam([latents], lr=0.1)
    for _ in range(150):
        loss = (network(made.images(latents)) - features).square().sum()
        (latents.grad,) = torch.autograd.grad(loss, latents)
        rule.step()
    return (made.images(latents) - images).square().mean().item()


def test_what_crafter_z_releases_is_made_of_a_picture():
    made, network, matrix = linear_world()
    images = made.images(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))) + 0.2
    out = released(tiny(CrafterZ), images, network=network, made=made)
    onto = matrix @ torch.linalg.pinv(matrix)  # the projection onto what Enc∘G can make
    assert torch.allclose(out.features @ onto.T, out.features, atol=1e-4)
    assert not torch.allclose(network(images) @ onto.T, network(images), atol=1e-2)
    assert "residual_end" not in out.facts[0]


def test_an_exact_amortizer_leaves_nothing_to_search():
    made, network, matrix = linear_world()
    inverse = nn.Linear(7, 4, bias=False)
    inverse.weight.data = torch.linalg.pinv(matrix)
    images = made.images(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    method = tiny(Crafter, first_steps=0, amortized=True)
    assert method.needs == {"prior", "amortizer"}
    assert Crafter().needs == {"prior"}
    (row,) = released(method, images, network=network, made=made, amortizer=inverse).facts
    assert row["residual_start"] < 1e-8
    assert row["gradient_start"] < 1e-4
    (blind,) = released(tiny(Crafter, first_steps=0), images, network=network, made=made).facts
    assert blind["residual_start"] > 1e-3


@pytest.mark.parametrize(("warm", "calls"), [(True, 1), (False, 5)])
def test_cold_inversions_begin_at_a_guess_each_time(warm, calls):
    made, network, _ = linear_world()

    class Counting(nn.Linear):
        asked = 0

        def forward(self, features):
            Counting.asked += 1
            return super().forward(features)

    images = made.images(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    released(
        tiny(Crafter, amortized=True, warm=warm),
        images,
        network=network,
        made=made,
        amortizer=Counting(7, 4),
    )
    assert Counting.asked == calls  # once for the plain features, once after each of four steps


def test_it_stops_when_nothing_moves():
    images = pictures()
    assert released(tiny(CrafterZ, steps=12, tolerance=0.99), images).facts[0]["steps"] == 10
    assert released(tiny(CrafterZ, steps=12), images).facts[0]["steps"] == 12


def test_progress_is_told_over_all_batches():
    told = []

    class Telling(NoWork):
        def progress(self, done, total, note=""):
            told.append((done, total, note.split()[0]))

    released(tiny(CrafterZ, batch=3), pictures(6), work=Telling())
    assert told == [(done, 8, "distance") for done in range(1, 9)]


def test_given_step_sizes_are_taken():
    images = pictures(3)
    made = [
        released(tiny(Crafter, **more), images).features
        for more in ({}, {"inner_lr": 0.01}, {"alpha": 1e-3}, {"inner_lr": 0.01, "scale": 3.0})
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(made) for b in made[:i])
    assert torch.allclose(
        released(tiny(Crafter, scale=3.0), images).features, made[0], atol=1e-4
    )  # what is found by curvature has no scale


@pytest.mark.parametrize("method", METHODS)
def test_refusals(method):
    images = pictures()
    chosen = tiny(method)
    name = chosen.name
    with pytest.raises(
        ConfigError,
        match=rf"{name} compares sets of pictures and needs at least 2, got 1: protect several together",
    ):
        released(chosen, images[:1])
    with pytest.raises(
        ConfigError, match=rf"{name} needs the prior, and none is given: pass prior=\.\.\."
    ):
        chosen.release(encoder(), images, Assets(), seed=0, work=NoWork())
    with pytest.raises(ConfigError, match=rf"{name} needs the amortizer, and none is given"):
        released(replace(chosen, amortized=True), images)
    with pytest.raises(
        ConfigError,
        match="the prior makes pictures of 3×32×32 and the encoder takes 3×16×16: use a prior of the data's own shape",
    ):
        released(chosen, images, made=prior((3, 32, 32)))
    with pytest.raises(
        ConfigError,
        match=f"the critic of {name} takes square pictures of 8, 16, 32, ... pixels, got 12×12",
    ):
        released(chosen, images[:, :, :12, :12], made=prior((3, 12, 12)))
    with pytest.raises(ConfigError, match="also takes a label: use another, such as wgan"):
        released(chosen, images, made=conditional_prior("label"))
    with pytest.raises(ConfigError, match=f"{name}.realism is not 0 and the prior has no critic"):
        released(replace(chosen, realism=1.0), images, made=prior(critic=False))
    with pytest.raises(ConfigError, match="none pass the encoder: a part of it is detached"):
        released(chosen, images, network=Detached(encoder()))


class Detached(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        return self.inner(images.detach())


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (Crafter, {"inner_lr": 1e30, "first_steps": 20}),
        (CrafterZ, {"inner_lr": 1e30, "first_steps": 20}),
        (Crafter, {"inner_lr": 1e30, "first_steps": 0}),
        (Crafter, {"critic_lr": 1e30}),
        (CrafterZ, {"critic_lr": 1e30}),
        (CrafterZ, {"lr": 1e36}),
    ],
)
def test_what_is_not_finite_is_an_error(method, wrong):
    made, network, _ = linear_world()  # nothing here is squashed
    images = made.images(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(
        RunError,
        match=rf"{method.name}: .*not finite.*: lower inner_lr, alpha, lr or critic_lr; the last good checkpoint is kept",
    ):
        released(tiny(method, **wrong), images, network=network, made=made)


@pytest.mark.parametrize("method", METHODS)
def test_published_sizes(method):
    why, sizes = method.variants["published"]
    made = method(**sizes)
    assert "paper" in why
    assert made.amortized
    assert (
        made.batch,
        made.critic_width,
        made.critic_steps,
        made.critic_batch,
        made.critic_lr,
    ) == (128, 64, 10, 32, 5e-4)
    if method is Crafter:
        assert (made.steps, made.alpha, made.terms, made.inner_steps, made.lr, made.penalty) == (
            450,
            1e-3,
            120,
            80,
            0.01,
            20.0,
        )
        assert made.scale == 2000 / 128
    else:
        assert (made.steps, made.first_steps, made.lr, made.penalty, made.beta) == (
            500,
            110,
            0.005,
            15.0,
            20 / 16,
        )


@pytest.mark.parametrize("method", METHODS)
def test_it_acts_at_release_alone(method):
    assert method.releases
    assert method.takes_attributes
    assert defenses.get(method.name) is method
    assert method().replaces() == frozenset()
    with pytest.raises(ConfigError, match=r"batch: expected at least 2, got 1"):
        method(batch=1)
