"""Attacks on features, on worlds whose answers are known: linear ones, deaf ones and noisy ones."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.attacks.features import _learned as learned
from frostglass.attacks.features._learned import Lessons, units_of
from frostglass.attacks.features.base import (
    FeatureAttack,
    Ledger,
    Rebuilt,
    intercept,
    spread_evenly,
)
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.hybrid import Hybrid, total_variation
from frostglass.attacks.features.latent import Latent
from frostglass.attacks.features.mapper import Mapper, build_mapper
from frostglass.core.assets import Assets
from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Halves, Images
from frostglass.core.views import FeatureView
from frostglass.networks.embedding import embed, public_centre
from frostglass.priors.base import identity_hashes
from frostglass.runtime.seeding import seeded
from frostglass.store.files import Work
from worlds import MemoryWork, conditional_prior, target
from worlds import prior as small_prior

FLAT = (1, 4, 4)
LATENT = 5


class Affine(nn.Module):
    """Pictures that are linear in the latent, with pixels around 0.5."""

    def __init__(self, shape=FLAT, latent=LATENT):
        super().__init__()
        self.shape = shape
        with seeded(0, "tests", "affine"):
            self.weight = nn.Parameter(torch.randn(latent, shape[0] * shape[1] * shape[2]) * 0.05)

    def forward(self, latents):
        return (0.5 + latents @ self.weight).unflatten(1, self.shape)


def affine_prior(critic=None) -> Prior:
    return Prior(
        generator=Affine(),
        critic=critic,
        latent=LATENT,
        image_shape=FLAT,
        seen_identities=identity_hashes([]),
    )


def seen(encoder, pictures, access, **more) -> FeatureView:
    with torch.no_grad():
        released = encoder.eval()(pictures)
    return FeatureView(
        Halves(encoder, nn.Identity(), tuple(pictures.shape[1:]), tuple(released.shape[1:]), "x"),
        released,
        access,
        **more,
    )


def draws(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def album(pictures) -> Images:
    """Public pictures of the given floats."""
    count = len(pictures)
    return Images(
        (pictures * 255).round().byte(),
        torch.arange(count),
        tuple(map(str, range(count))),
        tuple(map(str, range(count))),
    )


def blobs(count, seed, shape=(3, 8, 8)) -> torch.Tensor:
    """Smooth random pictures."""
    coarse = draws(count, shape[0], 3, 3, seed=seed)
    return torch.sigmoid(
        2 * F.interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=True)
    )


def run(attack, view, assets=None, people=None, **more):
    labels = torch.arange(people or len(view.released))
    return intercept(attack, view, assets or Assets(), labels, **more)


def mistake(found, pictures):
    """The mean squared error of all candidates, each against its picture."""
    flat = pictures.unflatten(0, (len(found.labels), -1)).repeat_interleave(
        found.images.shape[1] * len(found.labels) // len(pictures), 1
    )
    return (found.images - flat).square().mean().item()


# --- latent ---------------------------------------------------------------------------------------------------------------------------------


def test_latent_recovers_the_latents_of_a_linear_world():
    prior, truth = affine_prior(), draws(3, LATENT)
    view = seen(nn.Flatten(), prior.generator(truth).detach(), ["encoder"])
    found = run(Latent(steps=500, tries=2), view, Assets(prior=prior))
    assert found.latents.shape == (3, 2, LATENT)
    assert torch.allclose(found.latents, truth[:, None].expand(3, 2, LATENT), atol=1e-3)
    assert torch.allclose(found.confidence, torch.ones(3, 2), atol=1e-5)
    assert found.queries == view.queries == 3 * 2 * 500
    assert not found.broken.any()
    assert not found.partial.any()


def test_an_amortizer_that_is_the_inverse_leaves_nothing_to_search():
    class Inverse(nn.Module):
        def forward(self, features):
            return (features - 0.5) @ torch.linalg.pinv(prior.generator.weight.detach())

    prior, truth = affine_prior(), draws(4, LATENT)
    view = seen(nn.Flatten(), prior.generator(truth).detach(), ["encoder"])
    attack = Latent(steps=0, tries=3, start="amortized", noise=0.25)
    found = run(attack, view, Assets(prior=prior, amortizer=Inverse()))
    assert torch.allclose(found.latents[:, 0], truth, atol=1e-5)
    away = found.latents[:, 1:] - found.latents[:, :1]
    assert away.std() == pytest.approx(0.25, rel=0.3)
    assert found.queries == 0


@pytest.mark.parametrize("coupling", [1, 128])
def test_the_published_search_is_the_published_recursion(coupling):
    prior, truth = affine_prior(), draws(2, LATENT)
    view = seen(nn.Flatten(), prior.generator(truth).detach(), ["encoder"])
    attack = Latent(
        gap="norm", scale=100.0, optimizer="momentum", lr=0.005, coupling=coupling, steps=9, tries=1
    )
    beginning = run(replace(attack, steps=0), view, Assets(prior=prior)).latents[:, 0]
    found = run(attack, view, Assets(prior=prior)).latents[:, 0]
    for row in range(2):
        z, v = beginning[row].double(), 0
        for _ in range(9):
            apart = 0.5 + z @ prior.generator.weight.detach().double() - view.released[row].double()
            v = (
                0.9 * v
                + 100
                / coupling**0.5
                * (prior.generator.weight.detach().double() @ apart)
                / apart.norm()
            )
            z = z - 0.005 * v
        assert torch.allclose(found[row].double(), z, atol=1e-4)


def test_published_parameters():
    why, sets = Latent.variants["published"]
    published = Latent(**sets)
    assert (published.gap, published.scale, published.optimizer, published.momentum) == (
        "norm",
        100.0,
        "momentum",
        0.9,
    )
    assert (published.lr, published.steps, published.tries, published.critic_weight) == (
        0.005,
        600,
        3,
        0.0,
    )
    amortized = Latent(**Latent.variants["amortized"][1])
    assert (amortized.start, amortized.steps, amortized.critic_weight) == ("amortized", 100, 100.0)
    assert "three random starts" in why
    assert Decoder(**Decoder.variants["pixel"][1]).norm == "batch_norm"
    assert Decoder(**Decoder.variants["adaptive"][1]).adapt_epochs == 70
    assert (Hybrid().steps, Hybrid().lr) == (150, 0.005)


@pytest.mark.parametrize("gap", ["mean_square", "norm"])
def test_the_gap_is_the_slow_one(gap):
    attack = Latent(gap=gap)
    made, wanted = draws(3, 2, 4, 4).double().requires_grad_(), draws(3, 2, 4, 4, seed=1).double()
    squares = [
        sum(((a - b) ** 2).item() for a, b in zip(m.flatten(), w.flatten(), strict=True))
        for m, w in zip(made, wanted, strict=True)
    ]
    slow = (
        [total / 32 for total in squares]
        if gap == "mean_square"
        else [total**0.5 for total in squares]
    )
    assert attack.gaps(made, wanted).tolist() == pytest.approx(slow)
    assert torch.autograd.gradcheck(lambda some: attack.gaps(some, wanted), made)


def test_a_perfect_match_has_no_slope():
    feature = draws(2, 6).requires_grad_()
    (slope,) = torch.autograd.grad(
        Latent(gap="norm").gaps(feature, feature.detach()).sum(), feature
    )
    assert (slope == 0).all()


def test_the_best_of_a_pool_is_where_random_starts_begin():
    prior, truth = affine_prior(), draws(3, LATENT)
    view = seen(nn.Flatten(), prior.generator(truth).detach(), ["encoder"])
    found = run(Latent(steps=0, tries=2, pool=100), view, Assets(prior=prior))
    assert found.queries == view.queries == 100
    pool = draws(
        100, LATENT, seed=learned.generator_for(0, "latent", "start", "pool").initial_seed()
    )
    gaps = torch.cdist(prior.generator(pool).detach().flatten(1), view.released)
    best = pool[gaps.T.argsort(1)[:, :2]]
    assert torch.equal(found.latents, best)
    blind = run(Latent(steps=0, tries=2), view, Assets(prior=prior))
    assert mistake(found, prior.generator(truth)) < 0.5 * mistake(blind, prior.generator(truth))


def test_the_critic_is_climbed_where_features_say_nothing():
    class Brightness(nn.Module):
        def forward(self, images):
            return images.flatten(1).mean(1, keepdim=True)

    prior = affine_prior(Brightness())
    view = seen(Deaf(), torch.full((2, *FLAT), 0.5), ["encoder"])
    attack = Latent(steps=50, tries=1, lr=0.01, optimizer="momentum", critic_weight=10.0)
    start, end = (run(replace(attack, steps=steps), view, Assets(prior=prior)) for steps in (0, 50))
    coupled = run(replace(attack, coupling=10), view, Assets(prior=prior))
    uphill = prior.generator.weight.detach().mean(1)
    moved, less = ((some.latents - start.latents)[:, 0] for some in (end, coupled))
    assert torch.allclose(F.cosine_similarity(moved, uphill[None]), torch.ones(2))
    assert torch.allclose(moved, 10 * less, rtol=1e-3)


def test_the_generator_learns_what_an_encoder_that_forgets_goes_with():
    """The lower half of a picture is the upper one, the device lets out the upper one, and the generator thinks the lower one is grey."""

    class Upper(nn.Module):
        def forward(self, images):
            return images[:, :, :2].flatten(1)

    upper = torch.full((40, 8), 0.5)
    upper[:, :LATENT] += 0.25 * draws(40, LATENT).clamp(-1.5, 1.5)
    pictures = torch.cat([upper, upper], 1).unflatten(1, FLAT)
    prior = affine_prior()
    with torch.no_grad():
        prior.generator.weight.copy_(0)
        prior.generator.weight[:, :LATENT] = torch.eye(LATENT)
    before = copy.deepcopy(prior.generator.state_dict())
    view = seen(Upper(), pictures[:4], ["encoder", "protection"])
    plain, adaptive = (
        Latent(steps=60, tries=1, adapt=adapt, adapt_rounds=3, adapt_epochs=40, adapt_lr=1e-2)
        for adapt in (0, 36)
    )
    assets = Assets(album(pictures[4:]), prior)
    naive, wise = (run(attack, view, assets) for attack in (plain, adaptive))
    assert mistake(wise, pictures[:4]) < 0.05 * mistake(naive, pictures[:4])
    assert wise.queries == 36 + 3 * 27 * 60 + 4 * 9 * 60 + 4 * 60
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in prior.generator.state_dict().items()
    )
    assert prior.generator.weight.requires_grad
    assert prior.generator.weight.grad is None


def test_what_latent_refuses():
    view = seen(nn.Flatten(), torch.full((2, *FLAT), 0.5), ["encoder"])
    with pytest.raises(
        ConfigError, match=r"latent needs the prior, and none is given: pass prior=\.\.\."
    ):
        run(Latent(), view)
    with pytest.raises(
        ConfigError, match=r"latent needs the amortizer, and none is given: pass amortizer=\.\.\."
    ):
        run(Latent(start="amortized"), view, Assets(prior=affine_prior()))
    with pytest.raises(
        ConfigError,
        match=r"latent\.critic_weight is not 0 and the prior has no critic: set it to 0",
    ):
        run(Latent(critic_weight=1.0), view, Assets(prior=affine_prior()))
    with pytest.raises(
        ConfigError, match="the prior makes pictures of 3×16×16, the encoder takes 1×4×4"
    ):
        run(Latent(), view, Assets(prior=small_prior()))
    with pytest.raises(
        ConfigError,
        match="knows nothing of a victim, and this prior makes pictures of a given label: use another",
    ):
        run(Latent(), view, Assets(prior=conditional_prior("label")))
    with pytest.raises(
        ConfigError, match=r"latent\.adapt asks for 8 public pictures, and there are 0: lower it"
    ):
        run(Latent(adapt=8), view, Assets(prior=affine_prior()))
    with pytest.raises(
        ConfigError,
        match=r"the amortizer guesses \(16,\) for a feature, and the prior takes latents of 5",
    ):
        run(Latent(start="amortized"), view, Assets(prior=affine_prior(), amortizer=nn.Identity()))
    with pytest.raises(ConfigError, match="pool ranks random starts, and start is 'amortized'"):
        Latent(start="amortized", pool=10)
    with pytest.raises(ConfigError, match=r"pool \(2\) must be 0 or at least tries \(3\)"):
        Latent(pool=2)


def test_a_prior_of_another_size_is_resized_where_that_is_wanted():
    view = seen(nn.Flatten(), torch.full((2, *FLAT), 0.5), ["encoder"])
    found = run(
        Latent(steps=2, tries=1), view, Assets(prior=replace(small_prior(), info={"resize": True}))
    )
    assert found.images.shape == (2, 1, *FLAT)


class Sour(nn.Module):
    """An encoder whose feature is not finite for pictures brighter than a bound."""

    def forward(self, images):
        flat = images.flatten(1)
        return flat + torch.where(flat.mean(1, keepdim=True) > 0.6, torch.nan, 0.0)


def test_searches_that_break_off_are_marked_and_if_all_do_it_is_an_error():
    prior = affine_prior()
    view = seen(Sour(), torch.full((6, *FLAT), 0.5), ["encoder"])
    start = run(Latent(steps=0, tries=1), view, Assets(prior=prior))
    with torch.no_grad():
        brightest = prior.generator(start.latents[:, 0]).flatten(1).mean(1)
        prior.generator.weight *= (
            0.1 / (brightest - 0.5).sort().values[-2:].mean()
        )  # so that one of the six is too bright
    found = run(Latent(steps=3, tries=1, lr=1e-4), view, Assets(prior=prior), people=6)
    assert found.broken.sum() == 1
    assert found.partial.tolist() == found.broken[:, 0].tolist()
    with torch.no_grad():
        prior.generator.weight *= 1e-6
    with pytest.raises(
        RunError,
        match="latent: no search came to its end, because the loss was not finite: lower its lr",
    ):
        run(
            Latent(steps=3, tries=1, lr=1e30),
            seen(nn.Flatten(), draws(2, *FLAT), ["encoder"]),
            Assets(prior=prior),
        )


# --- decoder --------------------------------------------------------------------------------------------------------------------------------


def mixing(channels=3) -> nn.Conv2d:
    """An invertible linear encoder: colours are mixed, and moved far from where they were."""
    layer = nn.Conv2d(channels, channels, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.qr(draws(channels, channels)).Q[:, :, None, None])
        layer.bias.copy_(torch.linspace(3, 9, channels))
    return layer.requires_grad_(False)


class Deaf(nn.Module):
    """An encoder that lets out the same feature for every picture."""

    def forward(self, images):
        return torch.ones(len(images), 4, 4, 4) + 0 * images.mean()


def test_a_decoder_undoes_an_invertible_linear_encoder():
    victims = blobs(6, 1)
    view = seen(mixing(), victims, ["encode"])
    found = run(Decoder(epochs=25, batch=16, width=12, lr=5e-3), view, Assets(album(blobs(120, 2))))
    assert mistake(found, victims) < 0.04 * victims.var(0).mean()
    assert found.images.shape == (6, 1, 3, 8, 8)
    assert found.latents.shape == (6, 1, 0)
    assert (found.confidence > 0.9).all()
    assert found.queries == view.queries == 2 * 120


@pytest.mark.parametrize(
    "attack",
    [
        Decoder(epochs=10, batch=16, width=4, lr=1e-2),
        Mapper(epochs=10, batch=16, width=4, hidden=16),
        Latent(steps=20, tries=2),
        Hybrid(
            start="decoder", starter={"epochs": 10, "batch": 16, "width": 4, "lr": 1e-2}, steps=20
        ),
        Hybrid(start="noise", steps=20),
    ],
    ids=lambda attack: f"{attack.name} {getattr(attack, 'start', '')}",
)
def test_features_that_say_nothing_give_nothing(attack):
    """No attack on a device that is deaf does better than the mean of the public pictures, beyond what the learning of that mean is out by."""
    victims, public = blobs(8, 1, (3, 16, 16)), blobs(60, 2, (3, 16, 16))
    assets = Assets(album(public), small_prior(), embedder=target())
    found = run(attack, seen(Deaf(), victims, attack.granted), assets)
    assert mistake(found, victims) > 0.97 * (victims - public.mean(0)).square().mean().item()
    assert (found.confidence == 0).all()
    first = found.images[:1].expand_as(found.images)
    assert torch.equal(found.images, first) or attack.name in ("latent", "hybrid")


def test_a_decoder_for_large_features_asks_again_and_counts_that(monkeypatch):
    victims, assets = blobs(3, 1), Assets(album(blobs(30, 2)))
    attack = Decoder(epochs=3, batch=8, width=4, validation=0.2)
    kept, anew = seen(mixing(), victims, ["encode"]), seen(mixing(), victims, ["encode"])
    once = run(attack, kept, assets)
    monkeypatch.setattr(learned, "FITS", 1)
    each = run(attack, anew, assets)
    assert torch.equal(once.images, each.images)
    assert once.queries == 2 * 30
    assert (
        each.queries == 30 + 6 + 3 * 30
    )  # for the units, for a first look at those held out, and in each epoch
    unflipped = run(replace(attack, flips=False), seen(mixing(), victims, ["encode"]), assets)
    assert unflipped.queries == each.queries
    monkeypatch.setattr(learned, "FITS", 2**30)
    assert (
        run(replace(attack, flips=False), seen(mixing(), victims, ["encode"]), assets).queries == 30
    )


def test_small_features_hide_nothing():
    """With features in units of their own a device that divides its features by a power of two changes no bit of the result."""
    victims, assets = blobs(3, 1), Assets(album(blobs(30, 2)))
    loud, faint = mixing(), mixing()
    with torch.no_grad():
        faint.weight /= 2**14
        faint.bias /= 2**14
    attack = Decoder(epochs=2, batch=8, width=4)
    found, same = (
        run(attack, seen(encoder, victims, ["encode"]), assets) for encoder in (loud, faint)
    )
    assert torch.equal(found.images, same.images)
    bare = replace(attack, standardize=False)
    found, other = (
        run(bare, seen(encoder, victims, ["encode"]), assets) for encoder in (loud, faint)
    )
    assert not torch.allclose(found.images, other.images, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5,), 0),
        ((5, 4, 4), (0, 2, 3)),
        ((4, 4, 5), (0, 1, 2)),
        ((6, 5), (0, 1)),
        ((3, 2, 4, 4), (0, 2, 3, 4)),
    ],
)
def test_units_are_those_of_numpy(shape, axes):
    features = draws(40, *shape) * 3 + 7
    mean, deviation = units_of(features)
    assert torch.allclose(
        mean, torch.tensor(features.numpy().mean(axes, keepdims=True)[0]), atol=1e-5
    )
    assert torch.allclose(
        deviation, torch.tensor(features.numpy().std(axes, keepdims=True)[0]), atol=1e-5
    )


def test_a_dead_channel_is_not_blown_up():
    features = draws(40, 3)
    features[:, 1] = 2.0
    assert units_of(features)[1, 1] == pytest.approx(1e-7 * units_of(features)[1].max().item())
    assert (units_of(torch.ones(4, 3))[1] > 0).all()


@pytest.mark.parametrize("better", [True, False])
def test_adapting_to_a_protection_that_lies(better):
    """The device turns its features round; who only knows the plain ones sees negatives."""
    victims, encoder = blobs(5, 1), mixing()

    def protect(images, number):
        return encoder(1 - images) if better else encoder(images)

    view = FeatureView(
        Halves(encoder, nn.Identity(), (3, 8, 8), (3, 8, 8), "x"),
        protect(victims, 0),
        ["encode", "protection"],
        protect=protect,
    )
    naive, wise = (
        Decoder(epochs=6, batch=16, width=8, lr=5e-3, adapt=adapt, adapt_epochs=25)
        for adapt in (0, 60)
    )
    assets = Assets(album(blobs(80, 2)))
    errors = [mistake(run(attack, view, assets), victims) for attack in (naive, wise)]
    if better:
        assert errors[1] < 0.1 * errors[0]
    else:  # nothing to learn: what was known is not lost
        assert errors[1] < 1.2 * errors[0]


def test_protected_pictures_are_asked_for_once_and_in_one_call():
    calls, victims, encoder = [], blobs(2, 1), mixing()

    def protect(images, number):
        calls.append((len(images), number))
        return encoder(images)

    view = seen(encoder, victims, ["encode", "protection"], protect=protect)
    attack = Decoder(epochs=1, batch=8, width=4, adapt=10, adapt_epochs=4)
    found = run(attack, view, Assets(album(blobs(20, 2))), work=(work := MemoryWork()))
    assert calls == [(10, 0)]
    assert found.queries == 2 * 20 + 10
    assert work.kept["protected"][0]["made"].shape == (10, 3, 8, 8)


def test_the_epoch_that_errs_least_on_held_out_pictures_is_kept():
    class Scripted:
        """Moves the network's only number along a script."""

        def __init__(self):
            self.network, self.script = (
                nn.Linear(1, 1, bias=False).requires_grad_(False),
                [5.0, 3.0, 1.5, 4.0],
            )

        def step(self, features, answers):
            self.network.weight.fill_(self.script.pop(0))
            return 0.0

        def tensors(self):
            return {}

    for share, kept in ((0.25, 1.5), (0.0, 4.0)):
        student = Scripted()
        student.network.weight.fill_(9.0)
        lessons = Lessons(
            8,
            lambda places, _: torch.ones(len(places), 1),
            lambda places, _: torch.ones(len(places), 1),
            False,
        )
        ledger = Ledger(MemoryWork(), seen(nn.Flatten(), torch.zeros(1, *FLAT), []))
        Decoder(validation=share)._learn(
            "x", student, student.network, lessons, 4, seed=0, ledger=ledger
        )
        assert student.network.weight.item() == kept


