"""Tests of BREP-MI, on targets whose classes are half-spaces and balls of the latent space."""

import math

import pytest
import torch
from torch import nn

from frostglass.attacks.base import invert
from frostglass.attacks.model.brepmi import CHUNK, Brepmi
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.core.views import ModelView
from frostglass.priors.base import identity_hashes
from frostglass.runtime.seeding import generator_for
from worlds import NoWork


class Regions(nn.Module):
    """Says, without any gradient, the class that `where` gives for latents (N, latent)."""

    def __init__(self, where, classes):
        super().__init__()
        self.where, self.classes, self.head = where, classes, nn.Identity()

    def forward(self, x):
        said = nn.functional.one_hot(self.where(x.flatten(1)).long(), self.classes).to(x.dtype)
        return self.head(50 * said + 0 * x.flatten(1).sum(1, keepdim=True))


def world(where, latent=5, classes=2):
    shape = (1, 1, latent)
    made = Target(
        module=Regions(where, classes),
        classes=tuple("abcdefgh"[:classes]),
        image_shape=shape,
        head="head",
        key="toy",
    )
    known = Prior(
        generator=nn.Unflatten(1, shape),
        critic=None,
        latent=latent,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        key="plain",
    )
    return made, known


def half_space(offset=0.5, axis=0):
    """Class 1 is where coordinate `axis` is above `offset`."""
    return lambda z: z[:, axis] > offset


def ball(radius):
    """Class 1 is a ball around the middle."""
    return lambda z: z.norm(dim=1) < radius


def run(attack, where, *, labels=(1,), seed=3, **shape):
    made, known = world(where, **shape)
    return invert(
        attack, made.view(["labels"]), Assets(prior=known), people=labels, seed=seed, work=NoWork()
    )


def walked(attack, where, starts, *, label=1, seed=3):
    """Ends, radii and queries of walks from given starts, candidates 0, 1, ..."""
    made, known = world(where, latent=starts.shape[1])
    view = made.view(["labels"])
    walked = attack.recipe(view, Assets(prior=known), seed=seed).search(
        starts, torch.full((len(starts),), label), torch.arange(len(starts))
    )
    found, radius = walked.state, walked.score
    return found, radius, view.queries


def slow_walk(attack, inside, start, *, draw, label=1, seed=3):
    """One walk, point by point, as it is described; ends, radius and queries."""
    rng = generator_for(seed, "brepmi", label, draw)
    z, radius, waited, queries, result = start, attack.radius, 0, 1, start
    while (
        queries + attack.points + 1 <= attack.max_queries
        and waited < attack.patience
        and radius <= 2 * attack.box * math.sqrt(len(start))
    ):
        push, hits = torch.zeros_like(z), 0
        for direction in torch.randn(attack.points, len(z), generator=rng):
            direction = direction / direction.norm()
            hit = bool(inside((z + radius * direction)[None]))
            hits += hit
            push += (
                direction
                * ((0 if hit else -1) if attack.direction == "repulsion" else (1 if hit else -1))
                / attack.points
            )
        grows = (
            hits == attack.points
            if attack.rule == "paper"
            else hits - (attack.points - hits) > 0.75 * attack.points
        )
        proposed = (z + min(radius / attack.step_divisor, attack.step_limit) * push).clamp(
            -attack.box, attack.box
        )
        accepted = bool(inside(proposed[None]))
        queries += attack.points + 1
        z = proposed if accepted else z
        waited = 0 if grows else waited + accepted
        result = z if grows or radius == attack.radius else result
        radius = radius * attack.growth if grows else radius
    return result, radius, queries


def test_defaults_are_the_published_ones():
    attack = Brepmi()
    assert (attack.points, attack.radius, attack.growth, attack.rule, attack.direction) == (
        32,
        2,
        1.3,
        "code",
        "repulsion",
    )
    assert (
        attack.step_divisor,
        attack.step_limit,
        attack.box,
        attack.patience,
        attack.candidates,
    ) == (3, 3, 1.5, 1000, 1)
    assert attack.access == ("labels",)


