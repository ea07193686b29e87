"""Attackers who know a newer defense: students alone, erased images, repeated queries."""

from dataclasses import replace

import pytest
import torch

from crowds import SEARCH, classifier, crowd, knowledge, people_in
from frostglass.attacks._search.query_budget import most_queries
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks.base import attacks, invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.ifgmi import Ifgmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.attacks.model.mirror import Mirror
from frostglass.attacks.model.mirror_genetic import MirrorGenetic
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize
from frostglass.core.objective import margin
from frostglass.data._augment import IMAGENET_MEAN, LUMA
from frostglass.defenses.base import defenses
from frostglass.report.entry import _adapts
from worlds import NoWork, prior, rng, target

STYLED = {"pool": 64, "steps": 60, "truncation": 1.0, "candidates": 3, "keep": 3}
ATTACKS = {
    "gmi": Gmi(**SEARCH, candidates=3, keep=3),
    "gmi from a pool": Gmi(**SEARCH, candidates=3, keep=3, pool=64),
    "lomma": Lomma(**SEARCH, candidates=3, keep=3, regulariser="off", students=False),
    "ppa": Ppa(**STYLED, loss="margin", lr=0.05, area=(1, 1), trials=0),
}
SMALL = {
    "gmi": {"steps": 6, "candidates": 3, "keep": 2, "lr": 0.1, "coupling": 1},
    "lomma": {"steps": 6, "candidates": 3, "keep": 2, "lr": 0.1, "coupling": 1},
    "mirror": {"steps": 6, "candidates": 3, "keep": 2, "pool": 40},
    "ppa": {"steps": 6, "pool": 40, "candidates": 3, "keep": 2, "lr": 0.05, "trials": 2},
}


def run(attack, *, people=(0, 1, 2)):
    view = target().view(attack.access)
    return invert(attack, view, Assets(prior=prior()), people=people, seed=5, work=NoWork())


# Students alone: for trapdoors


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_trapdoor_that_students_never_saw_is_not_found(attack):
    """Class 0 answers to a person at RIGHT and, louder, to a trapdoor at LEFT."""
    view = crowd(left=30.0, right=10.0).view(["gradients"])
    assets = knowledge(classifier(left=0.0, right=10.0))

    def found(attack):
        return people_in(invert(attack, view, assets, people=[0], seed=0, work=NoWork()))

    assert found(attack)[0] == "left"
    assert "left" in found(replace(attack, students=True))
    alone = found(replace(attack, students=True, alone=True))
    assert alone[0] == "right"
    assert "left" not in alone


def test_the_loss_of_students_alone_by_hand():
    made, known = target(), prior()
    second = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4))
    known = replace(known, students=(*known.students, second))
    images, labels = torch.rand(12, 3, 16, 16, generator=rng()), torch.arange(12) % 4
    attack, view = Gmi(loss="margin", students=True, alone=True), made.view(["gradients"])
    value, sure = attack.class_loss(view, known, images, labels, None)
    outputs = [student(images) for student in known.students]
    slow = torch.stack([margin(logits, labels) for logits in outputs]).mean(0)
    assert torch.allclose(value, slow, atol=1e-6)
    scores = torch.stack([logits.softmax(1) for logits in outputs]).mean(0)
    assert torch.allclose(sure, scores.gather(1, labels[:, None])[:, 0], atol=1e-6)
    assert view.queries == 0


@pytest.mark.parametrize("name", SMALL)
def test_a_search_of_students_alone_asks_the_target_for_ranks_only(name):
    alone = {"students": True, "alone": True, "regulariser": "off"}
    attack = attacks.get(name)(**SMALL[name], **alone)
    size = AuditSize(people=3)
    budget, usual = attack.budget(size), replace(attack, alone=False).budget(size)
    assert budget.images == usual.images
    assert budget.trained == 3 * 3 * 6  # people, candidates, steps
    assert "on students" in budget.description
    assert run(attack).queries == budget.evaluations + 3 * attack.candidates
    assert most_queries(attack, 3) < most_queries(replace(attack, alone=False), 3)


def test_the_regulariser_asks_the_target_although_students_are_alone():
    attack = Lomma(**SMALL["lomma"], alone=True)
    assert attack.asks
    assert not replace(attack, regulariser="off").asks
    usual = replace(attack, alone=False).budget(AuditSize(people=3))
    assert attack.budget(AuditSize(people=3)).evaluations == usual.evaluations
    staged = Ifgmi(students=True, block_steps=(4, 3), trials=2)
    assert staged.search_effort[1] == 50 + 7 + 2
    words, images = replace(staged, alone=True).search_effort
    assert images == 2  # the trials
    assert words == "(50 + 4 + 3 steps on students + 2 trials)"


