"""Tests of MIRROR, with and without gradients, also in worlds whose answer is known."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from frostglass.attacks._search.box import Box
from frostglass.attacks._search.styled import best_styles, pool_styles, style_scores
from frostglass.attacks.base import invert
from frostglass.attacks.model.mirror import Mirror, rise_and_fall
from frostglass.attacks.model.mirror_genetic import MirrorGenetic
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.core.views import ModelView
from frostglass.priors._style_space import StyleSpace
from frostglass.priors.base import identity_hashes
from frostglass.runtime.seeding import generator_for
from worlds import NoWork, close_images, conditional_prior, of_people, prior, styled_prior, target

WHITE = {"pool": 40, "candidates": 3, "keep": 3, "steps": 6}
BLACK = {"pool": 60, "population": 20, "generations": 6, "stop": 1.0, "survivors": 3, "keep": 3}
SLOPES = torch.tensor([2.0, -1.0, 3.0, -0.5, 1.5])


def calm(known=None):
    """A target that is confident of no image of a prior, so that every search can improve."""
    made, known = target(), known or styled_prior()
    with torch.no_grad():
        images = known.generator.eval()(
            torch.randn(100, known.latent, generator=torch.Generator().manual_seed(0))
        )
        logits, head = made.module.eval()(images), made.module[6]
        head.bias.copy_((head.bias - logits.mean(0)) / logits.std(0))
        head.weight /= logits.std(0)[:, None]
    return made


def run(attack, known=None, made=None, *, labels=(0, 1, 2, 3), seed=0):
    return invert(
        attack,
        (made or calm(known)).view(attack.access),
        Assets(prior=known or styled_prior()),
        people=labels,
        seed=seed,
        work=NoWork(),
    )


def drawn(known, size, seed=0):
    """The styles of a pool, by the mapping network itself."""
    latents = torch.randn(size, known.latent, generator=generator_for(seed, "pool"))
    with torch.no_grad():
        return known.generator.network.mapping.w(latents)


def slow_box(styles, width, slope):
    """Bounds of styles by loops: activation undone, mean and deviation, activation redone."""
    low, high = [], []
    for column in styles.double().T.tolist():
        points = [w if w >= 0 else w / slope for w in column]
        mean = sum(points) / len(points)
        std = math.sqrt(sum((p - mean) ** 2 for p in points) / len(points))
        for bounds, p in ((low, mean - width * std), (high, mean + width * std)):
            bounds.append(p if p >= 0 else p * slope)
    return torch.tensor(low), torch.tensor(high)


def box_of(known, size=50, width=1.0):
    return Box.around(StyleSpace(known), drawn(known, size), width)


def linear(classes=2, scale=20.0):
    """Latents as images of one column, which mirroring leaves alone; two classes and a plane."""
    shape = (1, len(SLOPES), 1)

    class Column(nn.Module):
        def forward(self, z):
            return 0.5 + z.view(-1, *shape) / scale

    module = nn.Sequential(nn.Flatten(), nn.Linear(len(SLOPES), classes))
    with torch.no_grad():
        module[1].weight.copy_(torch.stack([-SLOPES, SLOPES]) * scale / 8)
        module[1].bias.copy_(-module[1].weight.sum(1) / 2 - torch.tensor([0.0, 1.0]))
    made = Target(module=module, classes=("a", "b"), image_shape=shape, head="1", key="plane")
    return made, Prior(
        generator=Column(),
        critic=None,
        latent=len(SLOPES),
        image_shape=shape,
        seen_identities=identity_hashes([]),
        key="column",
    )


# The box.


@pytest.mark.parametrize("width", [0.5, 1.0, 2.5])
def test_the_box_is_the_slow_and_obvious_one(width):
    known = styled_prior()
    box = box_of(known, width=width)
    low, high = slow_box(drawn(known, 50), width, 0.2)
    assert torch.allclose(box.low, low.float(), atol=1e-5)
    assert torch.allclose(box.high, high.float(), atol=1e-5)
    assert (low < 0).any()
    assert (high > 0).any()


def test_the_box_of_latents_undoes_nothing():
    known = prior()
    latents = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    box = Box.around(StyleSpace(known), latents, 1.0)
    low, high = slow_box(latents, 1.0, 1.0)
    assert torch.allclose(box.low, low.float(), atol=1e-6)
    assert torch.allclose(box.high, high.float(), atol=1e-6)
    assert box.before(latents) is latents


def test_clamping_styles_is_clamping_what_comes_before_the_activation():
    box = box_of(styled_prior())
    styles = 3 * torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    points = torch.where(styles >= 0, styles, 5 * styles).clamp(
        box.mean - box.std, box.mean + box.std
    )
    assert torch.allclose(
        box.clamp(styles), torch.where(points >= 0, points, 0.2 * points), atol=1e-6
    )
    assert torch.allclose(box.after(box.before(styles)), styles, atol=1e-6)


def test_both_sides_of_the_box_hold_and_what_is_inside_stays():
    box = box_of(styled_prior())
    assert torch.equal(box.clamp(torch.full((3, 8), 99.0)), box.high.expand(3, 8))
    assert torch.equal(box.clamp(torch.full((3, 8), -99.0)), box.low.expand(3, 8))
    inside = torch.lerp(
        box.low, box.high, torch.rand(20, 8, generator=torch.Generator().manual_seed(2))
    )
    assert torch.equal(box.clamp(inside), inside)


def test_a_gain_of_the_activation_scales_the_box_and_changes_nothing_else():
    known = styled_prior()
    styles = drawn(known, 50)
    whole, halved = (
        Box.around(StyleSpace(known), factor * styles, 1.0) for factor in (1.0, 2**-0.5)
    )
    assert torch.allclose(halved.low, whole.low * 2**-0.5, atol=1e-6)
    assert torch.allclose(halved.high, whole.high * 2**-0.5, atol=1e-6)


# By gradients.


def test_defaults_are_the_published_ones():
    attack = Mirror()
    assert (attack.loss, attack.weight, attack.critic_weight, attack.optimizer, attack.betas) == (
        "ce",
        10,
        0,
        "adam",
        (0.9, 0.999),
    )
    assert (attack.lr, attack.steps, attack.candidates, attack.keep, attack.pool) == (
        0.25,
        500,
        8,
        8,
        100_000,
    )
    assert (attack.box, attack.truncation, attack.cutoff, attack.flip) == (1, 0.7, 8, 0.5)
    assert (attack.access, attack.start_images) == (("gradients",), 100_000)


@pytest.mark.parametrize(
    ("t", "factor"),
    [
        (0, 0),
        (0.01, 0.2),
        (0.025, 0.5),
        (0.05, 1),
        (0.4, 1),
        (0.75, 1),
        (0.875, 0.5),
        (11 / 12, 0.25),
        (1, 0),
    ],
)
def test_the_step_size_rises_and_falls(t, factor):
    assert rise_and_fall(t) == pytest.approx(factor, abs=1e-12)


PUBLISHED_SIZES = {  # of steps 1, 2, ... of 20, and of the first five of 100
    20: [1.0] * 15 + [0.9045085, 0.6545085, 0.3454915, 0.0954915, 0.0],
    100: [0.2, 0.4, 0.6, 0.8, 1.0],
}


@pytest.mark.parametrize("steps", PUBLISHED_SIZES)
def test_the_sizes_of_all_steps_are_the_published_ones(steps, monkeypatch):
    """The published loop counts from 1: its first step moves, and its last one does not."""
    sizes, step = [], torch.optim.Adam.step

    def noted(optimizer):
        sizes.append(optimizer.param_groups[0]["lr"])
        step(optimizer)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    made, known = linear()
    attack = Mirror(pool=20, candidates=1, keep=1, steps=steps, patience=0)
    run(attack, known, made, labels=[0])
    expected = PUBLISHED_SIZES[steps]
    assert len(sizes) == steps
    assert sizes[: len(expected)] == pytest.approx([0.25 * size for size in expected], abs=1e-7)


def test_a_search_of_one_step_only_brings_starts_into_the_box():
    known = styled_prior()
    made = calm(known)
    outside = drawn(known, 40)
    found = run(Mirror(**WHITE | {"steps": 1}), known, made)
    still = run(Mirror(**WHITE | {"steps": 0}), known, made)
    box = box_of(known, 40)
    assert not torch.equal(found.latents, still.latents)
    for label in range(4):
        held = {tuple(row) for row in box.clamp(still.latents[label]).tolist()}
        assert held == {tuple(row) for row in found.latents[label].tolist()}
        assert {tuple(row) for row in still.latents[label].tolist()} <= {
            tuple(row) for row in outside.tolist()
        }


@pytest.mark.parametrize("make", [styled_prior, prior], ids=["styles", "latents"])
def test_the_search_is_the_slow_and_obvious_one(make):
    """One row at a time: truncated image, coin, loss, Adam at a ramped step size, clamp."""
    known, beyond = make(), False
    made = calm(known)
    attack = Mirror(**WHITE | {"steps": 12, "lr": 0.1})
    found = run(attack, known, made, labels=[2])
    made.module.eval()
    known.generator.eval()
    space = StyleSpace(known, 0.7, 8)
    pool = pool_styles(space, 40, seed=0)
    scores = style_scores(made.view(["scores"]), space, pool, torch.tensor([2]))
    box = Box.around(space, pool, 1.0)
    for place, draw in enumerate(found.draws[0].tolist()):
        coins = generator_for(0, "search", 2, draw)
        w = best_styles(pool, scores, 3)[0, draw][None].clone().requires_grad_()
        rule = torch.optim.Adam([w], betas=(0.9, 0.999))
        for step in range(1, 13):
            image = space.images(w, truncate=True)
            beyond |= bool((image != image.clamp(0, 1)).any())
            image = image.clamp(0, 1)
            image = image.flip(3) if torch.rand((), generator=coins) < 0.5 else image
            (w.grad,) = torch.autograd.grad(
                10 * nn.functional.cross_entropy(made.module(image), torch.tensor([2])), w
            )
            rule.param_groups[0]["lr"] = 0.1 * rise_and_fall(step / 12)
            rule.step()
            with torch.no_grad():
                w.copy_(torch.minimum(torch.maximum(w, box.low), box.high))
        assert torch.allclose(found.latents[0, place], w[0], atol=2e-4)
    assert sorted(found.draws[0].tolist()) == [0, 1, 2]
    assert beyond == (make is styled_prior)  # so that the clamp of images is tested


def test_styles_stay_in_the_box_and_use_both_sides_of_it():
    known = styled_prior()
    found, box = run(Mirror(**WHITE | {"steps": 40, "lr": 2.0}), known), box_of(known, 40)
    assert torch.equal(box.clamp(found.latents), found.latents)
    assert (found.latents == box.high).any()
    assert (found.latents == box.low).any()


def test_coins_are_a_candidate_s_own_and_off_at_0():
    seen = []

    class Noted(nn.Module):
        """A generator of images that tell left from right."""

        def forward(self, z):
            return torch.stack([z[:, :1], 1 - z[:, :1]], dim=2)[:, None].sigmoid()

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Identity()

        def forward(self, x):
            seen.append((x[:, 0, 0, 0] > x[:, 0, 0, 1]).tolist())
            return self.head(torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], dim=1))

    shape = (1, 1, 2)
    known = Prior(
        generator=Noted(),
        critic=None,
        latent=1,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        key="sides",
    )
    made = Target(module=Reader(), classes=("a", "b"), image_shape=shape, head="head", key="reader")
    sizes = {"pool": 16, "candidates": 8, "keep": 8, "steps": 60, "lr": 1e-6, "box": 9.0}
    sizes |= {"patience": 0}

    def sides(flip):
        seen.clear()
        run(Mirror(**sizes, flip=flip), known, made, labels=[0])
        return torch.tensor([row[:8] for row in seen[-61:-1]])

    never, always, half = sides(0.0), sides(1.0), sides(0.5)
    assert (never == never[0]).all()
    assert torch.equal(always, ~never)
    turned = half != never
    assert torch.equal(
        turned[:, 3],
        torch.stack(
            [torch.rand((), generator=coin) for coin in [generator_for(0, "search", 0, 3)] * 60]
        )
        < 0.5,
    )
    assert 0 < turned.sum(1).float().mean() < 8
    assert ((turned.sum(1) > 0) & (turned.sum(1) < 8)).any()


def test_in_a_linear_world_it_ends_in_the_best_corner_of_the_box():
    made, known = linear()
    box = Box.around(
        StyleSpace(known), torch.randn(200, 5, generator=generator_for(0, "pool")), 1.0
    )
    found = run(Mirror(pool=200, candidates=4, keep=4, steps=60), known, made, labels=(0, 1))
    for label, sign in ((0, -1), (1, 1)):
        corner = torch.where(sign * SLOPES > 0, box.high, box.low)
        assert torch.equal(found.latents[label], corner.expand(4, 5))


def test_images_are_those_of_truncated_styles():
    known = styled_prior()
    made = calm(known)
    found = run(Mirror(**WHITE), known, made)
    with torch.no_grad():
        shown = (
            StyleSpace(known, 0.7, 8).images(found.latents.flatten(0, 1), truncate=True).clamp(0, 1)
        )
        whole = StyleSpace(known).images(found.latents.flatten(0, 1)).clamp(0, 1)
    assert torch.allclose(found.images.flatten(0, 1), shown, atol=1e-5)
    assert not torch.allclose(shown, whole, atol=1e-2)


def test_queries_by_gradients_are_counted():
    view = calm().view(["gradients"])
    found = invert(
        Mirror(**WHITE), view, Assets(prior=styled_prior()), people=[0, 1], seed=0, work=NoWork()
    )
    assert found.queries == view.queries == 40 + 6 * 2 * 3 + 2 * 3


# By breeding.


def test_defaults_of_the_genetic_search_are_the_published_ones():
    attack = MirrorGenetic()
    assert (attack.population, attack.generations, attack.stop, attack.elite, attack.pool) == (
        1000,
        100,
        0.95,
        1,
        100_000,
    )
    assert (attack.mutation, attack.noise, attack.box, attack.truncation, attack.cutoff) == (
        0.1,
        0.1,
        1,
        0.7,
        8,
    )
    assert (attack.candidates, attack.keep, attack.access, attack.start_images) == (
        1,
        1,
        ("scores",),
        100_000,
    )
    assert attack.search_effort == ("100 generations of 999 images", 99_900)
    assert MirrorGenetic(samples=3).search_effort[1] == 299_700


def bred(attack, styles, worth, seed=0, box=None):
    wide = Box(torch.zeros(styles.shape[1]), torch.ones(styles.shape[1]), 50.0, activated=False)
    return attack._children(
        box or wide, styles, torch.as_tensor(worth).double(), torch.Generator().manual_seed(seed)
    )


def of_first(crossover, worth, size=4000):
    """The share of coordinates that children of two different parents take from the first."""
    attack = MirrorGenetic(pool=2, population=2, elite=0, crossover=crossover, mutation=0.0)
    marks = torch.tensor([[1.0], [2.0]]).expand(2, size)
    children = torch.cat([bred(attack, marks, worth, seed) for seed in range(60)])
    mixed = (children.min(1).values == 1) & (children.max(1).values == 2)
    assert mixed.sum() >= 5
    return float((children[mixed] == 1).double().mean())


@pytest.mark.parametrize(("first", "second"), [(0.6, 0.2), (0.2, 0.6), (0.5, 0.5)])
def test_crossover_favours_the_fitter_parent_and_the_published_one_the_worse(first, second):
    logs = math.log(first), math.log(second)
    assert of_first("fitter", (first, second)) == pytest.approx(first / (first + second), abs=0.01)
    assert of_first("published", (first, second)) == pytest.approx(logs[0] / sum(logs), abs=0.01)
    if first > second:
        assert of_first("fitter", (first, second)) > 0.7
        assert of_first("published", (first, second)) < 0.3


@pytest.mark.parametrize("crossover", ["fitter", "published"])
def test_crossover_of_parents_without_any_worth_or_with_all_of_it(crossover):
    attack = MirrorGenetic(crossover=crossover)
    first, second = (
        torch.tensor([0.0, 1.0, 0.0, 1.0, 1e-60]).double(),
        torch.tensor([0.0, 1.0, 1.0, 0.0, 1e-60]).double(),
    )
    expected = [0.5, 0.5, 0.0, 1.0, 0.5] if crossover == "fitter" else [0.5, 0.5, 1.0, 0.0, 0.5]
    assert attack._first_share(first, second).tolist() == pytest.approx(expected, abs=1e-12)


def test_parents_are_drawn_in_proportion_to_what_they_are_worth():
    attack = MirrorGenetic(pool=4000, population=4000, elite=0, mutation=0.0)
    marks = torch.arange(4.0).repeat(1000)[:, None]
    worth = torch.tensor([0.5, 0.0, 0.1, 0.4]).repeat(1000)
    children = torch.cat([bred(attack, marks, worth, seed) for seed in range(5)])[:, 0]
    assert not (children == 1).any()
    # A coordinate is that of parent i if i is drawn twice, or once and then chosen.
    p = torch.tensor([0.5, 0.0, 0.1, 0.4])
    expected = [
        float(sum(2 * p[i] * p[j] * p[i] / (p[i] + p[j]) for j in range(4) if p[i] + p[j] > 0))
        for i in range(4)
    ]
    assert [float((children == i).float().mean()) for i in range(4)] == pytest.approx(
        expected, abs=0.012
    )


def test_parents_are_drawn_alike_where_all_scores_are_0():
    attack = MirrorGenetic(pool=2000, population=2000, elite=0, mutation=0.0)
    children = bred(attack, torch.arange(4.0).repeat(500)[:, None], torch.zeros(2000))
    assert [float((children == i).float().mean()) for i in range(4)] == pytest.approx(
        [0.25] * 4, abs=0.04
    )


def test_mutation_moves_a_tenth_of_the_coordinates_independently_for_each_child():
    attack = MirrorGenetic(pool=50, population=50, elite=1)
    box = Box(torch.zeros(2000), torch.linspace(0.5, 2, 2000), 50.0, activated=True)
    styles = torch.full((50, 2000), -3.0)  # w = -3 is p = -15: a push of p moves w by a fifth of it
    moved = (bred(attack, styles, torch.ones(50), box=box) + 3.0) / (0.2 * box.std)
    assert moved.shape == (49, 2000)
    assert float((moved.abs() > 1e-3).float().mean()) == pytest.approx(0.1 * 0.99, abs=0.005)
    assert 0.099 < moved.max() < 0.1001
    assert -0.1001 < moved.min() < -0.099
    both = (moved[0].abs() > 1e-3) & (moved[1].abs() > 1e-3)
    assert both.sum() > 5
    assert ((moved[0] - moved[1]).abs()[both] > 1e-3).float().mean() > 0.9


def test_children_are_held_in_the_box_and_the_elite_is_left_alone():
    known = styled_prior()
    made = calm(known)
    box = box_of(known, 60)
    found = run(
        MirrorGenetic(**BLACK | {"noise": 30.0, "mutation": 1.0, "survivors": 20, "keep": 20}),
        known,
        made,
    )
    pool = {tuple(row) for row in drawn(known, 60).tolist()}
    for people in found.latents:
        outside = people[(box.clamp(people) != people).any(1)]
        assert len(outside) <= 1
        assert {tuple(row) for row in outside.tolist()} <= pool
    assert (found.latents == box.high).any()
    assert (found.latents == box.low).any()


def test_the_best_never_gets_worse_and_no_generations_are_the_best_of_the_pool():
    known = styled_prior()
    made = calm(known)
    sure = [
        run(MirrorGenetic(**BLACK | {"generations": count}), known, made).confidence
        for count in (0, 1, 6)
    ]
    for earlier, later in pairwise(sure):
        assert (later[:, 0] >= earlier[:, 0] - 1e-6).all()
    assert sure[-1].mean() > sure[0].mean() + 1e-3
    made.module.eval()
    space = StyleSpace(known, 0.7, 8)
    scores = style_scores(
        made.view(["scores"]), space, pool_styles(space, 60, seed=0), torch.arange(4)
    )
    assert torch.allclose(sure[0].double(), scores.topk(3, dim=0).values.T, atol=1e-6)


def test_queries_by_breeding_are_counted():
    view = calm().view(["scores"])
    attack = MirrorGenetic(**BLACK | {"elite": 2, "candidates": 2})
    found = invert(attack, view, Assets(prior=styled_prior()), people=[0, 3], seed=0, work=NoWork())
    assert (found.steps == 6).all()
    # The pool once, children of six generations of two populations of two people, survivors.
    assert found.queries == view.queries == 60 + 2 * 2 * 6 * 18 + 2 * 2 * 3
    assert run(replace(attack, samples=3), labels=[3]).queries == 3 * (60 + 2 * 6 * 18 + 2 * 3)


def test_a_person_who_is_found_is_bred_no_further():
    known = styled_prior()
    made = calm(known)
    start = run(MirrorGenetic(**BLACK | {"generations": 0}), known, made).confidence[:, 0]
    assert (run(MirrorGenetic(**BLACK | {"generations": 0}), known, made).steps == 0).all()
    level = float(start.sort().values[1:3].mean())  # two people are beyond it already
    found = run(MirrorGenetic(**BLACK | {"stop": level, "generations": 40}), known, made)
    assert ((found.steps[:, 0] == 0) == (start >= level)).all()
    assert (found.confidence[:, 0][found.steps[:, 0] < 40] >= level - 1e-6).all()
    assert found.queries == 60 + int(found.steps[:, 0].sum()) * 19 + 4 * 3
    late = found.steps[:, 0].argmax().item()
    assert found.steps[late, 0] > 0
    before = run(
        MirrorGenetic(**BLACK | {"stop": 1.0, "generations": int(found.steps[late, 0]) - 1}),
        known,
        made,
        labels=[late],
    )
    assert before.confidence[0, 0] < level


@pytest.mark.parametrize("make", [styled_prior, prior], ids=["styles", "latents"])
def test_other_people_order_and_batch_change_nothing(make):
    known = make()
    made = calm(known)
    attack = MirrorGenetic(**BLACK | {"generations": 4})
    whole = run(attack, known, made)
    for batch, labels in ((1, (0, 1, 2, 3)), (17, (3, 0)), (1000, (2,))):
        some = run(replace(attack, batch=batch), known, made, labels=labels)
        assert close_images(some, of_people(whole, list(labels)))
    assert not torch.equal(run(attack, known, made, seed=1).latents, whole.latents)


@pytest.mark.parametrize("make", [styled_prior, prior], ids=["styles", "latents"])
def test_batches_change_nothing_by_gradients(make):
    known = make()
    made = calm(known)
    whole = run(Mirror(**WHITE), known, made)
    for batch, labels in ((1, (0, 1, 2, 3)), (17, (3, 0))):
        some = run(Mirror(**WHITE, batch=batch), known, made, labels=labels)
        assert close_images(some, of_people(whole, list(labels)))


def test_populations_of_one_person_begin_alike_and_differ():
    found = run(MirrorGenetic(**BLACK | {"candidates": 2, "survivors": 1, "keep": 2}), labels=[1])
    assert not torch.equal(found.latents[0, 0], found.latents[0, 1])
    assert sorted(found.draws[0].tolist()) == [0, 1]
    assert found.confidence[0, 0] >= found.confidence[0, 1]


def test_nothing_but_scores_is_asked_for(monkeypatch):
    def refuse(*_):
        raise AssertionError("only scores are there")

    for name in ("logits", "logits_and_features", "labels"):
        monkeypatch.setattr(ModelView, name, refuse)
    found = run(MirrorGenetic(**BLACK))
    assert found.confidence.isfinite().all()
    with pytest.raises(ConfigError, match="mirror_genetic needs access to scores, got labels"):
        invert(MirrorGenetic(**BLACK), target().view("labels"), Assets(prior=styled_prior()))


def test_in_a_linear_world_breeding_comes_near_the_best_corner_of_the_box():
    made, known = linear()
    box = Box.around(
        StyleSpace(known), torch.randn(200, 5, generator=generator_for(0, "pool")), 1.0
    )
    attack = MirrorGenetic(
        pool=200, population=40, generations=60, stop=1.0, mutation=0.5, noise=0.5
    )
    found = run(attack, known, made, labels=(0, 1))
    for label, sign in ((0, -1), (1, 1)):
        corner = torch.where(sign * SLOPES > 0, box.high, box.low)
        reached = sign * found.latents[label, 0] @ SLOPES
        assert (
            reached > 0.97 * sign * corner @ SLOPES
        )  # a draw outside the box may be better, and stays


def test_the_published_crossover_is_the_weaker_search():
    made, known = linear()
    sizes = {
        "pool": 100,
        "population": 30,
        "generations": 12,
        "stop": 1.0,
        "mutation": 0.3,
        "noise": 0.3,
        "elite": 0,
    }
    sure = {
        crossover: torch.stack(
            [
                run(
                    MirrorGenetic(**sizes, crossover=crossover), known, made, labels=[1], seed=seed
                ).confidence
                for seed in range(6)
            ]
        )
        for crossover in ("fitter", "published")
    }
    assert sure["fitter"].mean() > sure["published"].mean()


def test_a_score_that_is_not_finite_is_worth_nothing(monkeypatch):
    """Populations begin and go on without those that the target has no number for."""
    known = styled_prior()
    made, space = calm(known), StyleSpace(known, 0.7, 8)
    styles = drawn(known, 60)
    with torch.no_grad():
        images = space.images(styles, truncate=True).clamp(0, 1)
    bright, scores = images.mean((1, 2, 3)).median(), ModelView.scores

    def spoiled(view, images):
        return scores(view, images).where(images.mean((1, 2, 3))[:, None] < bright, torch.nan)

    monkeypatch.setattr(ModelView, "scores", spoiled)
    start, end = (
        run(MirrorGenetic(**BLACK | {"generations": count}), known, made) for count in (0, 6)
    )
    dark = images.mean((1, 2, 3)) < bright
    assert 20 <= dark.sum() <= 30
    best = scores(made.view(["scores"]), images[dark]).topk(3, dim=0).indices.T
    assert torch.allclose(start.latents, styles[dark][best], atol=1e-6)
    for found in (start, end):
        assert found.confidence.isfinite().all()
        assert not found.broken.any()
    assert end.confidence.mean() > start.confidence.mean()


def test_people_have_their_own_random_numbers():
    made = calm()
    with torch.no_grad():
        made.module[6].weight[1], made.module[6].bias[1] = (
            made.module[6].weight[0],
            made.module[6].bias[0],
        )
    start, end = (
        run(MirrorGenetic(**BLACK | {"generations": count}), made=made, labels=[0, 1])
        for count in (0, 6)
    )
    assert torch.equal(start.latents[0], start.latents[1])
    assert not torch.equal(end.latents[0], end.latents[1])


@pytest.mark.parametrize(
    "attack", [Mirror(**WHITE), MirrorGenetic(**BLACK)], ids=["gradients", "scores"]
)
@pytest.mark.parametrize("condition", ["label", "hint"])
def test_a_prior_that_is_given_something_is_refused(attack, condition):
    expected = f"{attack.name} scores random draws .* needs a {condition}"
    with pytest.raises(ConfigError, match=expected):
        run(attack, conditional_prior(condition), target())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pool": 7}, r"pool \(7\) must be at least candidates \(8\)"),
        ({"keep": 9}, r"keep \(9\) must not exceed candidates \(8\)"),
        ({"box": 0}, "box: expected more than 0"),
        ({"box": math.inf}, "box: .*finite"),
        ({"truncation": 1.1}, "truncation: expected at most 1"),
        ({"flip": 2}, "flip: expected at most 1"),
        ({"flips": 1}, "did you mean 'flip'"),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        Mirror(**bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pool": 999}, r"pool \(999\) must be at least population \(1000\)"),
        ({"elite": 1000}, r"elite \(1000\) must be less than population \(1000\)"),
        ({"survivors": 1001}, r"survivors \(1001\) must not exceed population"),
        ({"keep": 2}, r"keep \(2\) must not exceed candidates \(1\)"),
        ({"stop": 1.5}, "stop: expected at most 1"),
        ({"crossover": "worse"}, "crossover: .*'fitter' or 'published'"),
    ],
)
def test_bad_parameters_of_the_genetic_search(bad, message):
    with pytest.raises(ConfigError, match=message):
        MirrorGenetic(**bad)
