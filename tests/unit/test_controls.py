"""The controls of an audit: when a result counts, and what its reader is warned of."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from frostglass.auditing.controls import UNKNOWN_PEOPLE, lift, verdict, worst_identities
from frostglass.core.types import Reconstructions
from frostglass.metrics.base import Rows
from worlds import target

HIT, MISS = [[1.0]] * 20, [[0.0]] * 20
EXPERIMENT = SimpleNamespace(surface="model", judging=SimpleNamespace(margin=0.2))


def rows(top1_1, top1_2=None, manifold=1.0):
    first = torch.tensor(top1_1)
    columns = {"top1_1": first, "target_top1": torch.ones_like(first)}
    if top1_2:
        columns["top1_2"] = torch.tensor(top1_2)
    columns["manifold"] = torch.full_like(first, manifold)
    return Rows(labels=torch.arange(len(first)), columns=columns)


def trial(some, baseline, *, accuracy=0.98, prior=None, **info):
    """An attack, its prior-only baseline, and a target with an accuracy on held-out images."""
    people = len(some.labels)
    result = Reconstructions(
        torch.zeros(people, 1, 3, 2, 2), some.labels, torch.zeros(people, 1, 1),
        torch.zeros(people, 1), queries=0, seconds=0,
    )  # fmt: skip
    attacked = replace(target(), info={"accuracy": {"test": accuracy}, **info})
    return SimpleNamespace(
        rows=some, baseline_rows=baseline, reconstructions=result, target=attacked, prior=prior
    )


def controls(some, control, accuracies=(0.99, 0.98), model=None):
    evaluators = [
        replace(target(), info={"accuracy": {"test": accuracy}, "model": model})
        for accuracy in accuracies
    ]
    return verdict(EXPERIMENT, some, control, evaluators=evaluators, references=None)


BROKEN = trial(rows(HIT, HIT), rows(MISS, MISS))
FAILED = trial(rows(MISS, MISS), rows(MISS, MISS))


def test_a_broken_control_makes_an_audit_believable():
    found = controls(FAILED, BROKEN)
    assert found.vacuous == ""
    assert found.warnings == ()
    assert found.agreement == 1.0


def test_an_attack_that_cannot_break_the_undefended_model_is_vacuous():
    assert "does not break the undefended model" in controls(FAILED, FAILED).vacuous
    only_first = trial(rows(HIT, MISS), rows(MISS, MISS))
    assert "does not break the undefended model" in controls(FAILED, only_first).vacuous
    assert "no positive control" in controls(FAILED, None).vacuous


def test_lift_is_over_the_prior_only_baseline():
    assert lift(rows(HIT), rows([[1.0]] * 10 + [[0.0]] * 10), "model")[0].value == 0.5


def test_warnings_name_what_to_distrust():
    odd = rows(HIT, MISS, manifold=4.0)
    odd.columns["target_top1"] = torch.zeros(20, 1)
    found = controls(trial(odd, rows(HIT, MISS)), BROKEN, accuracies=(0.5, 0.99))
    text = " ".join(found.warnings)
    for part in (
        "evaluator 1 classifies only 50% of held-out images correctly",
        "disagree on 100%",
        "4.0 times as far",
        "target itself accepts only 0%",
        "prior-only baseline already scores 100%",
    ):
        assert part in text
    assert found.only_one == 1.0


def test_worst_identities_are_named():
    some = rows([[0.0], [1.0], [0.0]])
    assert worst_identities(some, ("a", "b", "c"), "model", 1) == [("b", 1.0)]


def test_a_target_that_recognises_nobody_makes_the_audit_vacuous():
    """As happens when the classes of a user's weights are in another order than the folders."""
    weak = trial(rows(MISS, MISS), rows(MISS, MISS), accuracy=0.3)
    message = "only 30% of held-out images correctly, where guessing gives 25%"
    assert message in controls(weak, BROKEN).vacuous


def test_an_evaluator_like_the_target_is_no_second_opinion():
    alike = trial(rows(HIT, HIT), rows(MISS, MISS), model="cnn")
    found = controls(alike, BROKEN, model="cnn")
    assert "evaluator 1 has the target's architecture (cnn)" in " ".join(found.warnings)


@pytest.mark.parametrize("info", [{}, {"seen_identities": "not known"}])
def test_a_prior_of_unknown_people_is_a_warning(info):
    some = trial(rows(HIT, HIT), rows(MISS, MISS), prior=SimpleNamespace(info=info))
    assert (UNKNOWN_PEOPLE in controls(some, BROKEN).warnings) == bool(info)