@pytest.mark.parametrize(
    "where", [half_space(0.3), ball(1.6), ball(0.9)], ids=["half-space", "ball", "small ball"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"rule": "paper"}, {"direction": "both"}, {"step_divisor": 0.5, "step_limit": 0.9}],
)
def test_the_walk_is_the_slow_and_obvious_one(where, options):
    attack = Brepmi(**({"points": 16, "radius": 0.4, "max_queries": 600, "patience": 12} | options))
    starts = torch.randn(200, 4, generator=torch.Generator().manual_seed(1)).clamp(-1.5, 1.5)
    starts = starts[where(starts)][:5]
    found, radius, queries = walked(attack, where, starts)
    slow = [slow_walk(attack, where, start, draw=draw) for draw, start in enumerate(starts)]
    assert torch.allclose(found, torch.stack([point for point, _, _ in slow]), atol=1e-5)
    assert radius.tolist() == pytest.approx([size for _, size, _ in slow])
    assert queries == sum(count for _, _, count in slow)
    assert where(found).all()


def test_all_inside_pushes_nowhere_and_outside_pushes_away():
    u = nn.functional.normalize(
        torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0)), dim=2
    )
    inside = torch.ones(3, 8, dtype=torch.bool)
    assert torch.equal(Brepmi()._away(inside, u), torch.zeros(3, 5))
    inside[1, 2] = inside[1, 6] = False
    away = Brepmi()._away(inside, u)
    assert torch.equal(away[0], torch.zeros(5))
    assert torch.allclose(
        away[1], -(u[1, 2] + u[1, 6]) / 8
    )  # divided by all points, not by those outside
    assert torch.allclose(
        Brepmi(direction="both")._away(inside, u)[1],
        (u[1].sum(0) - 2 * u[1, 2] - 2 * u[1, 6]) / 8,
        atol=1e-6,
    )


@pytest.mark.parametrize(("rule", "least"), [("code", 29), ("paper", 32)])
def test_how_many_inside_make_the_radius_grow(rule, least, monkeypatch):
    for count in (least - 1, least):
        around = torch.arange(32) < count
        script = iter(
            [torch.tensor([1]), around[None].long(), torch.tensor([1])]
        )  # the start, the sphere, the proposal
        monkeypatch.setattr(
            Brepmi, "_labels", lambda self, view, prior, latents, script=script: next(script)
        )
        _, radius, _ = walked(Brepmi(rule=rule, max_queries=34), half_space(), torch.zeros(1, 5))
        assert radius.tolist() == pytest.approx([2 * 1.3 if count == least else 2])


def test_where_all_is_inside_the_radius_grows_at_every_look_and_nothing_moves():
    start = torch.tensor([[0.1, -0.7, 1.2, 0.4, 0.0]])
    for looks in range(1, 6):
        found, radius, queries = walked(
            Brepmi(max_queries=1 + 33 * looks), lambda z: z[:, 0] > -1e9, start
        )
        assert radius.tolist() == pytest.approx([2 * 1.3**looks])
        assert torch.equal(found, start)
        assert queries == 1 + 33 * looks
    # The fifth sphere, R = 7.4, is larger than the box, whose diagonal is 3 √5 = 6.7.
    assert walked(Brepmi(), lambda z: z[:, 0] > -1e9, start)[2] == queries


def test_it_moves_away_from_the_border_of_a_half_space():
    normal = nn.functional.normalize(torch.tensor([0.2, -0.5, 0.9, 0.1, -0.3]), dim=0)
    starts = normal * torch.tensor(
        [[0.05], [0.1], [0.2], [0.3]]
    )  # the border goes through the middle: z · normal is the margin
    found, _, _ = walked(Brepmi(radius=0.3, max_queries=3000), lambda z: z @ normal > 0, starts)
    assert ((found - starts) @ normal).min() > 1.0


def test_it_moves_to_the_middle_of_a_ball():
    starts = (
        nn.functional.normalize(
            torch.randn(4, 5, generator=torch.Generator().manual_seed(2)), dim=1
        )
        * 1.9
    )
    found, radius, _ = walked(Brepmi(radius=0.3, max_queries=4000), ball(2.0), starts)
    assert found.norm(dim=1).max() < 1.0
    assert radius.min() > 1.0


def needle(seed=3, place=5, latent=5):
    """Class 1 is one of the draws and next to nothing around it: every proposal is rejected."""
    point = torch.randn(CHUNK, latent, generator=generator_for(seed, "brepmi", "start", 0)).clamp(
        -1.5, 1.5
    )[place]
    return point, lambda z: (z - point).norm(dim=1) < 1e-4


def test_the_budget_ends_a_walk_whose_proposals_are_all_rejected():
    point, where = needle()
    found = run(Brepmi(max_queries=500), where)
    # One chunk of draws, the start, 15 times 32 points and a proposal (a 16th would make 529), and
    # the confidence.
    assert found.queries == CHUNK + 1 + 15 * 33 + 1
    assert torch.equal(found.latents[0, 0], point)
    assert found.confidence.tolist() == [[1]]


