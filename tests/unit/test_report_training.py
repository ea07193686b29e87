"""How models were trained, as the report tells it."""

import json

import pytest

from frostglass.report.build import build_report
from frostglass.report.recipes import (
    fact_words,
    training_caption,
    training_notes,
    training_rows,
    words,
)
from pages import Page, plain
from run_folders import BROKEN, DEFENDED, STAGE, TRANSFER, bido, make_run, study_of


def test_models_of_one_recipe_are_said_to_be_alike(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, {**DEFENDED, "seed": 1}])
    out = build_report([run], tmp_path / "report.html")
    page = Page(out)
    assert "trained differently" not in page.text
    assert "first training" not in page.text
    assert (
        "All models were trained with one recipe: model cnn, epochs 20, batch 64, "
        "optimizer adamw, lr 0.001, weight decay 0.0001, "
        "schedule cosine, flip yes, precision 32, keep best." in page.text
    )
    assert json.loads(out.with_suffix(".json").read_text())["answers"][0]["notes"] == []
    assert "own recipe" not in page.tables["Training of each model"][0]


def test_models_of_different_recipes_are_named_with_what_differs(tmp_path):
    run = make_run(
        tmp_path / "run",
        [{**BROKEN, "recipe": {"lr": 0.01}}, bido(), {**DEFENDED, "recipe": {"lr": 0.01}}],
    )
    out = build_report([run], tmp_path / "report.html")
    page = Page(out)
    said = (
        "The models were trained differently: lr is 0.01 for undefended and CALoR and "
        "0.001 for BiDO; part of a difference may come from that."
    )
    assert said in page.text
    assert json.loads(out.with_suffix(".json").read_text())["answers"][0]["notes"] == [said]
    place = [tag for tag, _ in page.tags].index("ol")
    assert "li" in [tag for tag, _ in page.tags[place:]]
    assert "trained with one recipe" not in page.text
    assert (
        "In common: model cnn, epochs 20, batch 64, optimizer adamw, weight decay 0.0001"
        in page.text
    )
    head, *rows = page.tables["Training of each model"]
    assert head[-1] == "own recipe"
    assert [row[-1] for row in rows] == ["lr 0.01", "lr 0.001", "lr 0.01"]


def test_settings_that_separate_the_same_models_are_said_together(tmp_path):
    slow = {"optimizer": "sgd", "epochs": 40, "start": "begin.safetensors", "shift": 2}
    study = study_of(
        tmp_path, [{**BROKEN, "recipe": {"shift": 2}}, {**bido(), "recipe": slow}, DEFENDED]
    )
    assert training_notes(study) == [
        "The models were trained differently: "
        "start none, epochs 20 and optimizer adamw for undefended and CALoR, but start "
        "begin.safetensors, epochs 40 and optimizer sgd for BiDO; "
        "shift is 2 for undefended and BiDO and 0 for CALoR; part of a difference may "
        "come from that."
    ]
    # What only SGD uses is no difference to a model that does not use it, and nothing they share.
    assert [row.own for row in training_rows(study)[1:]] == [
        "start begin.safetensors, epochs 40, optimizer sgd, momentum 0.9, nesterov yes, shift 2",
        "start none, epochs 20, optimizer adamw, shift 0",
    ]
    assert "momentum" not in training_notes(study)[0] + training_caption(study)
    backwards = study_of(tmp_path / "backwards", [{**BROKEN, "recipe": slow}, DEFENDED])
    assert "momentum" not in training_notes(backwards)[0] + training_caption(backwards)


def test_settings_without_effect_are_no_difference(tmp_path):
    idle = {"momentum": 0.5, "nesterov": False, "milestones": [0.5], "decay": 0.2}
    study = study_of(tmp_path, [BROKEN, {**DEFENDED, "recipe": idle}])
    assert training_notes(study) == []
    used = [
        {**BROKEN, "recipe": {"optimizer": "sgd"}},
        {**DEFENDED, "recipe": {"optimizer": "sgd", "momentum": 0.5}},
    ]
    assert training_notes(study_of(tmp_path / "used", used))[0].startswith(
        "The models were trained differently: momentum is 0.9 for undefended and 0.5 for CALoR;"
    )


