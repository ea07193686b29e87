"""Searches in rounds: repelled from what was found, or on a copy that has unlearned it."""

from dataclasses import replace

import pytest
import torch

from crowds import SEARCH, classifier, crowd, knowledge, people_in
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.known import Known
from frostglass.attacks.model.modes import Modes
from frostglass.attacks.model.repel import Repel
from frostglass.attacks.model.unlearn import Unlearn
from frostglass.core.assets import Assets
from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.core.objective import margin
from worlds import PUBLIC, NoWork, prior, same_weights, styled_prior, target

# From the best draws of a pool, which all lead to the louder person.
BASE = {"name": "gmi", **SEARCH, "pool": 40}
REPEL = Repel(base=BASE, rounds=2, searches=2, keep=2, repulsion=40.0)
UNLEARN = Unlearn(
    base=BASE, rounds=2, searches=2, keep=2, tuning=60, tuning_lr=0.2, keep_weight=3.0
)
BOTH = pytest.mark.parametrize("attack", [REPEL, UNLEARN], ids=["repel", "unlearn"])


def run(attack, made=None, people=(0,), assets=None):
    view = (made or crowd(left=14.0, right=10.0)).view(["gradients"])
    return invert(attack, view, assets or knowledge(), people=people, seed=0, work=NoWork())


@BOTH
def test_both_people_are_listed_where_all_searches_end_at_the_louder_one(attack):
    alone = run(Gmi(**SEARCH, pool=40, candidates=4, keep=4))
    assert set(people_in(alone)) == {"left"}
    found = run(attack)
    assert people_in(found) == ["left", "right"]
    assert found.confidence[0, 0] > found.confidence[0, 1]
    assert people_in(run(attack, people=(1, 0)), row=1) == ["left", "right"]


@BOTH
def test_the_first_round_is_the_base(attack):
    """Rounds are numbered by the best of them: the first two draws are the first round."""
    found = run(replace(attack, keep=4))
    alone = run(Gmi(**SEARCH, pool=40, candidates=4, keep=4))
    first = {row for row, draw in enumerate(found.draws[0].tolist()) if draw < 2}
    assert len(first) == 2
    for row in first:
        same = alone.draws[0].tolist().index(int(found.draws[0, row]))
        assert torch.equal(found.images[0, row], alone.images[0, same])
    single = run(replace(attack, rounds=1, searches=4, keep=4))
    assert torch.equal(single.images, alone.images)


def test_without_repulsion_nothing_changes():
    found = run(replace(REPEL, repulsion=0.0, keep=4))
    alone = run(Gmi(**SEARCH, pool=40, candidates=4, keep=4))
    assert set(people_in(found)) == {"left"}
    assert torch.equal(found.images.flatten().sort().values, alone.images.flatten().sort().values)


def test_the_target_is_never_changed_and_ranks_all_images():
    made = crowd(left=14.0, right=10.0)
    found = run(replace(UNLEARN, keep=4), made)
    assert same_weights(made.module, classifier(14.0, 10.0))
    with torch.no_grad():
        scores = made.module(found.images[0]).softmax(1)[:, 0]
    assert torch.allclose(found.confidence[0], scores, atol=1e-6)


def test_a_copy_forgets_what_was_found_and_keeps_other_answers():
    made, assets = crowd(left=14.0, right=10.0), knowledge()
    view = made.view(["gradients"])
    copy = UNLEARN.prepare(view, assets, seed=0)
    UNLEARN.begin(view, copy)
    left = torch.tensor([[[[0.2, 0.8]]]])
    right = torch.tensor([[[[0.8, 0.2]]]])
    queries = view.queries
    UNLEARN._forget(copy, left, torch.tensor([0]))
    assert view.queries == queries == UNLEARN.references
    assert made.module(left).argmax(1) == 0
    assert copy.view.labels(left) != 0
    assert not same_weights(copy.view.module, made.module)
    before = (made.module(copy.images).softmax(1) - copy.view.scores(copy.images)).abs().mean()
    careless = replace(UNLEARN, keep_weight=0.0)
    careless._forget(copy, left, torch.tensor([0]))
    after = (made.module(copy.images).softmax(1) - copy.view.scores(copy.images)).abs().mean()
    assert before < 0.5 * after
    # Each time from the target's weights: what was forgotten before is known again.
    UNLEARN._forget(copy, right, torch.tensor([0]))
    assert copy.view.labels(left) == 0
    with pytest.raises(RunError, match=r"not finite: lower attack\.tuning_lr"):
        UNLEARN._forget(copy, left * torch.nan, torch.tensor([0]))


