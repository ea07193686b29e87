"""Pass, fail or inconclusive against thresholds; what page one says about it."""

import json

import pytest

from feature_folders import CRAFTED, OPEN, WEAK, feature_study, make_feature_run
from frostglass.report.build import build_report
from frostglass.report.outcome import answers, binomial
from pages import Page
from run_folders import BROKEN, CALOR, DEFENDED, FAILED, make_run, many_models, study_of

NOBODY = {"hits": (0, 0), "defenses": CALOR, "accuracy": 0.967}


def outcome(tmp_path, spec, limits, **options):
    study = study_of(tmp_path, [spec], thresholds=limits, **options)
    return answers(study)[0]


@pytest.mark.parametrize(
    ("hits", "limit", "expected"),
    [
        (0, 0.17, "pass"),  # of 20: 0 to 16.8 %
        (0, 0.16, "inconclusive"),
        (20, 0.83, "fail"),  # 83.2 to 100 %
        (20, 0.84, "inconclusive"),
        (20, 1.0, "pass"),
        (8, 0.4, "inconclusive"),
    ],
)
def test_the_whole_interval_must_be_on_one_side(tmp_path, hits, limit, expected):
    answer = outcome(tmp_path, {**NOBODY, "hits": (hits, hits)}, {"max_first": limit})
    (check,) = answer.checks
    assert answer.outcome == check.outcome == expected
    assert (check.value, check.people) == (hits / 20, 20)
    assert check.low <= check.value <= check.high


def test_first_and_any_guess_are_counted_apart(tmp_path):
    # 30 of 60 images in order: everybody's first... of the first ten people all three guesses.
    limits = {"max_first": 0.1, "max_any": 0.9, "max_recognised": 0.9}
    answer = outcome(tmp_path, {**BROKEN, "hits": (31, 31)}, limits, candidates=3)
    values = {check.name: check.value for check in answer.checks}
    assert values["max_first"] == pytest.approx(11 / 20)
    assert values["max_any"] == pytest.approx(11 / 20)
    assert values["max_recognised"] == pytest.approx(31 / 60)
    assert answer.outcome == "fail"
    assert answer.reasons == (
        "people recognised by the first guess: 55\u202f% (35–\u206075\u202f%), by GMI, where at "
        "most 10\u202f% is accepted",
    )


def test_the_strongest_sound_attack_decides(tmp_path):
    weak = {**NOBODY, "case": "weak"}
    strong = {**NOBODY, "hits": (20, 20), "case": "strong"}
    limits = {"max_first": 0.2}
    (answer,) = answers(study_of(tmp_path / "a", [weak, strong], thresholds=limits))
    assert (answer.outcome, answer.checks[0].attack) == ("fail", "strong")
    void = {**strong, "control": (0, 0)}
    (answer,) = answers(study_of(tmp_path / "b", [weak, void], thresholds=limits))
    assert (answer.outcome, answer.checks[0].attack) == ("pass", "weak")


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        (FAILED, {}, "its audits are vacuous, so their numbers prove nothing"),
        (NOBODY, {"before": False}, "were not recorded before the results, on 2026-01-02T03:04"),
        (NOBODY, {"not_run": ["bido: time budget reached"]}, "the run is unfinished: audits are"),
        (NOBODY, {"failed": ["bido: out of memory"]}, "the run is unfinished: audits are"),
        ({**NOBODY, "partial": [1]}, {}, "a search stopped early for 1 people"),
        (NOBODY, {"people": 10}, "contains the limit; about 17 people would settle it"),
    ],
)
def test_what_makes_an_answer_inconclusive(tmp_path, spec, options, reason):
    answer = outcome(tmp_path, spec, {"max_first": 0.2}, **options)
    assert answer.outcome == "inconclusive"
    assert reason in "; ".join(answer.reasons)


def test_a_leak_of_an_unfinished_run_is_a_fail(tmp_path):
    answer = outcome(tmp_path, BROKEN, {"max_first": 0.2}, not_run=["bido: time budget reached"])
    assert answer.outcome == "fail"


def test_accuracy_has_its_interval_over_held_out_images(tmp_path):
    """240 images are held out; 232 of them are 96.7 %."""
    low, high = binomial(232, 240)
    limits = {"max_first": 0.2, "min_accuracy": low - 0.001}
    assert outcome(tmp_path / "a", NOBODY, limits).outcome == "pass"
    limits["min_accuracy"] = 0.967
    assert outcome(tmp_path / "b", NOBODY, limits).outcome == "inconclusive"
    limits["min_accuracy"] = high + 0.001
    assert outcome(tmp_path / "c", NOBODY, limits).outcome == "fail"
    assert binomial(0, 20) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert binomial(20, 20) == (pytest.approx(0.025 ** (1 / 20)), 1.0)