def test_many_models_are_counted_and_not_listed(tmp_path):
    ranks = [{**DEFENDED, "defenses": [{"name": "calor", "rank": rank}]} for rank in range(2, 9)]
    strong = [
        {**bido(lambda_x=0.1 * place), "recipe": {"batch": 128, "lr": 0.00123456}}
        for place in range(1, 6)
    ]
    (note,) = training_notes(study_of(tmp_path, [BROKEN, *ranks, *strong]))
    assert note == (
        "The models were trained differently: batch 128 and lr 0.00123456 for 5 BiDO "
        "models, but batch 64 and lr 0.001 for 8 other models; "
        "part of a difference may come from that."
    )


def test_recipes_that_differ_make_models_that_differ(tmp_path):
    """Each defense is compared with the undefended model of its own recipe."""
    pair = [BROKEN, {**DEFENDED, "accuracy": 0.981}]
    audits = [
        *pair,
        *(
            {**audit, "recipe": {"epochs": 5}, "hits": hits, "accuracy": 0.9}
            for audit, hits in zip(pair, [(18, 18), (17, 17)], strict=True)
        ),
    ]
    study = study_of(tmp_path, audits)
    assert [subject.name for subject in study.subjects] == [
        "undefended (epochs=20)",
        "undefended (epochs=5)",
        "CALoR (epochs=20)",
        "CALoR (epochs=5)",
    ]
    change = Page(build_report([tmp_path / "run"], tmp_path / "report.html")).sentences[2]
    assert "CALoR (epochs=5) does not clearly lower it: 85 %" in change
    assert change.endswith("costs no accuracy on held-out images (90 → 90 %).")


def test_more_training_is_said_apart(tmp_path):
    study = study_of(tmp_path, [BROKEN, TRANSFER, DEFENDED])
    assert training_notes(study) == [
        "TL started from a first training stage (12 epochs on 200 public people) that "
        "the other models did not have: "
        "part of a difference may come from more training."
    ]
    assert training_caption(study).startswith("All models were trained with one recipe: model cnn,")
    private = {**TRANSFER, "info": {"first_stage": {**STAGE, "data": "private", "classes": 20}}}
    assert (
        "(12 epochs on the 20 private people)"
        in training_notes(study_of(tmp_path / "private", [BROKEN, private]))[0]
    )
    assert (
        training_notes(
            study_of(
                tmp_path / "all",
                [{**audit, "info": {"first_stage": STAGE}} for audit in (BROKEN, DEFENDED)],
            )
        )
        == []
    )