def test_a_copy_is_trained_no_longer_than_it_takes_to_forget(monkeypatch):
    """Further steps would change the copy more, and cost time."""
    view = crowd(left=14.0, right=10.0).view(["gradients"])
    copy = UNLEARN.prepare(view, knowledge(), seed=0)
    UNLEARN.begin(view, copy)
    left = torch.tensor([[[[0.2, 0.8]]]])
    steps = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: steps.append(step(self)))
    UNLEARN._forget(copy, left, torch.tensor([0]))
    assert 1 < len(steps) < UNLEARN.tuning
    gap = margin(copy.view.logits(left), torch.tensor([0]))
    assert gap >= UNLEARN.gap
    steps.clear()
    replace(UNLEARN, tuning=1)._forget(copy, left, torch.tensor([0]))
    assert len(steps) == 1


def test_searches_on_a_copy_are_not_padded(monkeypatch):
    """A chain's searches are always together, so that no padding is needed for equal bits."""
    view, shown = crowd(left=14.0, right=10.0).view(["gradients"]), []
    logits = type(view).logits

    def watched(self, images):
        shown.append((self is view, images.requires_grad, len(images)))
        return logits(self, images)

    monkeypatch.setattr(type(view), "logits", watched)
    invert(UNLEARN, view, knowledge(), people=[0], seed=0, work=NoWork())
    searched = {(own, rows) for own, gradient, rows in shown if gradient}
    assert {rows for own, rows in searched if not own} <= {1, 2}
    assert {rows for own, rows in searched if own} <= {2, 16}


def test_references_are_draws_where_there_are_no_public_images():
    assets = replace(knowledge(), public=None)
    images = UNLEARN._references(assets, seed=0)
    assert images.shape == (64, 1, 1, 2)
    assert not torch.equal(images, UNLEARN._references(assets, seed=1))
    assert people_in(run(UNLEARN, assets=assets))[0] == "left"


def test_modes_and_knowledge_go_with_rounds():
    table = {"name": "repel", "base": BASE, "rounds": 2, "searches": 2}
    attack = Modes(base=table, candidates=2, keep=2)
    assert attack.reads == 4
    assert people_in(run(attack)) == ["left", "right"]
    words, images = attack.search_effort
    assert words == "2 rounds of 2 × 60 steps"
    assert attack.budget(AuditSize(people=1)).evaluations == 2 * images + 40
    with pytest.raises(ConfigError, match="base: steer is 1, and repel has searches that take no"):
        Known(base=table, steer=1.0)


@pytest.mark.parametrize(
    ("base", "known"),
    [
        ({"name": "mirror", "steps": 3, "pool": 40}, styled_prior()),
        ({"name": "ppa", "steps": 2, "pool": 40, "trials": 2}, styled_prior()),
        ({"name": "kedmi", "steps": 2, "draws": 3}, prior()),
        ({"name": "vmi", "steps": 2, "points": 16, "draws": 2, "q": "gaussian"}, prior()),
    ],
    ids=["mirror", "ppa", "kedmi", "vmi"],
)
@pytest.mark.parametrize("cls", [Repel, Unlearn])
def test_any_attack_by_gradients_can_be_the_base(cls, base, known):
    attack = cls(base=base, rounds=2, searches=2, candidates=2, keep=8)
    assets = Assets(public=PUBLIC, prior=known, embedder=target(seed=3))
    found = invert(attack, target().view(["gradients"]), assets, people=[2, 1], work=NoWork())
    assert found.images.shape[:2] == (2, 8)
    assert found.images.isfinite().all()
    # The best of each of two rounds of two chains come first.
    each = attack.searches * attack.base_attack.reads
    assert all(len({draw // each for draw in row[:4]}) == 4 for row in found.draws.tolist())
    assert all(len(set(row)) == 8 for row in found.draws.tolist())


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="repulsion adds a loss, and ifgmi has searches that"):
        Repel(base={"name": "ifgmi"})
    with pytest.raises(ConfigError, match="mirror_genetic sees scores only: use one that follows"):
        Unlearn(base={"name": "mirror_genetic"})
    with pytest.raises(ConfigError, match="students alone never asks the copy that forgets"):
        Unlearn(base={"name": "gmi", "variant": "students"})
    with pytest.raises(ConfigError, match=r"keep \(5\) must not exceed .* searches \(4\)"):
        Repel(base=BASE, rounds=2, searches=2)
    with pytest.raises(ConfigError, match=r"repel needs assets\.embedder, got none"):
        run(REPEL, assets=replace(knowledge(), embedder=None))
    with pytest.raises(AccessError, match="this view grants scores, not gradients"):
        crowd().view("scores").copied()


def test_a_copied_view_counts_with_the_original():
    made = crowd()
    view = made.view(["gradients"]).averaged(2)
    copy = view.copied()
    copy.logits(torch.zeros(3, 1, 1, 2))
    assert view.queries == copy.queries == 6
    with torch.no_grad():
        copy.module[1].weight.zero_()
    assert same_weights(made.module, classifier())
