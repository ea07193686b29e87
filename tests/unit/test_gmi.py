"""Tests of GMI."""

import pytest
import torch

from frostglass.attacks._search.select import Candidates, by_score, in_order
from frostglass.attacks._search.start import Pool, scored
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.store.files import Work
from worlds import NoWork, prior, target


def test_defaults_are_the_published_ones():
    gmi = Gmi()
    assert (
        gmi.loss,
        gmi.weight,
        gmi.critic_weight,
        gmi.optimizer,
        gmi.lr,
        gmi.momentum,
        gmi.steps,
        gmi.clamp,
    ) == (
        "ce",
        100,
        1,
        "nesterov",
        0.02,
        0.9,
        1500,
        1,
    )


def test_a_pool_is_scored_once(tmp_path):
    """A resumed run, or another process, takes its parts from the work folder."""
    attack = Gmi(steps=2, candidates=2, keep=1, pool=40, critic_weight=0.0, batch=2)

    def attacked():
        view = target().view(["gradients"])
        work = Work(tmp_path)
        return invert(attack, view, Assets(prior=prior()), people=[2, 0], work=work), view

    whole, view = attacked()
    assert whole.queries == view.queries == 40 + 2 * 2 * 2 + 4  # pool, steps, and the read-out
    first, _, _ = sorted(tmp_path.glob("starts-*"))  # 16, 16 and 8 draws
    for lost, asked in (([], 0), ([first], 16)):
        for file in [*lost, *tmp_path.glob("shard-*")]:
            file.unlink()
        again, view = attacked()
        assert torch.equal(again.images, whole.images)
        assert (again.queries, view.queries) == (whole.queries, whole.queries - 40 + asked)


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (16, 1), (17, 2), (256, 16), (272, 9)])
def test_parts_of_a_pool_are_whole_chunks(size, parts):
    view, draws = target().view(["gradients"]), torch.arange(size, dtype=torch.float)
    together, counts = [], []

    def score(chunk):
        together.append(len(chunk))
        return 2 * chunk

    def elsewhere(count, make):
        counts.append(count)
        return [*map(make, range(count))]

    whole = scored(view, draws, score, batch=16)
    assert torch.equal(whole, 2 * draws)
    assert sorted(together) == sorted(map(len, draws.split(16)))
    with view.parts_from(elsewhere):
        assert torch.equal(scored(view, draws, score, batch=16), whole)
    assert counts == [parts]
    assert len(view.in_parts(3, torch.tensor)) == 3  # by this process again


def test_one_step_by_hand():
    """After one Nesterov step from rest z = z0 - 1.9 η g, with g of (100 · CE - D) / B."""
    made, known = target(), prior()
    found = invert(
        Gmi(steps=1, candidates=1, keep=1, clamp=0.0),
        made.view(["gradients"]),
        Assets(prior=known),
        people=[2],
        seed=0,
        work=NoWork(),
    )
    start = invert(
        Gmi(steps=0, candidates=1, keep=1, clamp=0.0),
        made.view(["gradients"]),
        Assets(prior=known),
        people=[2],
        seed=0,
        work=NoWork(),
    )
    z = start.latents[0].clone().requires_grad_()
    made.module.eval()
    known.generator.eval()
    images = known.generator(z)
    loss = (
        100 * torch.nn.functional.cross_entropy(made.module(images), torch.tensor([2]))
        - known.critic(images).sum()
    ) / 60
    (gradient,) = torch.autograd.grad(loss, z)
    assert torch.allclose(found.latents[0], z - 1.9 * 0.02 * gradient, atol=1e-6)


def test_clamp_keeps_latents_in_the_box():
    found = invert(
        Gmi(steps=5, candidates=2, keep=2, lr=5.0, clamp=0.5),
        target().view(["gradients"]),
        Assets(prior=prior()),
        seed=0,
        work=NoWork(),
    )
    assert found.latents.abs().max() <= 0.5


def test_queries_are_counted():
    view = target().view(["gradients"])
    found = invert(
        Gmi(steps=7, candidates=3, keep=1, pool=20),
        view,
        Assets(prior=prior()),
        people=[0, 1],
        seed=0,
        work=NoWork(),
    )
    # 20 to score the pool, 7 steps of 2 × 3 latents, and each final image once.
    assert found.queries == view.queries == 20 + 7 * 6 + 6


def test_pool_starts_where_the_target_is_surest():
    made, known = target(), prior()
    made.module.eval()
    known.generator.eval()
    pool = Pool(made.view(["gradients"]), known, 50, seed=1)
    with torch.no_grad():
        p = made.module(known.generator(pool.latents)).softmax(1)
    start = pool.best(torch.tensor([3, 1]), 4)
    for row, label in enumerate((3, 1)):
        assert torch.equal(start[row, 0], pool.latents[p[:, label].argmax()])
        assert sorted(p[:, label].topk(4).values.tolist()) == pytest.approx(
            sorted(made_p(made, known, start[row], label)), rel=1e-4
        )


def made_p(made, known, latents, label):
    with torch.no_grad():
        return made.module(known.generator(latents)).softmax(1)[:, label].tolist()


def test_select_keeps_the_best_of_each_identity():
    score = torch.tensor([[0.1, 0.9, 0.5], [3.0, 1.0, 2.0]])
    order = by_score(Candidates(torch.zeros(2, 3, 1, 1, 1), torch.arange(2), score))[:, :2]
    kept = in_order(order, torch.arange(6).reshape(2, 3))
    assert kept.tolist() == [[1, 2], [3, 5]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"keep": 9}, "keep .9. must not exceed candidates .5."),
        ({"pool": 3}, "pool .3. must be 0 or at least"),
        ({"loss": "mse"}, "loss"),
        ({"lr": 0}, "lr"),
        ({"stepz": 3}, "did you mean 'steps'"),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        Gmi(**bad)


def test_a_critic_is_asked_for_only_when_weighted():
    with pytest.raises(ConfigError, match="prior has no critic"):
        invert(
            Gmi(steps=1),
            target().view(["gradients"]),
            Assets(prior=prior(critic=False)),
            seed=0,
            work=NoWork(),
        )
    invert(
        Gmi(steps=1, critic_weight=0),
        target().view(["gradients"]),
        Assets(prior=prior(critic=False)),
        seed=0,
        work=NoWork(),
    )