def test_every_pass_of_a_look_is_paid_for():
    _, where = needle()
    found = run(Brepmi(max_queries=500, samples=3), where)
    assert found.queries == 3 * (
        CHUNK + 1 + 5 * 33 + 1
    )  # a walk of 498; a sixth move would make 597


def test_patience_counts_accepted_moves_only():
    queries = walked(Brepmi(patience=7), ball(1.0), torch.zeros(1, 5))[
        2
    ]  # no sphere of radius 2 has a point inside, moves are short
    assert queries == 1 + 7 * 33
    _, where = needle()
    point, _ = needle()
    assert walked(Brepmi(patience=7, max_queries=3301), where, point[None])[2] == 1 + 100 * 33


def test_a_radius_that_never_grew_gives_the_point_reached():
    start = torch.tensor([[0.9, 0.0, 0.0, 0.0, 0.0]])
    found, radius, _ = walked(Brepmi(patience=30), ball(1.0), start)
    assert radius.tolist() == [2]
    assert (found - start).norm() > 0.01
    assert found.norm() < 1


def test_starts_are_clamped_draws_that_hit_the_label():
    made, known = world(half_space(1.2))
    view = made.view(["labels"])
    starts = (
        Brepmi(candidates=4, box=1.3)
        .recipe(view, Assets(prior=known), seed=3)
        .start(torch.tensor([1, 0]))
    )
    assert starts.shape == (2, 4, 5)
    assert starts.abs().max() <= 1.3
    assert (
        half_space(1.2)(starts.flatten(0, 1)).view(2, 4) == torch.tensor([[True], [False]])
    ).all()
    drawn = torch.randn(CHUNK, 5, generator=generator_for(3, "brepmi", "start", 0)).clamp(-1.3, 1.3)
    assert torch.equal(starts[0], drawn[half_space(1.2)(drawn)][:4])
    assert view.queries == CHUNK


