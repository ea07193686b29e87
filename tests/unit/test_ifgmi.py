"""Tests of IF-GMI: the L1 ball, the stages, which stage is kept, and what is refused."""

import re

import pytest
import torch

from frostglass.attacks._search import search
from frostglass.attacks._search.ball import project_l1
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks.base import invert
from frostglass.attacks.model.ifgmi import Entrance, Ifgmi
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.objective import poincare
from frostglass.data._augment import cropped
from frostglass.priors.stylegan2 import Stylegan2
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import generator_for
from worlds import SHAPE, NoWork, close_images, of_people, prior, styled_prior, target

START = {"pool": 40, "candidates": 3, "keep": 3, "steps": 4, "lr": 0.05}
STILL = {"area": (1, 1)}


def run(attack, known=None, labels=(0, 1, 2, 3)):
    return invert(
        attack,
        target().view(["gradients"]),
        Assets(prior=known or styled_prior()),
        people=labels,
        seed=0,
        work=NoWork(),
    )


def in_order(found, column):
    """A column of the results by the number of the candidate, whatever order they were kept in."""
    return column.gather(
        1,
        found.draws.argsort(1).view(*found.draws.shape, *[1] * (column.ndim - 2)).expand_as(column),
    )


def test_defaults_are_the_published_ones():
    attack = Ifgmi()
    assert (attack.loss, attack.lr, attack.betas, attack.steps, attack.block_steps) == (
        "poincare",
        0.005,
        (0.1, 0.1),
        50,
        (10, 10, 10),
    )
    assert attack.radii == (1000, 2000, 3000, 4000, 5000, 6000, 8000, 8000)
    assert (
        attack.pool,
        attack.candidates,
        attack.keep,
        attack.trials,
        attack.stage,
        attack.area,
    ) == (2000, 50, 50, 0, "last", (0.9, 1.0))


# The ball


def projected(deviation, radius):
    """By bisection of the threshold, one row at a time."""
    rows = []
    for row in deviation.double():
        low, high = 0.0, row.abs().max().item()
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if (row.abs() - middle).clamp(min=0).sum() > radius
                else (low, middle)
            )
        rows.append(
            row if row.abs().sum() <= radius else row.sign() * (row.abs() - high).clamp(min=0)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 5000])
@pytest.mark.parametrize("radius", [0.01, 1.0, 30.0])
def test_the_ball_against_bisection(size, radius, dtype):
    scales = torch.logspace(-3, 2, 12, dtype=dtype)[:, None]
    deviation = (
        torch.randn(12, size, generator=generator_for(0, "ball", size), dtype=dtype) * scales
    )
    found = project_l1(deviation, radius)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), projected(deviation, radius), rtol=0, atol=1e-6 * radius)
    inside = deviation.double().abs().sum(1) <= radius
    assert torch.equal(found[inside], deviation[inside])
    assert (found.double().abs().sum(1) <= radius).all()
    assert torch.allclose(
        found.double().abs().sum(1)[~inside], torch.tensor(radius, dtype=torch.double), rtol=1e-6
    )
    assert torch.equal(project_l1(found, radius), found)


def test_nothing_on_the_ball_is_nearer():
    """Every point of a fine grid on the circle's edge, in two dimensions, where it can be seen."""
    share = torch.linspace(-1, 1, 4001, dtype=torch.double)
    edge = torch.cat([torch.stack([share, sign * (1 - share.abs())], 1) for sign in (1, -1)])
    deviation = torch.tensor([[2.0, 0.5], [-1.0, 1.0], [0.3, -4.0], [0.9, 0.4]], dtype=torch.double)
    least = torch.cdist(deviation, edge).amin(1)
    assert torch.allclose((project_l1(deviation, 1.0) - deviation).norm(dim=1), least, atol=1e-3)
    assert torch.equal(
        project_l1(deviation, 1.0)[[0, 2]].round(decimals=6),
        torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.double),
    )


def test_rows_of_a_ball_do_not_know_each_other_and_what_is_not_finite_stays_so():
    deviation = torch.randn(4, 50, generator=generator_for(0, "rows"))
    alone = [project_l1(row[None], 2.0)[0] for row in deviation]
    spoiled = deviation.clone()
    spoiled[1, 3], spoiled[2, 4] = torch.nan, torch.inf
    found = project_l1(spoiled, 2.0)
    assert torch.equal(found[0], alone[0])
    assert torch.equal(found[3], alone[3])
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()


# What enters a block


def some_rows(entrance, count=5):
    """Rows of a stage, as the stages before would hand them over."""
    rows = torch.randn(count, 8, generator=generator_for(0, "styles"))
    with torch.no_grad():
        for block in range(entrance.block):
            rows = Entrance(entrance.network, block, entrance.carry_rgb).next_rows(rows)
    return rows