def test_steps_that_ask_nothing_are_free():
    alone = Gmi.variant("students", steps=1500, pool=3000, candidates=3, keep=1)
    assert alone.within(200, 10).steps == 1500
    assert alone.within(200, 10).pool < 3000
    assert Gmi(steps=1500, pool=3000, candidates=3, keep=1).within(400, 10).steps < 150
    staged = Ifgmi.variant("students", candidates=2, keep=1, pool=3000, trials=20)
    assert staged.within(300, 10).block_steps == staged.block_steps


def test_what_students_see_is_announced_once_for_each_search():
    size = AuditSize(people=10, classes=10)
    for samples in (1, 8):  # an average over passes of the target
        attack = Gmi.variant("students", steps=50, candidates=2, keep=1, samples=samples)
        assert attack.budget(size).trained == 10 * 2 * 50
        assert "50 steps on students" in attack.budget(size).description
    base = {"name": "gmi", "variant": "students", "steps": 50}
    chain = attacks.build({"name": "repel", "base": base, "rounds": 2, "searches": 3})
    plain = attacks.build({"name": "repel", "base": {"name": "gmi", "steps": 50}, "rounds": 2})
    assert chain.budget(size).trained == plain.budget(size).evaluations == 10 * 2 * 3 * 50
    assert chain.budget(size).evaluations == plain.budget(size).trained == 0
    tuned = attacks.build({"name": "ppdgmi", "base": base, "searches": 5, "points": 2})
    other = attacks.build({"name": "ppdgmi", "base": {"name": "gmi"}, "searches": 5, "points": 2})
    assert tuned.budget(size).trained - other.budget(size).trained == 10 * 2 * 5 * 50


# Erased images: for MIDRE


@pytest.mark.parametrize("channels", [1, 3])
def test_a_box_of_every_image_is_erased(channels):
    attack = Gmi(erase=0.4)
    images = torch.full((64, channels, 16, 16), -1.0)
    rows = RowRng.of(0, "search", torch.arange(64), torch.zeros(64, dtype=torch.long)).at(
        list(range(64))
    )
    erased = attack._erased(images, rows)
    changed = (erased != -1).flatten(1).double().mean(1)
    assert 0 < changed.min() < 0.05
    assert 0.35 < changed.max() < 0.45
    assert len(changed.unique()) == 10  # squares of 1 to 10 pixels
    colour = IMAGENET_MEAN if channels == 3 else (sum(map(float.__mul__, LUMA, IMAGENET_MEAN)),)
    inside = erased.movedim(1, 3)[erased[:, 0] != -1]
    assert torch.allclose(inside, torch.tensor(colour).expand_as(inside))


def test_an_erased_box_has_no_gradient():
    images = torch.rand(16, 3, 16, 16, generator=rng()).requires_grad_()
    rows = RowRng.of(0, "search", torch.arange(16), torch.zeros(16, dtype=torch.long))
    erased = Gmi(erase=0.9)._erased(images, rows)
    (gradient,) = torch.autograd.grad(erased.sum(), images)
    assert torch.equal(gradient, (erased == images).double().to(gradient))


@pytest.mark.parametrize("name", SMALL)
def test_erasing_changes_a_search_and_never_by_who_else_is_searched(name):
    attack = attacks.get(name)(**SMALL[name], **({"students": False} if name == "lomma" else {}))
    if name == "lomma":
        attack = replace(attack, regulariser="off")
    erased = replace(attack, erase=0.4)
    together, alone = run(erased), run(erased, people=(1,))
    torch.testing.assert_close(together.latents[1], alone.latents[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(together.latents, run(attack).latents, rtol=1e-2, atol=1e-2)
    assert together.queries == run(attack).queries
    size = AuditSize(people=3)
    assert erased.budget(size) == attack.budget(size)


# Repeated queries: for SSD


def test_repeated_queries_are_counted():
    few = MirrorGenetic(pool=20, population=6, generations=2, stop=1.0)
    repeated = MirrorGenetic.variant("repeated", pool=20, population=6, generations=2, stop=1.0)
    assert run(repeated).queries == 8 * run(few).queries


# The contract: what a defense names, and what a report counts


@pytest.mark.parametrize(
    ("name", "attack"),
    [("trap_mid", Mirror), ("midre", Ppa), ("ssd", MirrorGenetic), ("mid", Gmi), ("calor", Gmi)],
)
def test_an_adaptive_variant_counts_as_adaptive(name, attack):
    for variant in defenses.get(name).adaptive:
        if variant == "margin":  # a loss, which the report lists among the losses
            continue
        changed = attack.variant(variant)
        assert _adapts({"name": changed.name, **vars(changed)})


def test_what_cannot_be_left_alone_or_erased():
    with pytest.raises(ConfigError, match="alone leaves the search to students, but students is"):
        Mirror(alone=True)
    with pytest.raises(ConfigError, match="erase: expected less than 1, got 1"):
        Gmi(erase=1)
    untaught = Assets(prior=replace(prior(), students=()))
    with pytest.raises(ConfigError, match=r"gmi\.students is true, but the prior has no students"):
        invert(Gmi.variant("students"), target().view(["gradients"]), untaught)