def test_nothing_is_learned_from_held_out_pictures():
    used, looked = set(), set()

    class Watching:
        def step(self, features, answers):
            used.update(features[:, 0].tolist())
            return 0.0

        def tensors(self):
            return {}

    class Network(nn.Module):
        def forward(self, features):
            looked.update(features[:, 0].tolist())
            return features

    lessons = Lessons(
        40,
        lambda places, _: places[:, None].float(),
        lambda places, _: places[:, None].float(),
        False,
    )
    ledger = Ledger(MemoryWork(), seen(nn.Flatten(), torch.zeros(1, *FLAT), []))
    Decoder(validation=0.3)._learn("x", Watching(), Network(), lessons, 3, seed=0, ledger=ledger)
    assert len(used) == 28
    assert len(looked) == 12
    assert not used & looked


def test_mirrored_pictures_go_with_mirrored_features():
    pictures = blobs(12, 1)
    seen_pairs = []

    class Noting:
        def step(self, features, answers):
            seen_pairs.append((features, answers))
            return 0.0

        def tensors(self):
            return {}

    attack = Decoder(flips=True, validation=0.0, epochs=8, batch=4, standardize=False)
    view, public = seen(nn.Identity(), pictures, ["encode"]), album(pictures)

    def answers(places, mirrored):
        return learned.flipped(public.floats(places), mirrored)

    attack.taught(
        Noting(), nn.Identity(), view, public, answers, seed=0, ledger=Ledger(MemoryWork(), view)
    )
    assert all(torch.equal(features, wanted) for features, wanted in seen_pairs)
    everything = torch.cat([wanted for _, wanted in seen_pairs])
    straight = sum(
        (everything == picture).flatten(1).all(1).sum().item() for picture in public.floats()
    )
    assert len(everything) == 96
    assert 30 < straight < 66


