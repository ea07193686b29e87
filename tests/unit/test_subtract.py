"""Subtracting students: it finds the person that the target knows and its student does not."""

from dataclasses import replace

import pytest
import torch

from crowds import LEFT, RIGHT, SEARCH, classifier, crowd, knowledge, people_in
from frostglass.attacks._search.start import Pool
from frostglass.attacks._search.styled import class_scores
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.mirror import Mirror
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.errors import ConfigError
from frostglass.core.objective import class_margins, margin
from worlds import NoWork, prior, rng, target

STYLED = {"pool": 64, "steps": 60, "truncation": 1.0, "candidates": 3, "keep": 3}
ATTACKS = {
    "gmi": Gmi(**SEARCH, candidates=3, keep=3),
    "gmi from a pool": Gmi(**SEARCH, candidates=3, keep=3, pool=64),
    "mirror": Mirror(**STYLED, loss="margin", weight=1.0, lr=0.05, box=2.0, flip=0.0),
    "ppa": Ppa(**STYLED, loss="margin", lr=0.05, area=(1, 1), trials=0),
}


def run(attack, student):
    # The known person is a little louder: an attacker who asks the target alone finds that one.
    view = crowd(left=11.0, right=10.0).view(["gradients"])
    return invert(attack, view, knowledge(student), people=[0], seed=0, work=NoWork())


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_person_whom_the_student_does_not_know_comes_first(attack):
    knows_left = classifier(left=11.0, right=0.0)
    assert people_in(run(attack, knows_left))[0] == "left"
    subtracted = people_in(run(replace(attack, subtract=1.0), knows_left))
    assert subtracted[0] == "right"
    assert "left" not in subtracted
    knows_right = classifier(left=0.0, right=10.0)
    assert people_in(run(replace(attack, subtract=1.0), knows_right))[0] == "left"


def test_the_loss_by_hand():
    attack = Gmi(loss="margin", subtract=0.5, enough=2.0)
    made, known = target(), prior()
    made.module.eval()
    second = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4))
    known = replace(known, students=(*known.students, second))
    images, labels = torch.rand(40, 3, 16, 16, generator=rng()), torch.arange(40) % 4
    value, sure = attack.class_loss(made.view(["gradients"]), known, images, labels, None)
    losses = [margin(student(images), labels) for student in known.students]
    slow = [
        margin(made.module(images), labels)[row]
        - 0.5 * (min(losses[0][row], 2.0) + min(losses[1][row], 2.0)) / 2
        for row in range(40)
    ]
    assert torch.allclose(value, torch.stack(slow), atol=1e-5)
    scores = made.module(images).softmax(1).gather(1, labels[:, None])[:, 0]
    assert torch.allclose(sure, scores)
    # Starts and final images are ranked by minus that loss.
    ranked = class_margins(made.module(images)) + attack.bonus(known)(images)
    assert torch.allclose(ranked.gather(1, labels[:, None])[:, 0], -value, atol=1e-5)


def test_a_student_that_rejects_enough_is_left_alone():
    """Beyond `enough` no gradient comes from a student."""
    made, known = target(), prior()
    made.module.eval()
    view = made.view(["gradients"])
    images = torch.rand(8, 3, 16, 16, generator=rng()).requires_grad_()
    attack, labels = Gmi(loss="margin", subtract=3.0, enough=0.0), torch.arange(8) % 4
    value, _ = attack.class_loss(view, known, images, labels, None)
    alone = replace(attack, subtract=0.0)
    plain, _ = alone.class_loss(view, known, images, labels, None)
    rejected = margin(known.students[0](images), labels) > 0
    assert 0 < rejected.sum() < 8
    both = [torch.autograd.grad(each.sum(), images)[0].flatten(1) for each in (value, plain)]
    same = (both[0] - both[1]).abs().amax(1) < 1e-9
    assert torch.equal(same, rejected)


def test_starts_are_what_the_target_calls_y_and_the_student_does_not():
    student = classifier(left=11.0, right=0.0)
    view, assets = crowd(left=11.0).view(["gradients"]), knowledge(student)
    for subtract, place in ((0.0, LEFT), (1.0, RIGHT)):
        bonus = Gmi(subtract=subtract).bonus(assets.prior)
        pool = Pool(view, assets.prior, 64, seed=0, bonus=bonus)
        (start,) = pool.best(torch.tensor([0]), 1)
        gaps = (pool.latents - torch.tensor(place)).norm(dim=1)
        assert (start[0] - torch.tensor(place)).norm() <= gaps.sort().values[3]
        scores = class_scores(view, pool.latents.view(-1, 1, 1, 2), bonus)
        assert torch.equal(scores[:, 0].argmax(), pool.margins[:, 0].argmax())


def test_trials_of_ppa_rank_by_the_difference():
    """Random crops of a person whom the student knows are worth less."""
    attack = Ppa(**STYLED, loss="margin", trials=2, subtract=1.0, trial_area=(1, 1))
    attack = replace(attack, trial_ratio=(1.0, 1.0))
    student = classifier(left=11.0, right=0.0)
    images = torch.tensor([LEFT, RIGHT]).view(2, 1, 1, 2)

    class Rng:
        def uniform(self, count):
            return torch.full((2, count), 0.9)  # not mirrored

    view, known = crowd(left=11.0).view(["gradients"]), knowledge(student).prior
    labels = torch.zeros(2, dtype=torch.long)
    left, right = attack.robustness(view, known, images, labels, Rng())
    assert right > left + 1
    left, right = replace(attack, subtract=0.0).robustness(view, known, images, labels, Rng())
    assert left >= right


def test_what_cannot_be_subtracted():
    with pytest.raises(ConfigError, match=r"students adds .* and subtract \(0\.5\) takes it away"):
        Mirror(subtract=0.5, students=True)
    with pytest.raises(ConfigError, match="subtract: expected at least 0"):
        Gmi(subtract=-1)
    view = target().view(["gradients"])
    untaught = replace(knowledge(), prior=replace(prior(), students=()))
    with pytest.raises(ConfigError, match=r"gmi\.subtract is 0\.5, but the prior has no students"):
        invert(Gmi.variant("subtract"), view, untaught)
