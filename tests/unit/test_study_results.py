"""Tables of studies with a known answer, and formulas beside slow or published ones."""

import json
import math
import shutil
import sqlite3
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import precision_recall_fscore_support

from frostglass.core.errors import DataError, StoreError
from frostglass.published import table
from frostglass.runtime.seeding import generator_for
from frostglass.study.answers import Answer, Answers
from frostglass.study.correlation import spearman
from frostglass.study.counted import counted, judgements
from frostglass.study.resampling import estimate, share
from frostglass.study.results import study_results
from frostglass.study.tables import CLASSES, f1_scores
from run_folders import BIDO, BROKEN, DEFENDED
from study_visits import answer_all, study_of_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    three = (BROKEN, DEFENDED, {**DEFENDED, "defenses": BIDO, "hits": (3, 2)})
    options = {"participants": 12, "raters": 3, "shown": 10}
    return study_of_run(tmp_path_factory.mktemp("three"), three, **options)


@pytest.fixture
def folder(made, tmp_path):
    return replace(made, path=shutil.copytree(made.path, tmp_path / "study"))


def prefer_undefended(who, item):
    """The model with the lowest number, or the right person."""
    if item.protocol == "identification":
        return item.truth
    return item.models.index(min(item.models)) if item.models else 0


def test_without_answers_there_are_no_tables(folder):
    found = study_results(folder.path)
    assert (found.chosen, found.compared, found.identified, found.metrics) == ([], [], [], [])
    assert found.agreement == {}
    assert (found.participation.invited, found.participation.consented) == (12, 0)


def test_unanimous_people(folder):
    answer_all(folder, prefer_undefended)
    found = study_results(folder.path)
    part = found.participation
    assert (part.finished, part.excluded, part.unchecked, part.timed_out) == (12, 0, 0, 0)
    assert part.answers == 3 * (30 + 30)  # three raters; thirty items of each protocol
    assert part.median_seconds == 4.0
    first, second, third = found.chosen
    assert [each.model for each in found.chosen] == ["undefended", "CALoR", "BiDO"]
    assert (first.share.value, second.share.value, third.share.value) == (1.0, 0.5, 0.0)
    assert first.share.low == pytest.approx(0.025 ** (1 / 6))  # six participants, all of them
    assert [(e.model, e.other, e.share.value) for e in found.compared] == [
        ("undefended", "CALoR", 1.0),
        ("undefended", "BiDO", 1.0),
        ("CALoR", "BiDO", 1.0),
    ]
    for each in found.identified:
        assert (each.accuracy.value, each.macro_f1.value) == (1.0, 1.0)
        assert each.macro_f1.low == each.accuracy.low < 1
        assert [score.name for score in each.classes] == list(CLASSES)
        assert {score.f1.value for score in each.classes if score.f1} == {1.0}
    assert {each.alpha for each in found.agreement.values()} == {1.0}
    json.dumps(found.plain(), allow_nan=False)


def test_who_fails_attention_checks_does_not_count(folder):
    pairs = [p.id for p in folder.design.participants if p.protocol == "pairwise"]

    def choose(who, item):
        contrary = who.id == pairs[0] and item.protocol == "pairwise"
        return 1 - prefer_undefended(who, item) if contrary else prefer_undefended(who, item)

    answer_all(folder, choose, careless=pairs[:1])
    found = study_results(folder.path)
    assert (found.participation.excluded, found.chosen[0].share.value) == (1, 1.0)
    assert found.participation.answers == 3 * 60 - 15


def test_time_outs_are_counted_and_left_out(folder):
    pairs = [p.id for p in folder.design.participants if p.protocol == "pairwise"]
    answer_all(
        folder, lambda who, item: None if who.id == pairs[0] else prefer_undefended(who, item)
    )
    found = study_results(folder.path)
    assert found.participation.timed_out == 15
    assert found.compared[0].share.value == 1.0


def test_who_left_before_the_first_check_does_not_count(folder):
    who = next(
        each
        for each in folder.design.participants
        if not folder.design.items[each.trials[0].item].check
    )
    answers = Answers(folder.answers, folder.id)
    answers.consent(who.id, 0.0)
    assert answers.record(Answer(who.id, 0, 0, who.trials[0].order.index(0), 1.0), 0.0)
    answers.close()
    part = study_results(folder.path).participation
    assert (part.unchecked, part.answers, part.finished) == (1, 0, 0)