@pytest.mark.parametrize(
    "weights",
    [{"adversarial": 0.05}, {"perceptual": 1.0}, {"norm": "batch_norm"}, {"form": "crafter"}],
)
def test_every_part_of_the_decoders_loss_matters(weights):
    victims = blobs(3, 1, (3, 16, 16))
    assets = Assets(album(blobs(24, 2, (3, 16, 16))), perceptual=replace(target(), taps=("0", "2")))
    view = seen(mixing(), victims, ["encode"])
    plain, other = (
        run(Decoder(epochs=2, batch=8, width=4, **more), view, assets) for more in ({}, weights)
    )
    assert not torch.equal(plain.images, other.images)


def test_public_pictures_of_another_size_or_colour_are_fitted():
    victims = blobs(3, 1)
    found = run(
        Decoder(epochs=2, batch=8, width=4),
        seen(mixing(), victims, ["encode"]),
        Assets(album(blobs(24, 2, (1, 12, 12)))),
    )
    assert found.images.shape == (3, 1, 3, 8, 8)
    assert (found.images.std(2).mean() < 0.1).all()  # it has seen nothing but grey


@pytest.mark.parametrize(
    "attack",
    [
        Decoder(epochs=3, batch=8, width=4, adapt=8, adapt_epochs=2),
        Latent(steps=4, tries=2, pool=9),
    ],
)
def test_what_is_finished_is_read_back_from_a_folder(attack, tmp_path):
    victims, assets = (
        blobs(3, 1, (3, 16, 16)),
        Assets(album(blobs(24, 2, (3, 16, 16))), small_prior()),
    )
    view = seen(mixing(), victims, attack.granted)
    made = run(attack, view, assets, work=Work(tmp_path))
    view.module.forward = lambda images: pytest.fail("asked again")
    view.encode_uncounted = lambda images: torch.zeros(
        len(images), 3, 16, 16
    )  # the record is made anew
    again = run(attack, view, assets, work=Work(tmp_path))
    assert torch.equal(again.images, made.images)
    assert torch.equal(again.latents, made.latents)
    assert again.queries == made.queries


