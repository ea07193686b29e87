"""Scores, intervals and conventions by hand."""

from dataclasses import replace

import pytest
import torch

from frostglass.audit.controls import judge, lift, worst_identities
from frostglass.core.errors import RunError
from frostglass.core.types import Reconstructions
from frostglass.metrics._stats import interval
from frostglass.metrics.accuracy import conventions, hits
from frostglass.metrics.base import Evidence, Rows, Score, measure, nearest
from frostglass.metrics.distance import Distance
from frostglass.metrics.manifold import Manifold
from worlds import images, split, target


def rows(top1_1, top1_2=None, confidence=None, manifold=None):
    first = torch.tensor(top1_1)
    columns = {
        "top1_1": first,
        "top5_1": torch.ones_like(first),
        "target_confidence": torch.tensor(confidence) if confidence else first,
        "target_top1": torch.ones_like(first),
    }
    if top1_2:
        columns["top1_2"] = torch.tensor(top1_2)
    columns["manifold"] = torch.full_like(first, 1.0 if manifold is None else manifold)
    return Rows(labels=torch.arange(len(first)), columns=columns)


def test_hits_by_hand():
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3]])
    assert hits(logits, torch.tensor([0, 1]), 1).tolist() == [1, 0]
    assert hits(logits, torch.tensor([1, 1]), 2).tolist() == [1, 0]
    assert hits(logits, torch.tensor([3, 0]), 5).tolist() == [1, 1]  # fewer classes than five


def test_every_convention_from_the_same_rows():
    found = conventions(
        rows(
            [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]],
            confidence=[[0.9, 0.1], [0.5, 0.5], [0.1, 0.2], [0.9, 0.2]],
        ),
        group=2,
    )
    assert found["mean"] == 0.5
    assert found["selected"] == 0.5  # persons 0 and 2
    assert found["any"] == 0.75
    assert found["first"] == 0.5
    # groups (0, 1) and (2, 3): means over draws (0.5, 0) and (0.5, 1): variances 0.125 and 0.125
    assert found["std_draws"] == pytest.approx(0.125**0.5)
    assert found["var_draws"] == pytest.approx(0.125)
    assert found["std_identities"] == pytest.approx(
        torch.tensor([0.5, 0.0, 1.0, 0.5]).std(unbiased=False).item()
    )
    assert found["top5"] == found["top5_last"] == 1.0


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(200):
        low, high = interval((torch.rand(40, generator=rng) < 0.3).float(), resamples=400)
        inside += low <= 0.3 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_interval_is_over_identities_and_honest_when_all_agree():
    assert interval(torch.ones(30)) == (pytest.approx(0.884, abs=1e-3), 1.0)
    assert interval(torch.zeros(30)) == (0.0, pytest.approx(0.116, abs=1e-3))
    few, many = interval(torch.tensor([0.0, 1.0] * 5)), interval(torch.tensor([0.0, 1.0] * 200))
    assert few[1] - few[0] > 3 * (many[1] - many[0])


def test_score_is_the_mean_over_identities():
    score = rows([[1.0, 0.0], [0.0, 0.0]]).score("top1_1")
    assert isinstance(score, Score)
    assert score.value == 0.25
    assert score.values == (0.5, 0.0)


def evidence(pictures, labels):
    found = Reconstructions(
        images=pictures[:, None],
        labels=labels,
        latents=torch.zeros(len(labels), 1, 1),
        confidence=torch.zeros(len(labels), 1),
        queries=0,
        seconds=0,
    )
    return Evidence(found, target(), [target(seed=1)], split())


def test_distance_tells_a_copy_from_noise():
    data = split()
    index = torch.tensor([int((data.train.labels == label).nonzero()[0]) for label in range(4)])
    copy = Distance().columns(evidence(data.train.floats(index), torch.arange(4)))["distance"]
    noise = Distance().columns(
        evidence(
            torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)
        )
    )["distance"]
    assert copy.max() < 1e-5
    assert (noise > copy + 0.1).all()


def test_distance_is_to_the_attacked_persons_own_pictures():
    data = split()
    swapped = Distance().columns(
        evidence(data.train.floats(torch.tensor([0, 1])), torch.tensor([1, 0]))
    )["distance"]
    assert swapped.min() > 1e-3


def test_manifold_tells_a_public_picture_from_noise():
    public = images(40, 5, seed=9, names="stranger").floats(torch.arange(4))
    near = Manifold().columns(evidence(public, torch.arange(4)))["manifold"]
    far = Manifold().columns(evidence(torch.rand(4, 3, 16, 16).round(), torch.arange(4)))[
        "manifold"
    ]
    assert near.max() < 1e-5
    assert far.min() > 1e-2


def test_nearest_against_a_slow_reference():
    a, b = torch.rand(7, 5), torch.rand(9, 5)
    slow = torch.tensor([min((x - y).norm().item() for y in b) for x in a])
    assert torch.allclose(nearest(a, b), slow, atol=1e-5)


