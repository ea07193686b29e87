"""The first sentences of a report on models."""

import json
import re

from frostglass.report.build import build_report
from pages import Page
from run_folders import BROKEN, CALOR, DEFENDED, FAILED, SMOOTHING, make_run, page_of, sentences


def test_answer_says_what_leaks_and_what_the_defense_changes(tmp_path):
    leak, made, change = sentences(tmp_path, [BROKEN, DEFENDED])
    assert leak == (
        "19 of 20 people (95 %; interval 85–100 %; prior-only baseline 5 %) would be recognised: "
        "a face verifier (evaluator 3, faces32, never trained on these people) accepts the "
        "reconstruction at a false-accept rate of 1 %."
    )
    assert made == (
        "The reconstructions were made from the undefended model by an attacker with its weights "
        "and public images of other people. Top-1, which is not recognition: 100 % by evaluator 1 "
        "(resnet) and 95 % by evaluator 2 (resnet)."
    )
    assert change == (
        "CALoR lowers this to 35 % (interval 15–55.1 %, top-1 40 % and 35 %) and costs 1.5 points "
        "of accuracy on held-out images (98.2 → 96.7 %)."
    )


def test_what_decides_is_never_top_1(tmp_path):
    leak, made, _, fooled = sentences(tmp_path, [{**BROKEN, "verified": 2, "baseline": 0}])
    assert leak.startswith("2 of 20 people (10 %; interval 0–25 %; prior-only baseline 0 %)")
    assert "100 % by evaluator 1 (resnet) and 95 % by evaluator 2 (resnet)" in made
    assert fooled == (
        "The classifiers are fooled: they rank the attacked person first in up to 100 % of the "
        "reconstructions, and the face verifier accepts 10 % of them."
    )
    _, _, _, fooled = sentences(
        tmp_path / "two", [BROKEN, {**DEFENDED, "hits": (18, 18), "verified": 2}]
    )
    assert fooled.startswith("The classifiers are fooled (for CALoR): they rank")


def test_the_verifier_is_named_with_what_it_knows(tmp_path):
    leak = sentences(tmp_path / "own", [BROKEN], embedder="onnx:faces.onnx")[0]
    assert "(evaluator 3, onnx:faces.onnx, trained elsewhere, on people this audit does" in leak
    leak = sentences(tmp_path / "none", [BROKEN], embedder=None)[0]
    assert "(evaluator 1, resnet, trained on the private people) accepts" in leak
    leak = sentences(tmp_path / "coarse", [BROKEN], rates=(0.025, 0.025))[0]
    assert leak.endswith("accepts the reconstruction at a false-accept rate of 2.5 %.")


def test_an_excluded_evaluator_does_not_decide(tmp_path):
    page = page_of(tmp_path, [BROKEN], accepts=(0.98, 0.9, 0.4))
    assert "a face verifier (evaluator 1, resnet, trained on the private" in page.sentences[0]
    assert "at a false-accept rate of 1.0% it accepts 40% of genuine images" in page.text
    page = page_of(tmp_path / "none", [BROKEN], accepts=(0.4, 0.4, 0.4))
    assert page.sentences[0].startswith("This audit is VACUOUS: no evaluator can be trusted: ")


def test_answer_without_a_defended_model_claims_nothing_about_defenses(tmp_path):
    _, _, change = sentences(tmp_path, [BROKEN])
    assert change == (
        "No defended model is part of this report, so it does not say what a defense would change."
    )


def test_a_defense_whose_interval_overlaps_does_not_help(tmp_path):
    _, _, change = sentences(tmp_path, [BROKEN, {**DEFENDED, "hits": (19, 17), "accuracy": 0.982}])
    assert change.startswith("CALoR does not clearly lower it: 85 % (interval ")
    assert change.endswith(
        "beyond chance on the same people; it costs no accuracy on held-out images (98.2 → 98.2 %)."
    )