@pytest.mark.parametrize("fits", [0, 2**30])
def test_a_lesson_that_was_had_elsewhere_counts_as_if_it_had_been_had_here(fits, monkeypatch):
    """What is learned from plain features serves for every protection of an encoder, and the whole attack costs what it costs alone."""
    monkeypatch.setattr(learned, "FITS", fits)
    assets, attack = (
        Assets(album(blobs(24, 2))),
        Decoder(epochs=3, batch=8, width=4, adapt=8, adapt_epochs=2, averaged=3),
    )
    alone = run(attack, seen(mixing(), blobs(3, 1), attack.granted), assets, seed=4)
    blank = seen(mixing(), torch.zeros(2, 3, 8, 8), attack.lesson.granted)
    run(attack.lesson, blank, assets, seed=4, work=(school := MemoryWork()))
    work = MemoryWork()
    work.kept = {name: school.kept[name] for name in attack.lesson.learned}
    after = run(attack, seen(mixing(), blobs(3, 1), attack.granted), assets, seed=4, work=work)
    assert torch.equal(after.images, alone.images)
    assert after.queries == alone.queries


def test_what_decoders_refuse():
    view = seen(mixing(), blobs(2, 1), ["encode"])
    few = Assets(album(blobs(2, 2)))
    with pytest.raises(
        ConfigError, match="decoder learns from public pictures, and there are 0: at least 2"
    ):
        run(Decoder(), view)
    with pytest.raises(
        ConfigError, match="and there are 2: at least 2 that are not held out are needed"
    ):
        run(Decoder(), view, few)
    with pytest.raises(
        ConfigError, match=r"decoder\.adapt asks for 9 public pictures, and there are 2: lower it"
    ):
        run(Decoder(validation=0, adapt=9), view, few)
    with pytest.raises(
        ConfigError,
        match=r"decoder\.adapt \(2\) must leave at least 2 pictures that are not held out",
    ):
        run(Decoder(adapt=2), view, few)
    with pytest.raises(
        ConfigError,
        match=r"decoder needs the perceptual, and none is given: pass perceptual=\.\.\.",
    ):
        run(Decoder(perceptual=1.0), view, Assets(album(blobs(9, 2))))
    with pytest.raises(
        ConfigError,
        match=r"decoder\.adversarial needs pictures of at least 8 pixels a side: set it to 0",
    ):
        run(
            Decoder(adversarial=1.0),
            seen(nn.Flatten(), torch.zeros(2, *FLAT), ["encode"]),
            Assets(album(torch.zeros(9, *FLAT))),
        )
    with pytest.raises(ConfigError, match="mapper needs the embedder, and none is given"):
        run(Mapper(), view, Assets(album(blobs(9, 2))))
    with pytest.raises(ConfigError, match="batch: expected at least 2"):
        Decoder(batch=1)


