"""Every registered attack on features keeps the same promises, in each of its variants; a new one is tested by existing."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.attacks.features.base import feature_attacks, intercept
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Halves, Images
from frostglass.core.views import FeatureView
from frostglass.networks.embedding import embed, public_centre
from frostglass.priors.base import identity_hashes
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, KilledError, MemoryWork, target

LATENT, PUBLIC, PEOPLE, EACH = 6, 96, 4, 2

# What makes a registered attack small enough for a test, also in variants that ask for more, and smaller still where it only has to keep promises. One that is not
# named here is tested with its own defaults.
LEARNING = {"epochs": 10, "batch": 16, "width": 8, "lr": 5e-3}
SEARCHING = {"steps": 40, "tries": 2}
SMALL = {
    "decoder": LEARNING,
    "mapper": LEARNING | {"epochs": 30, "hidden": 64},
    "latent": SEARCHING,
    "hybrid": {"steps": 100, "lr": 0.02},
}
TINY = {
    name: sets | {"steps": 3} if "steps" in sets else sets | {"epochs": 2}
    for name, sets in SMALL.items()
}
ADAPTING = {"adapt": 24, "adapt_epochs": 3, "adapt_rounds": 2}
CASES = [
    (name, variant)
    for name in feature_attacks.names()
    for variant in ("", *feature_attacks.get(name).variants)
]


def small(name, variant="", sizes=TINY, **more):
    """An attack of few steps; the step size that a variant names is its own."""
    method = feature_attacks.get(name)
    named = dict(method.variants[variant][1]) if variant else {}
    sets = {**sizes.get(name, {}), **named} | {
        key: value for key, value in sizes.get(name, {}).items() if key != "lr"
    }
    sets |= {
        key: value
        for key, value in ADAPTING.items()
        if sets.get("adapt") and key in method.__dataclass_fields__
    }
    if name == "hybrid":
        sets["starter"] = sizes.get(sets.get("start", "decoder"), {})
    return method(**(sets | more))


class Faces(nn.Module):
    """Smooth colour pictures of latents."""

    def __init__(self):
        super().__init__()
        with seeded(0, "tests", "faces"):
            self.coarse = nn.Linear(LATENT, 3 * 4 * 4)
        with torch.no_grad():
            self.coarse.weight *= 3

    def forward(self, latents):
        coarse = self.coarse(latents).unflatten(1, (3, 4, 4))
        return torch.sigmoid(
            F.interpolate(coarse, size=SHAPE[1:], mode="bilinear", align_corners=True)
        )


class World:
    """A device with a small encoder that nobody trained, victims and public people whom one generator makes, and all that an attacker may know."""

    def __init__(self):
        with seeded(0, "tests", "encoder"):
            encoder = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Dropout(0.3),
                nn.Conv2d(8, 8, 3, 1, 1),
            )
            amortizer = nn.Sequential(nn.Flatten(), nn.Linear(512, LATENT))
            critic = nn.Sequential(nn.Flatten(), nn.Linear(768, 1))
        generator = Faces()
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.victims, public = (
                generator(torch.randn(count, LATENT, generator=rng))
                for count in (PEOPLE * EACH, PUBLIC)
            )
            released = encoder.eval()(self.victims)
            latents = torch.randn(600, LATENT, generator=rng)
            features = encoder(generator(latents)).flatten(1)
            solved = torch.linalg.lstsq(
                torch.cat([features, torch.ones(600, 1)], 1), latents, driver="gelsd"
            ).solution
            amortizer[1].weight.copy_(solved[:-1].T)
            amortizer[1].bias.copy_(solved[-1])
        encoder.train()
        numbers = tuple(map(str, range(PUBLIC)))
        self.public = Images((public * 255).round().byte(), torch.arange(PUBLIC), numbers, numbers)
        self.prior = Prior(
            generator=generator,
            critic=critic,
            latent=LATENT,
            image_shape=SHAPE,
            seen_identities=identity_hashes([]),
        )
        self.embedder = target()
        perceptual = target(seed=1)
        self.assets = Assets(
            self.public,
            self.prior,
            amortizer,
            self.embedder,
            type(perceptual)(**{**vars(perceptual), "taps": ("0", "2")}),
        )
        self.halves = Halves(encoder, nn.Identity(), SHAPE, (8, 8, 8), "4")
        self.released = released
        self.networks = [
            encoder,
            generator,
            critic,
            amortizer,
            self.embedder.module,
            perceptual.module,
        ]

    def view(self, access):
        return FeatureView(self.halves, self.released, access)

    def run(self, attack, *, seed=5, work=None, access=None, assets=None):
        view = self.view(attack.granted if access is None else access)
        return intercept(
            attack,
            view,
            assets or self.assets,
            torch.arange(PEOPLE),
            seed=seed,
            work=work or MemoryWork(),
        )


@cache
def world():
    return World()


@cache
def found(name, variant):
    """What an attack of very few steps finds, found once."""
    return world().run(small(name, variant))


@pytest.fixture(params=CASES, ids=lambda case: "-".join(filter(None, case)))
def case(request):
    return request.param


def test_shapes_and_ranges(case):
    attack, made = small(*case), found(*case)
    assert made.images.shape == (PEOPLE, EACH * attack.tries, *SHAPE)
    assert made.images.dtype == torch.float32
    assert made.images.min() >= 0
    assert made.images.max() <= 1
    assert (
        made.latents.shape[:2]
        == made.confidence.shape
        == made.broken.shape
        == made.images.shape[:2]
    )
    assert made.labels.tolist() == list(range(PEOPLE))
    assert made.queries > 0
    assert made.seconds > 0
    assert not made.broken.any()
    assert made.confidence.isfinite().all()


def cosines(rows, there):
    """How much pictures (N, ...), or embeddings (N, F), show each of the victims, (N, victims), by the embedder."""
    centre = public_centre(there.embedder, there.public)
    shown = rows if rows.ndim == 2 else embed(there.embedder, rows, centre)
    return F.normalize(shown, dim=1) @ embed(there.embedder, there.victims, centre).T


def errors(rows, there):
    """Mean squared errors of pictures (N, ...) as each of the victims, (N, victims)."""
    return (rows[:, None] - there.victims).square().flatten(2).mean(2)


def test_beats_the_mean_picture_and_blind_draws(case):
    """By pixels, or for an attack that makes embeddings by those, and by a clear margin."""
    there, attack = world(), small(*case, sizes=SMALL)
    made = there.run(attack)
    own = torch.eye(len(there.victims)).repeat_interleave(attack.tries, 0).bool()
    with torch.no_grad():
        blind = there.prior.generator(
            torch.randn(200, LATENT, generator=torch.Generator().manual_seed(1))
        )
    mean = there.public.floats().mean(0, keepdim=True)
    if attack.embeds:
        told = cosines(made.latents.flatten(0, 1), there)[own].mean()
        assert told > cosines(blind, there).mean() + 0.5
        assert told > cosines(mean, there).mean() + 0.5
    else:
        error = errors(made.images.flatten(0, 1), there)[own].mean()
        assert error < 0.6 * errors(mean, there).mean()
        assert error < 0.4 * errors(blind, there).mean()


def same(one, other):
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.latents, other.latents)
    assert torch.equal(one.confidence, other.confidence)
    assert one.queries == other.queries


def test_seed_matters_and_repeats(case):
    same(World().run(small(*case)), found(*case))
    other = world().run(small(*case), seed=6)
    if "amortized" not in case:  # which begins at a guess, and rolls no rng
        assert (
            not torch.equal(other.images, found(*case).images)
            or feature_attacks.get(case[0]).embeds
        )
        assert not torch.equal(other.latents, found(*case).latents) or not other.latents.numel()
    assert other.queries == found(*case).queries


@pytest.mark.parametrize(
    ("name", "variant"), [case for case in CASES if case[0] in ("latent", "hybrid")]
)
def test_batch_size_changes_nothing(name, variant):
    """Where a batch is a matter of memory: attacks that learn go in batches that matter."""
    for batch in (1, 17):
        same(world().run(small(name, variant, batch=batch)), found(name, variant))


def test_company_changes_nothing(case):
    """What is rebuilt of the first victims does not depend on how many follow."""
    there, attack = world(), small(*case)
    view = FeatureView(there.halves, there.released[:3], attack.granted)
    some = intercept(attack, view, there.assets, torch.arange(3), seed=5, work=MemoryWork())
    everything = found(*case).images.unflatten(1, (EACH, -1)).flatten(0, 1)[:3]
    assert torch.equal(some.images, everything)


def test_restart_changes_nothing(case):
    attack = small(*case)
    whole = MemoryWork(saves_before_death=1000)
    same(world().run(attack, work=whole), found(*case))
    saves = 1000 - whole.left
    for death in {1, max(1, saves - 1), max(1, saves // 2)}:
        work = MemoryWork(saves_before_death=death)
        with pytest.raises(KilledError):
            world().run(attack, work=work)
        work.left = None
        same(world().run(attack, work=work), found(*case))


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_of_the_networks_changes(case, failing, monkeypatch):
    there = World()
    there.networks[0][0].weight.grad = torch.ones_like(there.networks[0][0].weight)
    next(there.networks[1].parameters()).requires_grad_(False)
    there.networks[3].train()
    before = [copy.deepcopy(network.state_dict()) for network in there.networks]
    modes = [part.training for network in there.networks for part in network.modules()]
    flags = [
        parameter.requires_grad for network in there.networks for parameter in network.parameters()
    ]
    rng = torch.get_rng_state()
    if failing:
        calls, forward = [], there.networks[0].forward

        def explode(images):
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("power cut")
            return forward(images)

        monkeypatch.setattr(there.networks[0], "forward", explode)
        with pytest.raises(RuntimeError, match="power cut"):
            there.run(small(*case))
    else:
        there.run(small(*case))
    after = [network.state_dict() for network in there.networks]
    assert all(
        torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a
    )
    assert modes == [part.training for network in there.networks for part in network.modules()]
    assert flags == [
        parameter.requires_grad for network in there.networks for parameter in network.parameters()
    ]
    assert torch.equal(
        there.networks[0][0].weight.grad, torch.ones_like(there.networks[0][0].weight)
    )
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(
        part._forward_hooks or part._forward_pre_hooks
        for network in there.networks
        for part in network.modules()
    )


def test_all_that_is_granted_is_needed_and_nothing_else_is_used(case):
    """Without any one of what it declares an attack is refused, and it runs with exactly that."""
    attack = small(*case)
    assert attack.granted
    for ability in attack.granted:
        weaker = tuple(other for other in attack.granted if other != ability)
        with pytest.raises(ConfigError, match=f"{attack.name} must be granted {ability}"):
            world().run(attack, access=weaker)


def test_what_an_attack_needs_is_asked_for_by_name(case):
    attack = small(*case)
    bare = Assets(world().public)
    if attack.needs:
        with pytest.raises(ConfigError, match=f"needs the {min(attack.needs)}, and none is given"):
            world().run(attack, assets=bare)
    else:
        same(world().run(attack, assets=bare), found(*case))


def test_averaging_is_a_parameter_of_every_attack(case):
    """On a device that always releases the same nothing changes but the count."""
    attack = small(*case, averaged=3)
    assert "protection" in attack.granted
    made = world().run(attack)
    assert torch.equal(made.images, found(*case).images)
    assert made.queries == found(*case).queries + 2 * PEOPLE * EACH