@pytest.mark.parametrize("block", [0, 1, 2])
def test_the_image_is_the_same_from_every_block(block):
    network = styled_prior().generator
    entrance = Entrance(network, block)
    rows = some_rows(entrance)
    assert rows.shape == (5, sum(entrance.parts))
    with torch.no_grad():
        assert torch.equal(entrance.images(rows), network.paint(rows[:, :8]))


@pytest.mark.parametrize("block", [1, 2])
def test_without_carry_rgb_the_image_jumps(block):
    """What the published code shows lacks exactly what the blocks before have painted."""
    network = styled_prior().generator
    bare, carried = (Entrance(network, block, carry) for carry in (False, True))
    rows = some_rows(carried)
    style, maps, rgb = rows.split(carried.parts, dim=1)
    with torch.no_grad():
        missing = carried.images(rows) - bare.images(torch.cat([style, maps], 1))
        side = network.settings.sizes[block - 1]
        painted = rgb.unflatten(1, (3, side, side))
        while painted.shape[2] < 16:
            painted = torch.nn.functional.conv_transpose2d(
                painted,
                torch.outer(t := torch.tensor([1.0, 3, 3, 1]), t).div(16).expand(3, 1, 4, 4),
                stride=2,
                padding=1,
                groups=3,
            )
    assert torch.allclose(missing, painted / 2, atol=1e-5)
    assert missing.abs().mean() > 0.02


def test_styles_and_maps_have_gradients_and_the_painted_image_none():
    entrance = Entrance(styled_prior().generator, 2)
    rows = some_rows(entrance).requires_grad_()
    (slope,) = torch.autograd.grad(entrance.images(rows).square().sum(), rows)
    style, maps, rgb = slope.split(entrance.parts, dim=1)
    assert style.abs().amin() > 0
    assert maps.abs().mean() > 1e-3
    assert rgb.abs().max() == 0


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_styles_and_maps_each_have_their_ball(radius):
    entrance = Entrance(styled_prior().generator, 1)
    start = some_rows(entrance)
    moves = (
        0.2
        * torch.randn(start.shape, generator=generator_for(0, "moves")).split(
            entrance.parts, dim=1
        )[1]
    )
    rows = start.clone()
    rows[:, :8] += 0.1
    rows[:, 8 : 8 + moves.shape[1]] += moves
    style, maps, rgb = (entrance.within(radius)(rows, start) - start).split(entrance.parts, dim=1)
    assert torch.allclose(style, project_l1(rows[:, :8] - start[:, :8], radius), atol=1e-6)
    assert torch.allclose(style.abs().sum(1), torch.tensor(min(radius, 0.8)), atol=1e-5)
    assert torch.allclose(maps, project_l1(moves, radius), atol=1e-6)
    assert torch.allclose(maps.abs().sum(1), torch.tensor(radius), atol=1e-4)
    assert rgb.abs().max() == 0
    assert torch.equal(
        entrance.within(1e6)(rows, start), rows
    )  # far from the edge not a bit changes


# The stages