@pytest.mark.parametrize(
    "attack",
    [
        Decoder(epochs=3, batch=8, width=4, lr=1e30),
        Mapper(epochs=3, batch=8, width=4, hidden=8, lr=1e30),
    ],
)
def test_a_learning_that_explodes_is_an_error(attack):
    view = seen(mixing(), blobs(2, 1, (3, 16, 16)), ["encode"])
    with pytest.raises(RunError, match=r"lower"):
        run(attack, view, Assets(album(blobs(20, 2, (3, 16, 16))), embedder=target()))


# --- mapper ---------------------------------------------------------------------------------------------------------------------------------


def test_a_mapper_finds_the_person_and_shows_a_stranger():
    victims, public, who = blobs(10, 1, (3, 16, 16)), album(blobs(400, 2, (3, 16, 16))), target()
    with seeded(0, "tests", "encoder"):
        encoder = nn.Conv2d(3, 4, 3, 2, 1).requires_grad_(False)
    view = seen(encoder, victims, ["encode"])
    found = run(
        Mapper(epochs=12, batch=16, width=8, hidden=128, lr=3e-3),
        view,
        Assets(public, embedder=who),
    )
    centre = public_centre(who, public)
    truth, others = embed(who, victims, centre), embed(who, public.floats(), centre)
    cosine = F.cosine_similarity(found.latents[:, 0], truth)
    assert cosine.mean() > 0.75
    assert cosine.mean() > F.cosine_similarity(others[:10], truth).mean() + 0.5
    assert torch.allclose(found.latents.norm(dim=2), torch.ones(10, 1), atol=1e-5)
    nearest = (found.latents[:, 0] @ others.T).argmax(1)
    assert torch.equal(found.images[:, 0], public.floats(nearest))
    assert found.queries == 2 * 400