def test_a_metric_that_fails_fails_the_step():
    class Broken:
        name = "broken"

        def columns(self, evidence):
            return {"x": torch.tensor([[float("nan")]])}

    with pytest.raises(RunError, match="metric broken: x is not finite for 1"):
        measure([Broken()], evidence(torch.rand(1, 3, 16, 16), torch.tensor([0])))


def judged(*evaluators, right=0.98):
    """A target and evaluators with the given accuracies on held-out pictures."""
    known = [
        replace(target(), info={"accuracy": {"test": value}}) for value in (right, *evaluators)
    ]
    return {"target": known[0], "evaluators": known[1:]}


HIT, MISS = [[1.0]] * 20, [[0.0]] * 20


def test_a_broken_control_makes_an_audit_believable():
    controls = judge(
        rows(MISS, MISS),
        rows(MISS, MISS),
        (rows(HIT, HIT), rows(MISS, MISS)),
        margin=0.2,
        **judged(0.99, 0.98),
    )
    assert controls.vacuous == ""
    assert controls.warnings == ()
    assert controls.agreement == 1.0


def test_an_attack_that_cannot_break_the_undefended_model_is_vacuous():
    controls = judge(
        rows(MISS, MISS),
        rows(MISS, MISS),
        (rows(MISS, MISS), rows(MISS, MISS)),
        margin=0.2,
        **judged(0.99, 0.98),
    )
    assert "does not break the undefended model" in controls.vacuous
    both_needed = judge(
        rows(MISS, MISS),
        rows(MISS, MISS),
        (rows(HIT, MISS), rows(MISS, MISS)),
        margin=0.2,
        **judged(0.99, 0.98),
    )
    assert both_needed.vacuous
    assert (
        "no positive control"
        in judge(rows(MISS), rows(MISS), None, margin=0.2, **judged(0.99)).vacuous
    )


def test_lift_is_over_prior_only_draws():
    assert lift(rows(HIT), rows([[1.0]] * 10 + [[0.0]] * 10))[0].value == 0.5


def test_warnings_say_what_to_distrust():
    odd = rows(HIT, MISS, manifold=4.0)
    odd.columns["target_top1"] = torch.zeros(20, 1)
    controls = judge(
        odd, rows(HIT, MISS), (rows(HIT, HIT), rows(MISS, MISS)), margin=0.2, **judged(0.5, 0.99)
    )
    text = " ".join(controls.warnings)
    for part in (
        "evaluator 1 is right on only 50%",
        "disagree on 100%",
        "4.0 times as far",
        "target itself says y for only 0%",
        "prior-only draws already score 100%",
    ):
        assert part in text
    assert controls.only_one == 1.0


def test_worst_identities_are_named():
    assert worst_identities(rows([[0.0], [1.0], [0.0]]), ("a", "b", "c"), 1) == [("b", 1.0)]


def test_a_target_that_knows_nobody_makes_the_audit_vacuous():
    """As happens when the classes of a user's weights are in another order than the folders."""
    controls = judge(
        rows(MISS, MISS),
        rows(MISS, MISS),
        (rows(HIT, HIT), rows(MISS, MISS)),
        margin=0.2,
        **judged(0.99, 0.98, right=0.3),
    )
    assert "right on only 30% of held-out pictures, where guessing gives 25%" in controls.vacuous


def test_conventions_count_draws_and_not_ranks():
    """Candidates are stored best first; what papers say of draws must come from the order of drawing."""
    sorted_rows = rows([[1.0, 0.0], [1.0, 0.0]])
    as_drawn = replace(sorted_rows, draws=torch.tensor([[0, 1], [1, 0]]))
    assert conventions(sorted_rows)["first"] == 1.0
    found = conventions(as_drawn)
    assert found["first"] == 0.5
    assert found["std_draws"] == 0.0
    assert found["mean"] == 0.5


def test_an_evaluator_like_the_target_is_no_second_opinion():
    both = judged(0.99, 0.98)
    alike = {
        **both,
        "target": replace(both["target"], info={**both["target"].info, "model": "cnn"}),
    }
    alike["evaluators"][0].info["model"] = "cnn"
    controls = judge(
        rows(HIT, HIT), rows(MISS, MISS), (rows(HIT, HIT), rows(MISS, MISS)), margin=0.2, **alike
    )
    assert "evaluator 1 has the target's architecture (cnn)" in " ".join(controls.warnings)


def test_a_prior_of_unknown_people_is_a_warning():
    known, unknown = (
        judge(
            rows(HIT, HIT),
            rows(MISS, MISS),
            (rows(HIT, HIT), rows(MISS, MISS)),
            margin=0.2,
            strangers=strangers,
            **judged(0.99, 0.98),
        )
        for strangers in (True, False)
    )
    assert set(unknown.warnings) - set(known.warnings) == {
        "whom the prior was trained on is not known: if the attacked people are among them, this overstates what the model leaks"
    }