@pytest.mark.parametrize("trials", [0, 3])
def test_it_goes_on_from_where_ppa_ends(trials):
    """Without steps at later blocks, the result is PPA's."""
    ppa, ours = (
        run(Ppa(**START, trials=trials)),
        run(Ifgmi(**START, trials=trials, block_steps=(0, 0))),
    )
    for column in ("images", "latents", "confidence"):
        assert torch.allclose(getattr(ours, column), getattr(ppa, column), atol=1e-4)
    assert ours.queries == ppa.queries
    bare = run(Ifgmi(**START, trials=trials, block_steps=(0, 0), carry_rgb=False))
    assert torch.allclose(in_order(bare, bare.latents), in_order(ppa, ppa.latents), atol=1e-4)
    assert (in_order(bare, bare.images) - in_order(ppa, ppa.images)).abs().mean() > 0.02


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("radii", [(1000.0,) * 3, (0.3, 0.4, 2.0)])
def test_all_stages_by_hand(carry, radii):
    """Separate tensors for style, maps and image, an Adam per stage, projection by bisection."""
    known, module = styled_prior(), target().module.eval()
    network, label, steps = known.generator, 2, (4, 3, 2)
    synthesis = network.network.synthesis
    attack = Ifgmi(**START, **STILL, block_steps=steps[1:], radii=radii, carry_rgb=carry)
    w = in_order(
        start := run(Ifgmi(**{**START, "steps": 0}, **STILL, block_steps=()), labels=(label,)),
        start.latents,
    )[0]
    maps, rgb = synthesis.begin(w[:, None].expand(-1, 6, -1))
    for number in range(3):
        moving = [w.clone().requires_grad_(), maps.detach().clone().requires_grad_(number > 0)]
        begun, rule = (
            [part.detach().clone() for part in moving],
            torch.optim.Adam(moving[: 1 + bool(number)], lr=0.05, betas=(0.1, 0.1)),
        )

        def shown(to_block=None, number=number, moving=moving, rgb=rgb):
            ws = moving[0][:, None].expand(-1, 6, -1)
            return synthesis.run(
                ws,
                features=moving[1],
                rgb=rgb,
                from_block=number,
                to_block=to_block,
                carry_rgb=carry,
            )

        for _ in range(steps[number]):
            rule.zero_grad()
            poincare(module(shown()[1] / 2 + 0.5), torch.tensor([label] * 3)).sum().backward()
            rule.step()
            with torch.no_grad():
                for part, first in zip(moving, begun, strict=True):
                    part.copy_(
                        first + projected((part - first).flatten(1), radii[number]).view_as(part)
                    )
        with torch.no_grad():
            image = (shown()[1] / 2 + 0.5).clamp(0, 1)
            w = moving[0].detach()
            maps, rgb = shown(number + 1)
    found = run(attack, labels=(label,))
    assert torch.allclose(in_order(found, found.latents)[0], w, atol=1e-4)
    assert torch.allclose(in_order(found, found.images)[0], image, atol=1e-3)
    assert (found.steps == 9).all()


def test_the_balls_hold_the_search_back():
    """The style at every stage, and with a style that cannot move, the maps too."""
    start = run(Ifgmi(**{**START, "steps": 0}, block_steps=(), trials=0))
    free, held, tight = (
        run(Ifgmi(**START, block_steps=(4, 4), radii=radii, trials=0))
        for radii in ((1000.0,) * 3, (0.1,) * 3, (1e-4, 1e-4, 1e-4))
    )
    moved = [
        (in_order(some, some.latents) - in_order(start, start.latents)).abs().sum(2)
        for some in (free, held, tight)
    ]
    assert (moved[0] > 0.4).all()
    assert (moved[1] <= 0.3 + 1e-5).all()
    assert (moved[1] > 0.1).any()  # a ball for each stage, around where it began
    assert (moved[2] <= 3e-4 + 1e-5).all()
    change = [
        (in_order(some, some.images) - in_order(start, start.images)).abs().mean()
        for some in (free, held, tight)
    ]
    assert change[0] > 2 * change[1] > 20 * change[2]


def test_each_stage_makes_the_loss_smaller():
    module, losses = target().module.eval(), []
    for block_steps in ((), (8,), (8, 8)):
        found = run(Ifgmi(**START, **STILL, block_steps=block_steps))
        with torch.no_grad():
            losses.append(
                poincare(module(found.images.flatten(0, 1)), found.labels.repeat_interleave(3))
                .unflatten(0, (4, 3))
                .mean(1)
            )
    assert (losses[1] < losses[0]).all()
    assert (losses[2] < losses[1]).all()


def test_the_most_confident_stage_is_chosen_for_each_candidate():
    """Under the same trials for all stages, by the target; the mean of p_y is written out."""
    attack = Ifgmi(**START, block_steps=(3, 4), stage="confident", trials=6, carry_rgb=False)
    chosen, module = run(attack), target().module.eval()
    stages = []
    for block_steps in ((), (3,), (3, 4)):
        some = run(Ifgmi(**START, block_steps=block_steps, carry_rgb=False))
        stages.append(in_order(some, some.images))
    ratings = torch.zeros(3, 4, 3, dtype=torch.double)
    for stage, images in enumerate(stages):
        for label in range(4):
            rng = RowRng.of(0, "rank", torch.tensor([label] * 3), torch.arange(3))
            for _ in range(6):
                with torch.no_grad():
                    seen = cropped(
                        images[label],
                        rng.uniform(5),
                        area=(0.5, 0.9),
                        ratio=(0.8, 1.2),
                        mirror=0.5,
                    )
                    ratings[stage, label] += module(seen).double().softmax(1)[:, label] / 6
    winner = ratings.argmax(0)
    assert len(winner.unique()) == 3  # each stage is best for someone, or the test shows nothing
    expected = torch.stack(stages).gather(
        0, winner[None, :, :, None, None, None].expand(1, 4, 3, *SHAPE)
    )[0]
    assert torch.equal(in_order(chosen, chosen.images), expected)
    assert torch.equal(chosen.draws, ratings.amax(0).argsort(1, descending=True))