@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 3, 3), (2, 16, 16), (3, 9, 5)])
def test_a_mapper_takes_features_of_any_shape(shape):
    with seeded(0, "tests"):
        network = build_mapper(shape, 11, width=4, hidden=8)
    assert network(draws(3, *shape)).shape == (3, 11)


def test_a_mapper_reads_maps_whose_channels_come_last_as_it_reads_others():
    made = []
    for shape in ((8, 8, 5), (5, 8, 8)):
        with seeded(0, "tests"):
            made.append(build_mapper(shape, 11, width=4, hidden=8).eval())
    features = draws(3, 8, 8, 5)
    assert torch.equal(made[0](features), made[1](features.permute(0, 3, 1, 2)))


# --- hybrid ---------------------------------------------------------------------------------------------------------------------------------


def test_a_picture_is_found_from_noise_where_the_encoder_forgets_nothing():
    victims = blobs(3, 1)
    view = seen(mixing(), victims, ["encoder"])
    found = run(Hybrid(start="noise", steps=300, lr=0.02), view)
    assert mistake(found, victims) < 1e-5
    assert found.queries == 3 * 300
    assert found.confidence.min() > 0.999


def test_pictures_stay_in_range():
    view = seen(nn.Flatten(), torch.tensor([-0.7, 0.3, 1.9, 1.0]).reshape(1, 1, 2, 2), ["encoder"])
    found = run(Hybrid(start="noise", steps=200, lr=0.05), view)
    assert torch.allclose(found.images.flatten(), torch.tensor([0, 0.3, 1, 1]), atol=1e-3)