def test_drawing_goes_on_until_every_candidate_has_a_start():
    made, known = world(half_space(2.4))
    view = made.view(["labels"])
    starts = (
        Brepmi(candidates=6, box=3)
        .recipe(view, Assets(prior=known), seed=3)
        .start(torch.tensor([1]))[0]
    )
    drawn = torch.cat(
        [
            torch.randn(CHUNK, 5, generator=generator_for(3, "brepmi", "start", number))
            for number in range(20)
        ]
    ).clamp(-3, 3)
    hits = half_space(2.4)(drawn).nonzero()[:, 0]
    assert hits[0] // CHUNK < hits[5] // CHUNK
    assert torch.equal(starts, drawn[hits[:6]])
    assert view.queries == (int(hits[5]) // CHUNK + 1) * CHUNK


def test_candidates_without_starts_of_their_own_share_one_and_walk_differently():
    point, where = needle()
    attack = Brepmi(candidates=3, keep=3, max_queries=400, tries=2 * CHUNK)
    made, known = world(where)
    assert torch.equal(
        attack.recipe(made.view(["labels"]), Assets(prior=known), seed=3).start(torch.tensor([1]))[
            0
        ],
        point.expand(3, 5),
    )
    found, _, _ = walked(
        Brepmi(radius=0.3, max_queries=400),
        half_space(),
        torch.tensor([[0.6, 0, 0, 0, 0]]).expand(2, 5),
    )
    assert not torch.equal(found[0], found[1])


def three(z):
    """Classes 0, 1 and 3 by coordinates; 2 and 4 are never said."""
    return torch.where(z[:, 0] > 0.5, 1, torch.where(z[:, 1] > 0.5, 3, 0))


def test_a_label_never_hit_keeps_random_draws_and_costs_the_others_nothing():
    attack = Brepmi(radius=0.3, max_queries=300, candidates=2, keep=2, tries=600, batch=8)
    with_it = run(attack, three, labels=(1, 2, 3, 4), classes=5)
    assert with_it.confidence.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    without = run(attack, three, labels=(1, 3), classes=5)
    assert torch.allclose(with_it.latents[[0, 2]], without.latents, atol=1e-4)
    drawn = [
        torch.randn(CHUNK, 5, generator=generator_for(3, "brepmi", "start", number)).clamp(
            -1.5, 1.5
        )
        for number in range(3)
    ]
    assert torch.equal(with_it.latents[[1, 3]], torch.cat(drawn)[torch.tensor([[4, 5], [8, 9]])])
    # All draws, rounded up to chunks, where one is enough for the others; and two queries of each
    # random draw.
    assert with_it.queries - without.queries == 2 * CHUNK + 4 * 2


def test_no_label_hit_at_all():
    with pytest.raises(
        RunError,
        match=r"none of 256 draws .* any of the 2 attacked labels.*raise attack.tries",
    ):
        run(Brepmi(tries=10), three, labels=(2, 4), classes=5)


def test_candidates_are_kept_by_their_last_radius():
    attack = Brepmi(radius=0.2, max_queries=500, candidates=5, keep=3)
    made, known = world(ball(1.8))
    recipe = attack.recipe(made.view(["labels"]), Assets(prior=known), seed=3)
    starts = recipe.start(torch.tensor([1]))[0]
    walked = recipe.search(starts, torch.ones(5, dtype=torch.long), torch.arange(5))
    latents, radius = walked.state, walked.score
    assert len(set(radius.tolist())) > 1
    order = radius.argsort(descending=True, stable=True)[:3]
    found = run(attack, ball(1.8))
    assert found.draws[0].tolist() == order.tolist()
    assert torch.allclose(found.latents[0], latents[order], atol=1e-4)


@pytest.mark.parametrize("latent", [5, 100])
def test_batch_size_changes_nothing(latent):
    def some(batch):
        attack = Brepmi(
            points=20, radius=0.4, max_queries=400, patience=6, candidates=3, keep=3, batch=batch
        )
        return run(attack, three, labels=(3, 0, 1), classes=4, latent=latent)

    whole = some(10_000)
    for batch in (1, 17, 64, 130):
        parts = some(batch)
        assert torch.allclose(parts.latents, whole.latents, atol=1e-4)
        assert torch.equal(parts.draws, whole.draws)
        assert parts.queries == whole.queries


def test_nothing_but_labels_is_asked_for(monkeypatch):
    def refuse(*_):
        raise AssertionError("only labels are there")

    for name in ("logits", "scores", "logits_and_features"):
        monkeypatch.setattr(ModelView, name, refuse)
    assert run(Brepmi(max_queries=100), half_space()).confidence.tolist() == [[1]]


def test_masked_gradients_stop_gmi_and_not_this():
    """A target without gradients resists a gradient attack, but not this one."""
    made, known = world(half_space(1.0))
    by_gradient = Gmi(steps=50, candidates=6, keep=6, critic_weight=0, clamp=0)
    stuck = invert(
        by_gradient,
        made.view(["gradients"]),
        Assets(prior=known),
        people=[1],
        seed=3,
        work=NoWork(),
    )
    assert stuck.confidence.mean() < 0.5
    by_label = invert(
        Brepmi(radius=0.2, max_queries=2000, candidates=6, keep=6),
        made.view(["labels"]),
        Assets(prior=known),
        people=[1],
        seed=3,
        work=NoWork(),
    )
    assert by_label.confidence.min() == 1
    assert by_label.latents[0, :, 0].min() > 1.2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"keep": 2}, "keep .2. must not exceed candidates .1."),
        (
            {"max_queries": 33},
            r"max_queries .33. must allow one move: at least .points \+ 2. · samples .34.",
        ),
        ({"samples": 4, "max_queries": 135}, "samples .136."),
        ({"growth": 1}, "growth: expected more than 1"),
        ({"box": math.inf}, "box: .*finite"),
        ({"rule": "most"}, "rule: .*'code' or 'paper'"),
        ({"point": 3}, "did you mean 'points'"),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        Brepmi(**bad)


def test_a_first_sphere_larger_than_the_box_is_refused():
    with pytest.raises(
        ConfigError, match=r"brepmi.radius must be at most the diagonal of the box \(6.71\), got 7"
    ):
        run(Brepmi(radius=7), half_space())


def test_the_budget_has_walks_and_starts():
    size = AuditSize(people=10)
    budget = Brepmi(candidates=2, max_queries=1000, tries=256).budget(size)
    assert budget.description == "10 people × 2 candidates × 1,000 queries, pool of 256"
    assert budget.evaluations == 10 * 2 * 1000 + 256
    brief = Brepmi(candidates=2, samples=3).brief()
    assert (brief.max_queries, brief.tries, brief.candidates) == (34 * 3, 256, 2)
