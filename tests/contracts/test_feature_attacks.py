"""Every registered attack on features, in each variant, fulfils the contract of an attack."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.attacks.base import attacks, invert
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize
from frostglass.core.prior import Prior
from frostglass.core.types import Halves, Images
from frostglass.core.views import FeatureView
from frostglass.networks.embedding import embed, public_centre
from frostglass.priors.base import identity_hashes
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, KilledError, MemoryWork, target

LATENT, PUBLIC, PEOPLE, EACH = 6, 96, 4, 2

# Parameters that make an attack fast, also in variants; TINY where its strength does not matter.
# An attack that is not listed is tested with its defaults.
TRAINING = {"epochs": 10, "batch": 16, "width": 8, "lr": 5e-3}
SMALL = {
    "decoder": TRAINING,
    "mapper": TRAINING | {"epochs": 30, "hidden": 64},
    "latent": {"steps": 40, "tries": 2},
    "hybrid": {"steps": 100, "lr": 0.02},
}
TINY = {
    name: sets | {"steps": 3} if "steps" in sets else sets | {"epochs": 2}
    for name, sets in SMALL.items()
}
ADAPTING = {"adapt": 24, "adapt_epochs": 3, "adapt_rounds": 2}
NAMES = [name for name in attacks.names() if attacks.get(name).surface == "features"]
CASES = [(name, variant) for name in NAMES for variant in ("", *attacks.get(name).variants)]


def small(name, variant="", sizes=TINY, **more):
    """Return a fast attack; a variant's own step size is kept."""
    method = attacks.get(name)
    named = dict(method.variants[variant][1]) if variant else {}
    fast = sizes.get(name, {})
    sets = {**fast, **named} | {key: value for key, value in fast.items() if key != "lr"}
    if sets.get("adapt"):
        fields = method.__dataclass_fields__
        sets |= {key: value for key, value in ADAPTING.items() if key in fields}
    if name == "hybrid":
        sets["starter"] = sizes.get(sets.get("start", "decoder"), {})
    return method(**(sets | more))


class Faces(nn.Module):
    """Generates smooth colour images from latents."""

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
    """A device with an untrained encoder, images of one generator, and all assets."""

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
            self.private, public = (
                generator(torch.randn(count, LATENT, generator=rng))
                for count in (PEOPLE * EACH, PUBLIC)
            )
            self.released = encoder.eval()(self.private)
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
        self.embedder, other = target(), target(seed=1)
        perceptual = type(other)(**{**vars(other), "taps": ("0", "2")})
        self.assets = Assets(self.public, self.prior, amortizer, self.embedder, perceptual)
        self.halves = Halves(encoder, nn.Identity(), SHAPE, (8, 8, 8), "4")
        evaluators = [self.embedder.module, other.module]
        self.networks = [encoder, generator, critic, amortizer, *evaluators]

    def run(self, attack, *, rows=None, seed=5, work=None, access=None, assets=None):
        """Attack all people, or the first `rows` images as one person each."""
        access = attack.access if access is None else access
        view = FeatureView(self.halves, self.released[:rows], access)
        return invert(
            attack,
            view,
            assets or self.assets,
            people=range(rows or PEOPLE),
            seed=seed,
            work=work or MemoryWork(),
        )


@cache
def world():
    return World()


@cache
def result(name, variant):
    """Return the result of an attack with very few steps, computed once."""
    return world().run(small(name, variant))


@pytest.fixture(params=CASES, ids=lambda case: "-".join(filter(None, case)))
def case(request):
    return request.param


def test_shapes_and_ranges(case):
    attack, found = small(*case), result(*case)
    assert found.images.shape == (PEOPLE, EACH * attack.kept, *SHAPE)
    assert found.images.dtype == torch.float32
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    rows = found.images.shape[:2]
    assert found.latents.shape[:2] == found.confidence.shape == found.broken.shape == rows
    assert found.labels.tolist() == list(range(PEOPLE))
    assert found.queries > 0
    assert found.seconds > 0
    assert not found.broken.any()
    assert found.confidence.isfinite().all()


def cosines(rows, there):
    """Return the similarity of images (N, ...) or embeddings (N, F) to each private image."""
    centre = public_centre(there.embedder, there.public)
    embeddings = rows if rows.ndim == 2 else embed(there.embedder, rows, centre)
    return F.normalize(embeddings, dim=1) @ embed(there.embedder, there.private, centre).T


def errors(rows, there):
    """Return the mean squared errors of images (N, ...) against each private image."""
    return (rows[:, None] - there.private).square().flatten(2).mean(2)