def test_guessing_gives_the_scores_of_chance(folder):
    rng = generator_for(0, "guess")

    def guess(who, item):
        return int(torch.randint(len(item.options) + (len(item.options) > 2), (1,), generator=rng))

    answer_all(folder, guess)
    found = study_results(folder.path)
    for each in found.chosen:
        assert each.share.low < 0.5 < each.share.high
    for each in found.identified:
        assert each.macro_f1.low < 0.2 < each.macro_f1.high
    for each in found.agreement.values():
        assert each.low < 0 < each.high
    for each in found.metrics:
        assert abs(each.pairwise.rho or 0) < 0.6


def test_a_metric_that_people_follow_is_found(folder):
    metrics = {(e.model, e.person): e.metrics for e in folder.design.reconstructions}

    def follow(who, item):
        if item.protocol == "identification":
            seen = metrics[item.models[0], item.person]["match_3"] > 0.5 if item.models else True
            return item.truth if seen else item.none
        values = [metrics[model, item.person]["match_3"] for model in item.models]
        return 0 if not values or values[0] >= values[1] else 1

    answer_all(folder, follow)
    rows = {each.metric: each for each in study_results(folder.path).metrics}
    assert set(rows) == set(folder.design.metrics) >= {"verified_1", "top1_1", "match_3"}
    followed = rows["match_3"]
    ties = sum(
        len({metrics[model, item.person]["match_3"] for model in item.models}) == 1
        for item in folder.design.items
        if item.protocol == "pairwise" and not item.check
    )
    assert followed.preferred.value == pytest.approx(1 - ties / 30 / 2)
    assert followed.pairwise.rho > 0.6
    assert followed.identification.rho > 0.8
    assert rows["verified_3"].identification.rho == pytest.approx(1)  # accepted means match > 0.5
    assert rows["verified_3"].identification.low <= 1
    assert rows["target_confidence"].pairwise.rho is None  # the same for everybody
    assert rows["target_confidence"].preferred.value == 0.5
    assert followed.pairwise.items == 30


def test_class_scores_are_those_of_scikit_learn(folder):
    rng = generator_for(0, "classes")

    def choose(who, item):
        if item.protocol == "pairwise":
            return 0
        right = torch.rand(1, generator=rng).item() < 0.4
        return item.truth if right else int(torch.randint(5, (1,), generator=rng))

    answer_all(folder, choose)
    found = study_results(folder.path).identified
    answers = Answers(folder.answers, folder.id, read_only=True)
    made = counted(judgements(folder.design, answers.all()), "identification")
    answers.close()
    for model, row in enumerate(found):
        own = [each for each in made if each.item.models == [model]]
        truth, said = [e.truth_position for e in own], [e.position for e in own]
        options = {"labels": range(5), "zero_division": 0.0}
        expected = precision_recall_fscore_support(truth, said, **options)[:3]
        scores = [(e.precision, e.recall, e.f1) for e in row.classes]
        values = [[each.value if each else 0.0 for each in some] for some in scores]
        for ours, theirs in zip(zip(*values, strict=True), expected, strict=True):
            assert list(ours) == pytest.approx(theirs.tolist())
        assert row.macro_f1.value == pytest.approx(expected[2].mean())
        for score in row.classes:
            for each in (score.recall, score.precision, score.f1):
                assert each is None or each.low <= each.value <= each.high
                assert each is None or each.low < each.high


def test_f1_of_the_published_recall_and_precision():
    """Crafter's Table XV: F1 follows from recall and precision, macro-F1 is its mean."""
    cells = {(each.setting, each.metric): each.value for each in table("crafter-table15").cells}
    options = [f"option {name}" for name in ("A", "B", "C", "D", "None")]
    for option in options:
        recall, precision = cells[option, "recall"], cells[option, "precision"]
        # Of 1000 images of the option, 1000 · recall are found; answers follow from precision.
        hits, said = 1000 * recall, 1000 * recall / precision
        counts = torch.zeros(5, 5, dtype=torch.double)
        counts[0, 0], counts[0, 1], counts[1, 0] = hits, 1000 - hits, said - hits
        assert f1_scores(counts)[0].item() == pytest.approx(cells[option, "f1"], abs=1e-3)
    macro = sum(cells[option, "f1"] for option in options) / 5
    assert macro == pytest.approx(cells["all options", "macro_f1"], abs=1e-3)