@pytest.mark.parametrize("stage", ["last", "confident"])
def test_other_people_order_and_batch_change_nothing(stage):
    small = {
        **START,
        "block_steps": (3, 2),
        "stage": stage,
        "trials": 2,
        "patience": 2,
        "flat": 0.3,
        "steps": 14,
    }
    whole = run(Ifgmi(**small, batch=100))
    assert len(whole.steps.unique()) > 1  # some finish a stage early, and go on with the next
    for batch, labels in ((1, (0, 1, 2, 3)), (2, (3, 1)), (40, (2, 0, 1))):
        some = run(Ifgmi(**small, batch=batch), labels=labels)
        expected = of_people(whole, list(labels))
        assert close_images(some, expected)
        assert torch.equal(some.steps, expected.steps)


@pytest.mark.parametrize("stage", ["last", "confident"])
def test_a_row_that_breaks_off_keeps_what_it_had_and_says_so(stage, monkeypatch):
    """The loss of person 1 is not finite from the second step of stage 1 on.

    Each stage begins with a trial of two calls: how kernels round these rows without padding.
    """
    plain = {**START, "block_steps": (12, 2), "stage": stage, "trials": 2}
    healthy, before = (
        run(Ifgmi(**plain)),
        run(Ifgmi(**{**plain, "block_steps": (), "stage": "last"})),
    )
    calls, class_loss = [], Ifgmi.class_loss

    def breaking(self, view, prior, images, labels, rng):
        value, sure = class_loss(self, view, prior, images, labels, rng)
        calls.append(1)
        return value + torch.where(
            (labels == 1) & (len(calls) > 2 + START["steps"] + 2 + 1), torch.nan, 0.0
        ), sure

    monkeypatch.setattr(Ifgmi, "class_loss", breaking)
    monkeypatch.setattr(search, "_rounds_alike", lambda *_: False)  # its trial would count too
    found = run(Ifgmi(**plain))
    assert found.broken.tolist() == [[label == 1] * 3 for label in range(4)]
    assert found.partial.tolist() == [False, True, False, False]
    assert close_images(of_people(found, [0, 2, 3]), of_people(healthy, [0, 2, 3]))
    for ours, kept in ((found.images, before.images), (found.latents, before.latents)):
        assert torch.allclose(in_order(found, ours)[1], in_order(before, kept)[1], atol=1e-3)


def test_queries_are_counted_and_foretold():
    attack = Ifgmi(**START, block_steps=(3, 2), trials=5)
    assert attack.search_effort == ("(4 + 3 + 2 steps + 5 trials)", 14)
    assert attack.start_images == 80
    assert run(attack, labels=(0, 3)).queries == 80 + 2 * 3 * (
        9 + 5 + 1
    )  # once more for the confidence that is told
    chosen = Ifgmi(**START, block_steps=(3, 2), trials=5, stage="confident")
    assert chosen.search_effort == ("(4 + 3 + 2 steps + 15 trials)", 24)
    assert run(chosen, labels=(0, 3)).queries == 80 + 2 * 3 * (9 + 15 + 1)
    assert Ifgmi(**START, block_steps=(), samples=2).search_effort == ("4 steps of 2 images", 8)


NO_BLOCKS = "ifgmi searches the maps between the blocks .* this prior's generator has none"
TOO_MANY = r"ifgmi\.block_steps must have at most 2 stages, .* 3 blocks, got 3: shorten it"


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=NO_BLOCKS):
        run(Ifgmi(**START), prior())
    with pytest.raises(ConfigError, match=TOO_MANY):
        run(Ifgmi(**START, block_steps=(1, 1, 1)))
    with pytest.raises(ConfigError, match=r"radii \(1\) must name one for each of the 2 stages"):
        Ifgmi(block_steps=(1,), radii=(5.0,))
    with pytest.raises(
        ConfigError, match='stage "confident" compares images by trials: set trials to 1 or more'
    ):
        Ifgmi(stage="confident")
    with pytest.raises(ConfigError, match="critic_weight is 1, but the prior has no critic"):
        run(Ifgmi(**START, block_steps=(), critic_weight=1.0))


def test_problems_with_untrained_priors_are_listed():
    def problems(method, shape):
        view = target(shape=shape).view("gradients")
        assets = Assets(prior=method.untrained(shape, 4))
        return Ifgmi(block_steps=(1, 1, 1)).problems(view, assets)

    (problem,) = problems(Wgan(), (3, 32, 32))
    assert re.search(NO_BLOCKS, problem)
    (problem,) = problems(Stylegan2(channel_max=8), SHAPE)
    assert re.search(TOO_MANY, problem)
    assert not problems(Stylegan2(channel_max=8), (3, 32, 32))