@pytest.mark.parametrize(
    ("start", "starter"),
    [("decoder", {"epochs": 2, "width": 4, "batch": 8}), ("latent", {"steps": 3, "tries": 2})],
)
def test_a_hybrid_begins_where_the_other_attack_ended(start, starter):
    victims, assets = (
        blobs(3, 1, (3, 16, 16)),
        Assets(album(blobs(20, 2, (3, 16, 16))), small_prior()),
    )
    view = seen(mixing(), victims, ["encoder"])
    other = {"decoder": Decoder, "latent": Latent}[start](**starter)
    begun, still = (
        run(other, view, assets),
        run(Hybrid(start=start, starter=starter, steps=0), view, assets),
    )
    assert torch.equal(begun.images, still.images)
    assert torch.equal(begun.latents, still.latents)
    assert begun.queries == still.queries
    moved = run(hybrid := Hybrid(start=start, starter=starter, steps=40, lr=0.02), view, assets)
    assert mistake(moved, victims) < 0.7 * mistake(begun, victims)
    assert moved.queries == begun.queries + 3 * other.tries * 40
    assert hybrid.tries == other.tries
    assert hybrid.needs == other.needs
    assert hybrid.access == ("encoder",)
    adapting = Hybrid(start=start, starter={**starter, "adapt": 8})
    assert adapting.access == ("encoder", "protection")


def test_total_variation_is_the_slow_one():
    images = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    slow = [
        sum(
            (abs(x[c, i, j] - x[c, i - 1, j]).item() if i else 0) + (abs(x[c, i, j] - x[c, i, j - 1]).item() if j else 0)
            for c in range(3) for i in range(4) for j in range(5)
        ) / 60
        for x in images
    ]  # fmt: skip
    assert total_variation(images).tolist() == pytest.approx(slow)
    assert total_variation(torch.rand(2, 1, 1, 1)).tolist() == [0, 0]
    assert torch.autograd.gradcheck(total_variation, images.requires_grad_())


def test_smoothness_is_paid_for_in_the_size_of_the_feature():
    class Quiet(nn.Module):
        def forward(self, images):
            return mixing()(images) / 2**10

    rough, smooth, quiet = (
        run(
            Hybrid(start="noise", steps=100, lr=0.02, smooth=weight),
            seen(encoder, blobs(2, 1), ["encoder"]),
        ).images[:, 0]
        for encoder, weight in ((mixing(), 0.0), (mixing(), 0.1), (Quiet(), 0.1))
    )
    assert (total_variation(smooth) < 0.5 * total_variation(rough)).all()
    assert torch.allclose(smooth, quiet, atol=0.05)  # Adam's epsilon is not scaled along


def test_what_hybrids_refuse():
    with pytest.raises(ConfigError, match="no attack makes the start 'noise'"):
        Hybrid(start="noise", starter={"epochs": 3})
    with pytest.raises(
        ConfigError, match="Decoder: epoch: no such parameter; did you mean 'epochs'"
    ):
        Hybrid(starter={"epoch": 3})
    with pytest.raises(
        ConfigError, match=r"starter\.averaged: the start is made of the same features"
    ):
        Hybrid(starter={"averaged": 3})
    with pytest.raises(ConfigError, match="latent needs the prior"):
        run(Hybrid(start="latent"), seen(mixing(), blobs(2, 1), ["encoder"]))
    with pytest.raises(
        ConfigError, match="hybrid must be granted encoder: this view grants encode"
    ):
        run(Hybrid(), seen(mixing(), blobs(2, 1), ["encode"]), Assets(album(blobs(20, 2))))


# --- all ------------------------------------------------------------------------------------------------------------------------------------