def test_training_times_stages_and_facts_are_shown(tmp_path):
    noisy = {
        **DEFENDED,
        "defenses": [{"name": "dpsgd"}],
        "seconds": 9000.0,
        "control": None,
        "info": {"facts": {"dpsgd": {"steps": 940}}},
    }
    run = make_run(tmp_path / "run", [BROKEN, TRANSFER, noisy, {**bido(), "seconds": 150.0}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.tables["Training of each model"] == [
        [
            "model",
            "weights",
            "training time",
            "relative to undefended",
            "epoch kept",
            "first stage",
            "reported by its defenses",
        ],
        ["undefended", "12 345", "60 s", "1.00 ×", "4 of 20", "–", "–"],
        [
            "TL",
            "12 345 345 trainable",
            "90 s",
            "1.50 ×",
            "4 of 20",
            "12 epochs on 200 public people, accuracy 93.4 % on held-out images 4 min",
            "TL last frozen layer features.6; trainable 345; frozen 12 000",
        ],
        ["DP-SGD", "12 345", "2.5 h", "–", "4 of 20", "–", "DP-SGD steps 940"],
        ["BiDO", "12 345", "2.5 min", "2.50 ×", "4 of 20", "–", "–"],
    ]


def test_models_of_several_seeds_have_rows_of_their_own(tmp_path):
    audits = [
        BROKEN,
        {**BROKEN, "seed": 1, "seconds": 30.0},
        {**BROKEN, "seed": 1, "loss": "ce", "seconds": 30.0},
        DEFENDED,
    ]
    rows = training_rows(study_of(tmp_path, audits))
    assert [(row.label, row.training.seconds) for row in rows] == [
        ("undefended · seed=0", 60),
        ("undefended · seed=1", 30),
        ("CALoR", 60),
    ]


def test_nothing_is_claimed_about_an_unknown_training(tmp_path):
    given = {
        "recipe": {"weights": "w.safetensors", "lr": 0.5},
        "info": {"selected_epoch": None, "trainable": None},
    }
    alone = study_of(tmp_path / "alone", [{**BROKEN, **given}])
    assert training_notes(alone) == []
    assert training_caption(alone) == "The weights were given, so how they were trained is unknown."
    study = study_of(tmp_path, [BROKEN, {**DEFENDED, **given}, bido()])
    assert training_notes(study) == ["How CALoR was trained is unknown: the weights were given."]
    assert training_caption(study).startswith(
        "All models but those given as weights were trained with one recipe: "
    )
    row = training_rows(study)[1]
    assert (row.label, row.epoch, row.own, row.training.seconds, row.training.times_undefended) == (
        "CALoR",
        "–",
        "",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {
                "epsilon": 4.2345,
                "delta": 1e-5,
                "noise": 1.1,
                "sample_rate": 0.02134,
                "accountant": "rdp",
                "note": "not for inversion",
            },
            (
                "ε = 4.23 at δ = 1e−05; noise 1.1; sample rate 0.0213; accountant rdp; not "
                "for inversion"
            ),
        ),
        ({"epsilon": "Infinity", "delta": 1e-5}, "ε = ∞ at δ = 1e−05"),
        (
            {
                "epsilon": None,
                "delta": 1e-5,
                "accountant": None,
                "note": "without noise there is no guarantee",
            },
            "without noise there is no guarantee",
        ),
        ({"taps": ["block1", "block2"]}, "taps block1, block2"),
        (
            {"frozen": 13_900_000, "strict": True, "kept": {"a": 1, "b": [2.5]}},
            "frozen 13 900 000; strict yes; kept (a 1, b 2.5)",
        ),
        ({}, ""),
    ],
)
def test_facts_in_words(facts, text):
    assert plain(fact_words(facts)) == text


def test_values_of_a_recipe_keep_their_digits():
    assert (words(0.123456), words(0.123456, exact=True), words([0.1, -1e-5], exact=True)) == (
        "0.123",
        "0.123456",
        "0.1/−1e−05",
    )
    assert (words(None), words([]), words(False), words(0)) == ("none", "none", "no", "0")


def test_defenses_are_titled_and_told_apart(tmp_path):
    strengths = [
        ("hsic_nocco", 0.05),
        ("hsic_nocco", 0.1),
        ("coco_frobenius", 5.0),
        ("coco_frobenius", 10.0),
    ]
    both = {**TRANSFER, "defenses": [{"name": "transfer"}, {"name": "bido"}]}
    study = study_of(
        tmp_path,
        [BROKEN, *(bido(measure=measure, lambda_x=weight) for measure, weight in strengths), both],
    )
    assert [entry.label for entry in study.entries] == [
        "undefended",
        "BiDO · measure=hsic_nocco · lambda_x=0.05",
        "BiDO · measure=hsic_nocco · lambda_x=0.1",
        "BiDO · measure=coco_frobenius · lambda_x=5.0",
        "BiDO · measure=coco_frobenius · lambda_x=10.0",
        "TL + BiDO",
    ]
    layers = study_of(
        tmp_path / "layers", [bido(layers=["a", "b"]), bido(layers=["a", "c"]), bido()]
    )
    assert [subject.name for subject in layers.subjects] == [
        "BiDO (layers=a/b)",
        "BiDO (layers=a/c)",
        "BiDO (layers=none)",
    ]