def test_a_defense_helps_only_if_the_verifier_says_so(tmp_path):
    _, _, change = sentences(tmp_path, [BROKEN, {**DEFENDED, "hits": (4, 3), "verified": 19}])
    assert change.startswith("CALoR does not clearly lower it: 95 % (interval ")
    assert (
        ", top-1 20 % and 15 %), no difference beyond chance on the same people; it costs 1.5"
    ) in change


def test_a_defense_may_do_harm(tmp_path):
    _, _, change = sentences(
        tmp_path, [{"hits": (10, 9)}, {**DEFENDED, "hits": (20, 20), "accuracy": 0.99}]
    )
    assert re.match(
        (
            r"CALoR does not lower it but raises it to 100 % \(interval 83\.2–100 %, top-1 100 %\) "
            r"and gains 0\.8 points of accuracy"
        ),
        change,
    )


def test_a_stalled_attack_is_not_called_privacy(tmp_path):
    _, _, change = sentences(tmp_path, [BROKEN, {**DEFENDED, "hits": (0, 0), "success": 0.1}])
    assert change.startswith("CALoR lowers this to 0 %")
    assert change.endswith(
        "(the model itself accepts 10 % of the images), which may be masked gradients "
        "and not privacy."
    )


def test_up_to_four_defended_models_are_listed(tmp_path):
    two = {**DEFENDED, "defenses": [{"name": "calor", "rank": 5}], "hits": (19, 19)}
    _, _, change = sentences(tmp_path, [BROKEN, DEFENDED, two, {**DEFENDED, "defenses": SMOOTHING}])
    first, second, third = change.split("; CALoR (rank=5)")[0], change, change.rsplit("; ", 1)[1]
    assert first.startswith("CALoR (rank=3) lowers this to 35 %")
    assert "; CALoR (rank=5) does not clearly lower it: 95 %" in second
    assert third.startswith("LS lowers this to 35 %")


def test_more_defended_models_are_a_range_and_failures_are_named(tmp_path):
    ranks = [
        {
            **DEFENDED,
            "defenses": [{"name": "calor", "rank": rank}],
            "hits": (hits, hits),
            "accuracy": accuracy,
        }
        for rank, hits, accuracy in [
            (2, 3, 0.9),
            (3, 4, 0.95),
            (4, 5, 0.97),
            (6, 6, 0.98),
            (5, 19, 0.982),
        ]
    ]
    _, _, change = sentences(tmp_path, [BROKEN, *ranks])
    assert change == (
        "With the 5 defended models it is between 15 % and 95 %, and they cost between "
        "0 and 8.2 points of accuracy on held-out images; "
        "CALoR (rank=5) does not clearly lower it."
    )


def test_the_strongest_attack_on_each_model_counts(tmp_path):
    audits = [
        {**BROKEN, "loss": "ce", "hits": (10, 10)},
        BROKEN,
        {**DEFENDED, "loss": "ce"},
        {**DEFENDED, "hits": (2, 2)},
    ]
    run = make_run(tmp_path / "run", audits)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.sentences[0].startswith("19 of 20 people (95 %; ")
    assert page.sentences[2].startswith("CALoR lowers this to 35 %")
    assert "the strongest counts: undefended (loss=margin), CALoR (loss=ce)." in page.text.replace(
        " ,", ","
    ).replace(" .", ".")


def test_several_candidates_are_counted_as_images(tmp_path):
    leak = sentences(tmp_path, [{"hits": (58, 57)}], candidates=3)[0]
    assert re.match(
        (
            r"By 95 % of 60 reconstructions, 3 of each of 20 people \(interval .*\), the person "
            r"would be recognised: a face verifier \("
        ),
        leak,
    )


def test_one_classifier_is_not_called_two(tmp_path):
    made = sentences(tmp_path, [{"hits": (19,)}], evaluators=[0.97])[1]
    assert made.endswith("which is not recognition: 95 % by evaluator 1 (resnet).")


def test_defended_alone_leans_on_the_positive_control(tmp_path):
    _, made, rest = sentences(tmp_path, [DEFENDED])
    assert made.startswith("The reconstructions were made from the model defended with CALoR by")
    assert rest == (
        "The same attack on an undefended model scores 95 points above the prior-only "
        "baseline (at least 85), so it works there; "
        "that model is not part of this report, so the cost in accuracy is not known."
    )


