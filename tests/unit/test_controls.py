"""The controls of an audit: when a result counts, and what its reader is warned of."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from frostglass.auditing.controls import (
    UNKNOWN_PEOPLE,
    UNKNOWN_PUBLIC,
    lift,
    verdict,
    worst_identities,
)
from frostglass.auditing.experiment import Judging
from frostglass.core.types import Reconstructions
from frostglass.evaluators.verifier import Verifier
from frostglass.metrics._significance import people_needed
from frostglass.metrics.base import Rows
from worlds import target

HIT, MISS = [[1.0]] * 20, [[0.0]] * 20
EXPERIMENT = SimpleNamespace(surface="model", judging=Judging())


def share(count, people=20):
    """One candidate per person, of whom `count` are hits."""
    return [[1.0]] * count + [[0.0]] * (people - count)


def rows(verified, top1_1=None, top1_2=None, manifold=1.0):
    """Two classifiers that agree with the embedder unless told otherwise, then the embedder."""
    named = {"top1_1": top1_1 or verified, "top1_2": top1_2 or top1_1 or verified}
    columns = {name: torch.tensor(values) for name, values in named.items()}
    columns |= {f"verified_{number}": torch.tensor(verified) for number in (1, 2, 3)}
    first = columns["verified_3"]
    columns |= {
        "match_3": first * 0.5,
        "target_top1": torch.ones_like(first),
        "manifold": torch.full_like(first, manifold),
    }
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


def verifier(true_accepts=0.95, rates=(0.01, 0.001)):
    return Verifier(
        centre=torch.zeros(2),
        references=torch.zeros(1, 2),
        labels=torch.zeros(1, dtype=torch.long),
        rates=torch.tensor(rates),
        thresholds=torch.tensor([0.4, 0.6]),
        true_accepts=torch.tensor([true_accepts, true_accepts / 2]),
        impostor_share=torch.tensor(rates),
        genuine=100,
        comparisons=10_000,
        impostors=500,
    )


def controls(some, control, accuracies=(0.99, 0.98), accepts=(0.9, 0.9, 0.95), model=None):
    networks = [
        replace(target(), info={"accuracy": {"test": accuracy}, "model": model})
        for accuracy in accuracies
    ]
    embedder = replace(target(), classes=(), info={"model": "embedder"})
    evaluators = list(zip([*networks, embedder], map(verifier, accepts), strict=True))
    return verdict(EXPERIMENT, some, control, evaluators=evaluators, references=None)


BROKEN = trial(rows(HIT), rows(MISS))
FAILED = trial(rows(MISS), rows(MISS))


def test_a_broken_control_makes_an_audit_believable():
    found = controls(FAILED, BROKEN)
    assert found.vacuous == ""
    assert found.warnings == ()
    assert found.agreement == 1.0
    assert found.deciding == "verified_3"
    assert found.p_value < 0.001


def test_an_attack_that_cannot_break_the_undefended_model_is_vacuous():
    assert "does not break the undefended model" in controls(FAILED, FAILED).vacuous
    assert "no positive control" in controls(FAILED, None).vacuous


def test_top1_alone_does_not_break_the_undefended_model():
    """As on real faces: classifiers named 81 % of 16 people, a face recogniser verified one."""
    fooled = trial(rows(share(1, 16), share(13, 16)), rows(share(0, 16)))
    found = controls(fooled, fooled)
    shown = "the share that evaluator 3 recognises is 0.06 above the prior-only baseline for 16"
    assert shown in found.vacuous
    assert "about 144 people would show such a difference" in found.vacuous
    assert found.fooled
    assert any(warning.startswith("the classifiers are fooled") for warning in found.warnings)


def test_people_whom_the_baseline_recognises_count_against_the_attack():
    """5 of 16 people are recognised, and of the others the baseline recognises one."""
    alone = trial(rows(share(5, 16)), rows(share(0, 16)))
    beside = trial(rows(share(5, 16)), rows(share(1, 16)[::-1]))
    needed = [controls(each, each).people_needed for each in (alone, beside)]
    assert needed == [people_needed(5 / 16), people_needed(5 / 16, 1 / 16)]
    assert needed[1] > needed[0]


def test_few_people_can_be_enough():
    enough = trial(rows(share(7, 16)), rows(share(0, 16)))
    assert controls(enough, enough).vacuous == ""


def test_a_small_effect_on_many_people_is_below_the_margin():
    weak = trial(rows(share(10, 200)), rows(share(0, 200)))
    assert "less than the margin of 0.10" in controls(weak, weak).vacuous


def test_classifiers_that_agree_with_the_embedder_are_not_fooled():
    assert not controls(trial(rows(share(15), share(18)), rows(MISS)), BROKEN).fooled


def test_the_evaluator_that_best_accepts_genuine_images_decides():
    assert controls(BROKEN, BROKEN, accepts=(0.99, 0.9, 0.8)).deciding == "verified_3"
    weak = controls(BROKEN, BROKEN, accepts=(0.8, 0.9, 0.4))
    assert weak.deciding == "verified_2"
    assert "it accepts 40% of genuine images, required 50%" in " ".join(weak.excluded)
    assert 'add an evaluator with kind = "embedder"' in " ".join(weak.warnings)


def test_without_a_trusted_evaluator_nothing_is_proven():
    found = controls(BROKEN, BROKEN, accuracies=(0.5, 0.5), accepts=(0.9, 0.9, 0.1))
    assert found.vacuous.startswith("no evaluator can be trusted: evaluator 1")


def test_a_coarser_rate_is_said():
    networks = [(replace(target(), classes=(), info={"model": "a"}), verifier(rates=(0.02, 0.02)))]
    some = trial(rows(HIT), rows(MISS))
    found = verdict(EXPERIMENT, some, some, evaluators=networks, references=None)
    text = "do not support a false-accept rate of 1.0%; 2.00% is used"
    assert text in " ".join(found.warnings)


def test_an_evaluator_with_too_few_strangers_is_excluded():
    networks = [(replace(target(), classes=(), info={"model": "a"}), verifier(rates=(0.2, 0.2)))]
    some = trial(rows(HIT), rows(MISS))
    found = verdict(EXPERIMENT, some, some, evaluators=networks, references=None)
    assert "500 public images support a false-accept rate of 20.0% at best" in found.vacuous


def test_public_images_without_identities_are_a_warning():
    networks = [(replace(target(), classes=(), info={"model": "a"}), verifier())]
    known = {"evaluators": networks, "references": None}
    some = trial(rows(HIT), rows(MISS))
    assert UNKNOWN_PUBLIC in verdict(EXPERIMENT, some, some, **known, public_known=False).warnings
    assert UNKNOWN_PUBLIC not in verdict(EXPERIMENT, some, some, **known).warnings


def test_lift_is_over_the_prior_only_baseline():
    assert {score.value for score in lift(rows(HIT), rows(share(10)))} == {0.5}


def test_warnings_name_what_to_distrust():
    odd = rows(HIT, HIT, MISS, manifold=4.0)
    odd.columns["target_top1"] = torch.zeros(20, 1)
    found = controls(trial(odd, rows(HIT, MISS)), BROKEN, accuracies=(0.5, 0.99))
    text = " ".join(found.warnings)
    for part in (
        "evaluator 1 (None) is excluded: it classifies 50% of held-out images correctly",
        "disagree on 100%",
        "4.0 times as far",
        "target itself accepts only 0%",
        "prior-only baseline already scores 100%",
    ):
        assert part in text


def test_worst_identities_are_named():
    some = rows([[0.0], [1.0], [0.0]])
    assert worst_identities(some, ("a", "b", "c"), "verified_3", 1) == [("b", 1.0)]


def test_a_target_that_recognises_nobody_makes_the_audit_vacuous():
    """As happens when the classes of a user's weights are in another order than the folders."""
    weak = trial(rows(MISS), rows(MISS), accuracy=0.3)
    message = "only 30% of held-out images correctly, where guessing gives 25%"
    assert message in controls(weak, BROKEN).vacuous


def test_an_evaluator_like_the_target_is_no_second_opinion():
    alike = trial(rows(HIT), rows(MISS), model="cnn")
    found = controls(alike, BROKEN, model="cnn")
    assert "evaluator 1 has the target's architecture (cnn)" in " ".join(found.warnings)


@pytest.mark.parametrize("info", [{}, {"seen_identities": "not known"}])
def test_a_prior_of_unknown_people_is_a_warning(info):
    some = trial(rows(HIT), rows(MISS), prior=SimpleNamespace(info=info))
    assert (UNKNOWN_PEOPLE in controls(some, BROKEN).warnings) == bool(info)
