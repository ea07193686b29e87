"""The search for strengths: resumed after a kill it makes the same trials."""

import os
import signal
import warnings
from dataclasses import fields
from types import SimpleNamespace

import optuna
import pytest

from frostglass.attacks.base import attacks
from frostglass.core.errors import ConfigError, StoreError
from frostglass.defenses.base import defenses
from frostglass.defenses.strengths import Choice
from frostglass.hardening import study as module
from frostglass.hardening.budget import SearchBudget
from frostglass.hardening.goal import FeatureGoal, ModelGoal
from frostglass.hardening.space import Tunable, built, candidates, described
from frostglass.hardening.study import Outcome, open_study
from killing import ended, fork, run_until_done

SETTINGS = {"accuracy": 0.9, "seed": 0}
GOAL = ModelGoal(0.9)
MODELS = Tunable("model", 20)
TRIALS = 7


def leak(candidate, values):
    """A world in which lower ranks and larger weights leak less and cost accuracy."""
    strength = 1 - values.get("calor.rank", 20) / 20 + values.get("mid.weight", 0.0)
    accuracy = 0.99 - 0.15 * strength
    if accuracy < SETTINGS["accuracy"]:
        return Outcome(accuracy, reason="misses the accuracy")
    return Outcome(accuracy, 1 - strength, 0.0, 1.0)


def search(folder, evaluate=leak, budget=f"{TRIALS} trials", names=("calor", "label_smoothing")):
    with open_study(folder, candidates(names, MODELS), SETTINGS, goal=GOAL, seed=3) as study:
        study.run(evaluate, SearchBudget.parse(budget))
        return made(study)