def test_features_have_similarity_and_utility(tmp_path):
    limits = {"max_similarity": 0.4, "min_utility": 0.45}
    study = feature_study(tmp_path, [OPEN, CRAFTED], thresholds=limits)
    assert [(each.subject, each.outcome) for each in answers(study)] == [
        ("unprotected", "fail"),
        ("Crafter", "pass"),
    ]
    void = feature_study(tmp_path / "void", [WEAK], thresholds=limits)
    assert [each.outcome for each in answers(void)] == ["inconclusive"]


def test_page_one_says_date_model_question_answer_and_what_to_do(tmp_path):
    limits = {"max_first": 0.2, "min_accuracy": 0.9}
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], thresholds=limits)
    out = build_report([run], tmp_path / "report.html")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    for text in (
        "Date 2026-01-03 10:20 UTC",
        "Asked How many of 20 people would be recognised",
        "undefended : target targettrial0 , no file to hash",
        "Thresholds recorded 2026-01-02 03:04 UTC, before any result.",
        "FAIL undefended People recognised by the first guess: 95 % (85–100 %), by GMI, where at "
        "most 20 % is accepted.",
        "INCONCLUSIVE CALoR The interval of people recognised by the first guess (15–55.1 %)",
        "What to do next Harden the model with decoys (frostglass harden CONFIG --accuracy 0.95): "
        "expected cost 0.4 to 2 points of accuracy.",
        "Vacuous The audit proves nothing",
    ):
        assert text in page.text, text
    rows = page.tables["Thresholds and what was measured"]
    assert rows[1] == [
        *("undefended", "people recognised by the first guess", "at most 20 %"),
        *("95 % (85–100 %)", "GMI", "fail"),
    ]
    told = document["answers"][0]["thresholds"]
    assert [(each["subject"], each["outcome"]) for each in told] == [
        ("undefended", "fail"),
        ("CALoR", "inconclusive"),
    ]
    assert told[0]["checks"][0]["value"] == 0.95


def test_without_thresholds_the_page_says_so(tmp_path):
    page = Page(build_report([make_run(tmp_path / "run", [BROKEN])], tmp_path / "report.html"))
    assert "NO THRESHOLDS No thresholds were fixed before this run" in page.text
    assert "Fix what you accept before the next run" in page.text
    assert "Thresholds and what was measured" not in page.tables


def test_a_pass_promises_no_more_than_it_shows(tmp_path):
    run = make_run(tmp_path / "run", [NOBODY], thresholds={"max_first": 0.2})
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "PASS CALoR" in page.text
    assert "A pass holds for the attacks listed here." in page.text
    assert "Harden the model" not in page.text


def test_many_answers_are_counted_on_page_one(tmp_path):
    run = make_run(tmp_path / "run", many_models(4), thresholds={"max_first": 0.3})
    page = Page(build_report([run], tmp_path / "report.html", images=False))
    assert "of 13; each is in the appendix." in page.text
    assert len(page.tables["Answers"]) == 14
    assert len(page.tables["Thresholds and what was measured"]) == 14


def test_runs_with_other_thresholds_do_not_add_up(tmp_path):
    runs = [
        make_run(tmp_path / name, [{**NOBODY, "seed": seed}], thresholds={"max_first": limit})
        for seed, (name, limit) in enumerate([("one", 0.2), ("two", 0.3)])
    ]
    out = build_report(runs, tmp_path / "report.html")
    told = json.loads(out.with_suffix(".json").read_text())["answers"][0]["thresholds"]
    assert [each["outcome"] for each in told] == ["inconclusive"]
    assert told[0]["reasons"] == ["the runs of this report fixed different thresholds"]


def test_no_report_says_anonymous_or_compliant(tmp_path):
    limits = {"max_first": 0.2, "min_accuracy": 0.9}
    runs = [
        make_run(tmp_path / "a", [NOBODY], thresholds=limits),
        make_run(tmp_path / "b", [BROKEN, DEFENDED], name="broken", not_run=["bido: no time"]),
        make_run(tmp_path / "c", [FAILED], name="void", evaluators=(0.9, 0.8)),
        make_feature_run(tmp_path / "d", [OPEN, CRAFTED], name="features"),
    ]
    for number, run in enumerate(runs):
        out = build_report([run], tmp_path / f"{number}.html", images=False)
        text = (out.read_text() + out.with_suffix(".json").read_text()).lower()
        assert "anonym" not in text
        assert "complian" not in text