def test_attacks_beat_the_mean_image_and_prior_only_draws(case):
    there, attack = world(), small(*case, sizes=SMALL)
    found = there.run(attack)
    own = torch.eye(len(there.private)).repeat_interleave(attack.kept, 0).bool()
    with torch.no_grad():
        draws = there.prior.generator(
            torch.randn(200, LATENT, generator=torch.Generator().manual_seed(1))
        )
    mean = there.public.floats().mean(0, keepdim=True)
    if attack.embeds:
        similarity = cosines(found.latents.flatten(0, 1), there)[own].mean()
        assert similarity > cosines(draws, there).mean() + 0.5
        assert similarity > cosines(mean, there).mean() + 0.5
    else:
        error = errors(found.images.flatten(0, 1), there)[own].mean()
        assert error < 0.6 * errors(mean, there).mean()
        assert error < 0.4 * errors(draws, there).mean()


def assert_same(one, other):
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.latents, other.latents)
    assert torch.equal(one.confidence, other.confidence)
    assert one.queries == other.queries


def assert_close(one, other):
    """Kernels may round a row differently in batches of another size."""
    assert one.shape == other.shape
    assert torch.allclose(one, other, atol=1e-4 * max(1.0, other.abs().max().item()))


def test_a_seed_determines_the_result(case):
    assert_same(World().run(small(*case)), result(*case))
    other = world().run(small(*case), seed=6)
    if "amortized" not in case:  # starts at a prediction, without random draws
        changed = not torch.equal(other.images, result(*case).images)
        assert changed or attacks.get(case[0]).embeds
        assert not torch.equal(other.latents, result(*case).latents) or not other.latents.numel()
    assert other.queries == result(*case).queries


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("latent", "hybrid")])
def test_the_batch_size_of_a_search_changes_nothing(case):
    for batch in (1, 17):
        found = world().run(small(*case, batch=batch))
        assert_close(found.images, result(*case).images)
        assert found.queries == result(*case).queries


def test_reconstructions_do_not_depend_on_the_other_images(case):
    some = world().run(small(*case), rows=3)
    assert_close(some.images, result(*case).images.unflatten(1, (EACH, -1)).flatten(0, 1)[:3])


def test_a_killed_attack_resumes_with_the_same_result(case):
    attack = small(*case)
    whole = MemoryWork(saves_before_death=1000)
    assert_same(world().run(attack, work=whole), result(*case))
    saves = 1000 - whole.left
    for death in {1, max(1, saves - 1), max(1, saves // 2)}:
        work = MemoryWork(saves_before_death=death)
        with pytest.raises(KilledError):
            world().run(attack, work=work)
        work.left = None
        assert_same(world().run(attack, work=work), result(*case))


@pytest.mark.parametrize("failing", [False, True])
def test_networks_are_left_as_they_were(case, failing, monkeypatch):
    there = World()
    weight = there.networks[0][0].weight
    weight.grad = torch.ones_like(weight)
    next(there.networks[1].parameters()).requires_grad_(False)
    there.networks[3].train()

    def state():
        parts = [part for network in there.networks for part in network.modules()]
        flags = [p.requires_grad for network in there.networks for p in network.parameters()]
        hooks = [bool(part._forward_hooks or part._forward_pre_hooks) for part in parts]
        return [part.training for part in parts], flags, hooks

    before = [copy.deepcopy(network.state_dict()) for network in there.networks]
    modes, rng = state(), torch.get_rng_state()
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
    assert state() == modes
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert torch.equal(rng, torch.get_rng_state())


def test_all_declared_access_is_needed_and_suffices(case):
    attack = small(*case)
    assert attack.access
    for access in attack.access:
        weaker = tuple(other for other in attack.access if other != access)
        with pytest.raises(ConfigError, match=f"{attack.name} needs access to {access}"):
            world().run(attack, access=weaker)


def test_missing_assets_are_named(case):
    attack = small(*case)
    bare = Assets(world().public)
    if attack.needs:
        with pytest.raises(ConfigError, match=rf"needs assets\.{min(attack.needs)}, got none"):
            world().run(attack, assets=bare)
    else:
        assert_same(world().run(attack, assets=bare), result(*case))


def test_averaging_equal_releases_changes_the_queries_only(case):
    attack = small(*case, averaged=3)
    assert "protection" in attack.access
    assert attack.releases == 3
    found = world().run(attack)
    assert torch.equal(found.images, result(*case).images)
    assert found.queries == result(*case).queries + 2 * PEOPLE * EACH


def test_a_brief_copy_is_valid_and_does_no_more_work(case):
    method = attacks.get(case[0])
    attack = method(**dict(method.variants[case[1]][1]) if case[1] else {})
    size = AuditSize(PEOPLE, EACH, PUBLIC)
    for part in filter(None, (attack, attack.pretraining)):
        brief = part.brief()
        assert type(brief) is type(part)
        assert brief.brief() == brief
        assert (brief.access, brief.needs, brief.releases) == (
            part.access,
            part.needs,
            part.releases,
        )
        less, more = brief.budget(size), part.budget(size)
        assert 0 < less.evaluations <= more.evaluations
        assert less.trained <= more.trained
        assert more.description
    assert world().run(small(*case).brief()).images.shape[0] == PEOPLE