def made(study):
    return [
        (each.candidate.title, each.number, each.values, each.outcome) for each in study.trials()
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return search(tmp_path_factory.mktemp("unbroken"))


def test_candidates_take_turns_and_begin_with_their_defaults(unbroken):
    assert [title for title, *_ in unbroken[:4]] == ["calor", "label_smoothing"] * 2
    assert unbroken[0][2] == {"calor.rank": 20, "calor.b": 8.0}  # 30 is more than there are people
    assert unbroken[1][2] == {"label_smoothing.alpha": -0.05}
    assert len({str(values) for _, _, values, _ in unbroken}) == TRIALS


def test_a_model_that_misses_the_accuracy_has_no_leak(unbroken):
    pruned = [outcome for *_, outcome in unbroken if outcome.leak is None]
    assert pruned
    assert all(outcome.utility < 0.9 and outcome.reason for outcome in pruned)


@pytest.mark.parametrize(
    ("outcome", "state", "violated"),
    [
        (Outcome(0.95, 0.4, 0.3, 0.5), "COMPLETE", False),
        (Outcome(0.9, 0.0, 0.0, 0.1), "COMPLETE", False),
        (Outcome(0.89, reason="misses the accuracy"), "PRUNED", True),
        (Outcome(0.95, reason="vacuous"), "PRUNED", True),
        (Outcome(reason="failed"), "PRUNED", True),
    ],
)
def test_optuna_is_told_what_to_keep_away_from(tmp_path, outcome, state, violated):
    search(tmp_path, lambda *_: outcome, "1 trial", ["calor"])
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    (trial,) = optuna.load_study(study_name="calor", storage=storage).trials
    assert trial.state.name == state
    assert (trial.constraints["accuracy"] > 0) is violated


@pytest.mark.parametrize("calls", [1, 3, TRIALS])
def test_a_search_killed_during_a_trial_makes_the_same_trials(tmp_path, unbroken, calls):
    left = calls

    def dying(candidate, values):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return leak(candidate, values)

    assert ended(fork(lambda: search(tmp_path, dying))) == -signal.SIGKILL
    assert search(tmp_path) == unbroken


def test_a_search_killed_at_any_moment_makes_the_same_trials(tmp_path, unbroken):
    moments = [0.04 * number for number in range(1, 9)]
    assert run_until_done(lambda: search(tmp_path), moments) > 0
    assert search(tmp_path) == unbroken


def test_a_database_that_was_half_made_is_made_again(tmp_path, unbroken):
    (tmp_path / "study.db.new").write_bytes(b"half")
    assert search(tmp_path) == unbroken
    assert not (tmp_path / "study.db.new").exists()


def test_a_larger_budget_continues_the_same_search(tmp_path, unbroken):
    assert search(tmp_path, budget="3 trials") == unbroken[:3]
    assert search(tmp_path) == unbroken


def test_a_failed_evaluation_is_made_again(tmp_path, unbroken):
    def failing(candidate, values):
        raise RuntimeError("no more memory")

    search(tmp_path, budget="2 trials")
    with pytest.raises(RuntimeError):
        search(tmp_path, failing)
    assert search(tmp_path) == unbroken


def test_seconds_are_counted_over_restarts(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    assert len(search(tmp_path, budget="1m")) == 2
    assert len(search(tmp_path, budget="1m")) == 2
    assert len(search(tmp_path, budget="2m")) == 4


def test_repeated_parameters_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_TRIALS", 3)
    assert len(search(tmp_path, budget="2h")) == 6


def test_a_few_whole_numbers_are_all_tried(tmp_path):
    crowd = candidates(["decoys"], Tunable("model", 20, secret=100))  # 1 to 5 decoys
    with open_study(tmp_path, crowd, SETTINGS, goal=GOAL, seed=3) as study:
        study.run(lambda *_: Outcome(0.95, 0.5, 0.0, 1.0), SearchBudget.parse("5 trials"))
        tried = [each.values["decoys.people"] for each in study.trials()]
    assert len(set(tried)) >= 4, tried


def test_other_settings_are_refused(tmp_path):
    search(tmp_path, budget="1 trial")
    changed = {**SETTINGS, "accuracy": 0.8}
    with (
        pytest.raises(ConfigError, match=r"begun with other settings \(accuracy\): give these"),
        open_study(tmp_path, candidates(["calor"], MODELS), changed, goal=ModelGoal(0.8), seed=3),
    ):
        pass


def test_a_second_process_is_refused(tmp_path):
    known = candidates(["calor"], MODELS)
    with (
        open_study(tmp_path, known, SETTINGS, goal=GOAL, seed=3),
        pytest.raises(ConfigError, match="another process is working on the study"),
        open_study(tmp_path, known, SETTINGS, goal=GOAL, seed=3),
    ):
        pass


def test_a_damaged_study(tmp_path):
    (tmp_path / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match=r"study.db cannot be read .*: delete the file to begin"):
        search(tmp_path)


def test_optuna_says_nothing(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(tmp_path, budget="2 trials")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "seconds", "trials"),
    [
        ("2h", 7200, None),
        ("90m", 5400, None),
        ("1h30m", 5400, None),
        ("1.5 h", 5400, None),
        ("45s", 45, None),
        ("30 trials", None, 30),
        ("1 trial", None, 1),
    ],
)
def test_budgets(text, seconds, trials):
    budget = SearchBudget.parse(text)
    assert (budget.seconds, budget.trials) == (seconds, trials)


@pytest.mark.parametrize("text", ["", "2", "two hours", "2h!", "-2h", "0h", "0 trials", "2d"])
def test_budgets_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match=r"^budget: expected"):
        SearchBudget.parse(text)


def test_pairs_that_cannot_be_combined_are_left_out():
    titles = [each.title for each in candidates(["calor", "mid", "bido"], MODELS)]
    assert titles == ["calor", "mid", "bido", "calor + bido", "mid + bido"]


def test_a_base_gives_the_first_values_and_what_is_not_tuned():
    bases = [{"name": "adv_learn", "decoder_width": 16, "pixel": 400.0}]
    alone, other, pair = candidates(["adv_learn", "crafter"], SPLIT, bases)
    assert alone.first() == {"adv_learn.pixel": 400.0}
    table = {"name": "adv_learn", "decoder_width": 16, "pixel": 7.0}
    assert alone.tables({"adv_learn.pixel": 7.0}) == [table]
    assert pair.tables({"adv_learn.pixel": 7.0})[0] == table
    assert other.tables({}) == [{"name": "crafter"}]
    assert bases[0]["pixel"] == 400.0