def test_a_model_given_as_weights_is_not_called_undefended(tmp_path):
    run = make_run(tmp_path / "run", [{**BROKEN, "recipe": {"weights": "w.safetensors"}}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.sentences[1].startswith("The reconstructions were made from the given model by")
    assert page.sentences[2] == (
        "The same attack on an undefended model scores 95 points above the prior-only "
        "baseline (at least 85), so it works there."
    )


def test_a_model_that_is_its_own_control_is_compared_with_no_other(tmp_path):
    given = {"recipe": {"weights": "w.safetensors"}, "control": "itself"}
    run = make_run(tmp_path / "run", [{**BROKEN, **given}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.sentences[2].startswith("The attack breaks this model itself, by ")
    assert not any("on an undefended model" in each for each in page.sentences)


def test_a_vacuous_audit_says_so_first_and_nothing_reassuring(tmp_path):
    run = make_run(tmp_path / "run", [FAILED, {**FAILED, "defenses": CALOR}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.sentences == [
        (
            "This audit is VACUOUS: the attack fails even on a model without any defense, "
            "so its failure on any other model proves nothing."
        ),
        "A low number means a weak attack here, not a safe model.",
    ]
    assert any(
        tag == "div" and values.get("class") == "void" and values.get("role") == "alert"
        for tag, values in page.tags
    )
    assert json.loads((run / "run.json").read_text())["vacuous"][0].split(": ", 1)[1] in page.text
    assert "✓" not in page.text
    assert "lowers" not in page.text
    assert "Further left is more private" not in page.text


def test_no_control_is_vacuous_and_a_leak_stays_a_leak(tmp_path):
    first, _, third = sentences(tmp_path, [{**BROKEN, "control": None}])
    assert first.startswith("This audit is VACUOUS: no positive control was run")
    assert third.startswith(
        "A high number is a leak all the same: 95 % (interval 85–100 %, top-1 100 % and 95 %) for "
    )


def test_a_vacuous_model_is_named_beside_sound_ones(tmp_path):
    first, second, leak, made, change = sentences(
        tmp_path, [BROKEN, {**DEFENDED, **FAILED}, {**DEFENDED, "defenses": SMOOTHING}]
    )
    assert first.startswith("For CALoR this audit is VACUOUS: the attack fails")
    assert second == "A low number means a weak attack here, not a safe model."
    assert made.startswith("The reconstructions were made from the undefended model")
    assert change.startswith("LS lowers this to 35 %")
    assert "CALoR" not in leak + made + change


def test_each_defense_is_compared_with_its_own_architecture(tmp_path):
    audits = [
        BROKEN,
        {"model": "lenet", "hits": (9, 9), "accuracy": 0.9},
        {**DEFENDED, "model": "lenet", "hits": (8, 8), "accuracy": 0.89},
    ]
    _, made, change = sentences(tmp_path, audits)
    assert made.startswith("The reconstructions were made from the undefended model (model=cnn)")
    assert change.startswith("CALoR does not clearly lower it: 40 %")
    assert change.endswith("it costs 1 point of accuracy on held-out images (90 → 89 %).")


def test_a_model_audited_with_and_without_a_control_is_spoken_for_by_the_control(tmp_path):
    runs = [
        make_run(tmp_path / "a", [{**DEFENDED, "control": None}]),
        make_run(tmp_path / "b", [DEFENDED]),
    ]
    page = build_report(runs, tmp_path / "report.html").read_text()
    assert "the same attack on an undefended model scores" in page.lower()


def test_models_are_compared_on_the_same_people(tmp_path):
    """Bars that overlap do not hide a difference that person by person is clear."""
    _, _, change = sentences(tmp_path, [{"hits": (18, 18)}, {**DEFENDED, "hits": (12, 12)}])
    assert change.startswith("CALoR lowers this to 60 %")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    bars = [audit["scores"]["verified_3"] for audit in run["audits"]]
    assert bars[0]["low"] < bars[1]["high"]