def test_a_class_that_never_occurs():
    nothing = torch.zeros(5, 5, dtype=torch.double)
    assert f1_scores(nothing).isnan().all()


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_that_of_scipy(seed):
    rng = generator_for(seed, "ranks")
    pair = torch.randint(6, (2, 30), generator=rng).double()
    times = torch.randint(3, (4, 30), generator=rng)
    for row, found in zip(times, spearman(*pair, times.double()).tolist(), strict=True):
        repeated = pair.repeat_interleave(row, 1)
        assert found == pytest.approx(spearmanr(*repeated).statistic)
    assert spearman(pair[0], torch.ones(30), times.double()).isnan().all()


def test_answers_of_one_participant_are_not_independent():
    """Ten participants who each always say the same: the interval is that of ten, not of 200."""
    participants = [f"p{n // 20}" for n in range(200)]
    people = [n % 20 for n in range(200)]
    hits = [n // 20 < 5 for n in range(200)]
    found = share(hits, participants, people)
    width = 2 * 1.96 * math.sqrt(0.25 / 10)
    assert found.value == 0.5
    assert found.high - found.low == pytest.approx(width, rel=0.15)
    apart = share([n % 2 == 0 for n in range(200)], [f"p{n}" for n in range(200)], list(range(200)))
    # Both are resampled, which is never too narrow: the variance is about twice that of one.
    assert 1.0 < (apart.high - apart.low) / (2 * 1.96 * math.sqrt(0.25 / 200)) < 2.2


def test_a_statistic_without_a_value():
    assert estimate(lambda weights: torch.full((len(weights),), math.nan), ["a"], [1]) is None
    assert share([], [], []) is None


def test_answers_of_another_study_are_refused(folder, tmp_path):
    other = study_of_run(tmp_path / "other")
    with pytest.raises(DataError, match="has the answers of another study: give the answers"):
        study_results(folder.path, other.answers)
    text = tmp_path / "text"
    text.write_text("participant,answer\n")
    with pytest.raises(DataError, match="cannot be used as answers to a study"):
        study_results(folder.path, text)
    with pytest.raises(StoreError, match=r"none\.sqlite is missing"):
        study_results(folder.path, tmp_path / "none.sqlite")
    assert text.read_text() == "participant,answer\n"


def test_answers_may_be_elsewhere(folder, tmp_path):
    answer_all(folder, prefer_undefended)
    moved = tmp_path / "collected.sqlite"
    shutil.move(folder.answers, moved)
    assert study_results(folder.path, moved).participation.finished == 12


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE answers SET choice = 9",
        "UPDATE answers SET choice = NULL",
        "UPDATE answers SET place = place + 1000",
        "UPDATE answers SET participant = 'x' || participant",
        "UPDATE answers SET position = -1",
    ],
)
def test_answers_that_do_not_fit_are_refused(folder, change):
    answer_all(folder, prefer_undefended)
    connection = sqlite3.connect(folder.answers)
    with connection:
        connection.execute(change + " WHERE place = 0")
    connection.close()
    with pytest.raises(DataError, match="does not fit the study: its file of answers was changed"):
        study_results(folder.path)


def test_a_damaged_database_is_refused(folder):
    answer_all(folder, prefer_undefended)
    content = bytearray(folder.answers.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    folder.answers.write_bytes(content)
    with pytest.raises(DataError, match="cannot be used as answers to a study"):
        study_results(folder.path)


def test_answers_are_synced_at_once(folder):
    answers = Answers(folder.answers, folder.id)
    pragmas = {
        name: answers._one(f"PRAGMA {name}")[0]
        for name in ("journal_mode", "synchronous", "secure_delete", "foreign_keys")
    }
    answers.close()
    full = 2
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": full,
        "secure_delete": 1,
        "foreign_keys": 1,
    }