def test_a_variant_is_a_base():
    bases = [{"name": "adv_learn", "variant": "published"}]
    (candidate,) = candidates(["adv_learn"], SPLIT, bases)
    assert candidate.first() == {"adv_learn.pixel": 4.0}
    (method,) = built(candidate.tables({"adv_learn.pixel": 7.0}))
    assert (method.pixel, method.decoder_form) == (7.0, "adv_learn")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["calr"], r"no defense named 'calr'; did you mean 'calor'\? known: bido, calor, "),
        (["crafter"], "crafter has no strength to tune on this model and data"),
        (["decoys"], r"decoys has no strength to tune on this model and data \(0 secret people\)"),
        (["calor", "calor"], "calor is named twice"),
    ],
)
def test_defenses_that_cannot_be_tuned(names, message):
    with pytest.raises(ConfigError, match=message):
        candidates(names, MODELS)


MANY, SPLIT = Tunable("model", 10, 150), Tunable("features", 10)
SURFACES = {
    name: tunable for tunable in (MANY, SPLIT) for name in defenses.names() if tunable.ranges(name)
}


def test_the_defaults_can_be_tuned():
    for goal, tunable in ((GOAL, MANY), (FeatureGoal(0.8), SPLIT)):
        assert all(map(tunable.ranges, goal.preferred(SimpleNamespace(prior="any"))))
    assert not Tunable("model", 10, 9).ranges("decoys")  # fewer secret people than classes


def test_protections_that_need_a_prior_are_no_default_without_one():
    assert FeatureGoal(0.8).preferred(SimpleNamespace(prior=None)) == ("adv_learn",)


def test_defenses_are_tuned_where_they_act():
    assert not MANY.ranges("crafter")
    assert not SPLIT.ranges("calor")
    for name in ("adv_learn", "disco", "tiprdc", "crafter", "crafter_z", "rounding"):
        assert SPLIT.ranges(name)


def test_one_protection_at_most_acts_on_what_leaves():
    titles = [each.title for each in candidates(["adv_learn", "crafter", "crafter_z"], SPLIT)]
    assert titles == [
        "adv_learn", "crafter", "crafter_z", "adv_learn + crafter", "adv_learn + crafter_z",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("craftr", r"no defense named 'craftr'; did you mean 'crafter'\? known: adv_learn, "),
        ("calor", "calor defends whole models and cannot protect features; known: adv_learn, "),
    ],
)
def test_defenses_that_cannot_protect_features(name, message):
    with pytest.raises(ConfigError, match=message):
        candidates([name], SPLIT)


def test_similarity_decides_between_equal_leaks_and_no_others():
    least, same, more = (
        Outcome(0.9, leak, similarity=similarity)
        for leak, similarity in ((0.0, 0.2), (0.0, 0.9), (1 / 1000, -1.0))
    )
    assert least.objective < same.objective < more.objective
    assert least.rank < same.rank < more.rank
    assert Outcome(0.9, 0.25).objective == 0.25  # models have no similarity


@pytest.mark.parametrize("outcome", [Outcome(0.9, 0.2, 0.1, 0.3, 0.5), Outcome(reason="failed")])
def test_an_outcome_is_kept_under_the_name_of_its_utility(outcome):
    plain = outcome.plain("utility")
    assert plain["utility"] == outcome.utility
    assert Outcome.read(plain, "utility") == outcome
    assert set(Outcome(0.9).plain("accuracy")) == {"accuracy", "leak", "low", "high", "reason"}


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("end", ["low", "high"])
def test_a_defense_takes_the_ends_of_its_ranges(name, end):
    (candidate,) = candidates([name], SURFACES[name])
    values = {
        key: limits.options[end == "high"] if isinstance(limits, Choice) else getattr(limits, end)
        for key, limits in candidate.ranges.items()
    }
    (method,) = built(candidate.tables(values))
    assert {key: getattr(method, key.partition(".")[2]) for key in values} == values
    assert described(candidate.tables(values)).startswith(f"{name} (")


@pytest.mark.parametrize("name", defenses.names())
def test_adaptive_attacks_exist(name):
    kinds = [attacks.get(attack) for attack in attacks.names()]
    variants = {each for kind in kinds for each in kind.variants}
    parameters = {field.name for kind in kinds for field in fields(kind)}
    named = {*variants, *attacks.names()}
    if defenses.get(name).needs_cut:  # attacks on features know a protection by parameters too
        named |= parameters
    assert set(defenses.get(name).adaptive) <= named