@parameters
class Listening(FeatureAttack):
    """Shows grey, and remembers what it was given."""

    access = ("encode",)
    name = "listening"

    def rebuild(self, view, features, assets, *, seed, ledger):
        HEARD.append(features)
        return Rebuilt(torch.full((len(features), 1, *view.image_shape), 0.5))


HEARD: list[torch.Tensor] = []


def noisy(count, spread=1.0, size=4000):
    """A device that adds new noise to long features at each release, or none at all."""
    released = draws(count, size, seed=9)

    def again(number):
        return released + spread * (draws(count, size, seed=100 + number) if number else first)

    first = draws(count, size, seed=100)
    both = Halves(nn.Linear(16, size), nn.Identity(), FLAT, (size,), "x")
    both = replace(both, encoder=nn.Sequential(nn.Flatten(), both.encoder))
    return FeatureView(both, again(0), ["encode", "protection"], again=again), released


@pytest.mark.parametrize("times", [1, 2, 4, 16])
def test_averaging_takes_random_noise_out(times):
    HEARD.clear()
    view, clean = noisy(3)
    found = run(Listening(averaged=times), view)
    apart = (HEARD[0] - clean).square().mean().sqrt().item()
    assert apart == pytest.approx(1 / times**0.5, rel=0.03)
    assert found.queries == (times - 1) * 3


def test_averaging_changes_nothing_where_the_protection_is_no_dice():
    HEARD.clear()
    view, clean = noisy(3, spread=0.0)
    run(Listening(averaged=3), view)
    assert torch.equal(HEARD[0], clean)


def test_averaging_must_be_granted():
    view = seen(nn.Flatten(), torch.zeros(2, *FLAT), ["encode"])
    with pytest.raises(
        ConfigError, match="listening must be granted protection: this view grants encode"
    ):
        run(Listening(averaged=2), view)
    with pytest.raises(ConfigError, match="averaged: expected at least 1, got 0"):
        Listening(averaged=0)


def test_the_view_itself_refuses_what_was_not_granted():
    """Should an attack declare less than it uses, the view stops it."""
    view = seen(nn.Flatten(), torch.full((2, *FLAT), 0.5), ["encode"])
    with pytest.raises(AccessError, match="grants encode and not encoder"):
        Latent(steps=1).rebuild(
            view,
            view.released,
            Assets(prior=affine_prior()),
            seed=0,
            ledger=Ledger(MemoryWork(), view),
        )


def test_candidates_are_ordered_picture_by_picture():
    pictures = torch.linspace(0, 1, 6).reshape(6, 1, 1, 1).expand(6, *FLAT)
    view = seen(nn.Flatten(), pictures, ["encoder"])
    found = run(Latent(steps=150, tries=2), view, Assets(prior=affine_prior()), people=3)
    assert found.images.shape == (3, 4, *FLAT)
    assert found.labels.tolist() == [0, 1, 2]
    bright = found.images.flatten(2).mean(2)
    assert torch.allclose(bright[:, 0], bright[:, 1], atol=1e-3)
    assert (bright.flatten()[2:] - bright.flatten()[:-2] > -1e-3).all()


def test_a_fair_number_of_pictures_of_each_person_is_needed():
    view = seen(nn.Flatten(), torch.zeros(5, *FLAT), ["encode"])
    with pytest.raises(
        ConfigError,
        match="5 released features for 2 people: as many pictures of each person are needed",
    ):
        run(Listening(), view, people=2)
    with pytest.raises(ConfigError, match="5 released features for 0 people"):
        intercept(Listening(), view, Assets(), torch.tensor([], dtype=torch.long))


def test_confidence_is_what_a_picture_explains():
    pictures = torch.rand(4, *FLAT, generator=torch.Generator().manual_seed(0))
    view = seen(nn.Flatten(), pictures, ["encode"])
    found = run(Listening(), view)
    released = pictures.flatten(1)
    slow = [
        1 - ((0.5 - f) ** 2).sum().item() / ((f - released.mean(0)) ** 2).sum().item()
        for f in released
    ]
    assert found.confidence[:, 0].tolist() == pytest.approx(slow, rel=1e-4)
    assert run(Listening(), seen(nn.Flatten(), pictures[:1], ["encode"])).confidence.tolist() == [
        [0.0]
    ]


def test_pictures_that_are_not_finite_are_an_error():
    @parameters
    class Sick(FeatureAttack):
        access = ("encode",)
        name = "sick"

        def rebuild(self, view, features, assets, *, seed, ledger):
            return Rebuilt(torch.full((len(features), 1, *view.image_shape), torch.nan))

    with pytest.raises(RunError, match="sick put out pictures that are not finite: lower its lr"):
        run(Sick(), seen(nn.Flatten(), torch.zeros(2, *FLAT), ["encode"]))


@pytest.mark.parametrize(("count", "wanted"), [(10, 10), (10, 3), (7, 1), (1000, 999)])
def test_places_are_spread_over_the_whole_set(count, wanted):
    places = spread_evenly(count, wanted)
    assert len(set(places.tolist())) == wanted
    assert places[0] == 0
    assert wanted == 1 or places[-1] == count - 1
