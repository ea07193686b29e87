"""The parts of a hardening: what is tuned with, who becomes a finalist, what is dominated."""

from types import SimpleNamespace

import pytest
import torch

from frostglass.auditing.experiment import Experiment, experiments
from frostglass.core.errors import ConfigError, RunError
from frostglass.evaluators.embedder import Embedder
from frostglass.hardening import final, tuning
from frostglass.hardening import goal as goals
from frostglass.hardening.cases import given_cases, model_cases
from frostglass.hardening.final import Model, dominated, final_settings, finalists
from frostglass.hardening.frontier import frontier
from frostglass.hardening.goal import ModelGoal
from frostglass.hardening.output import _remark
from frostglass.hardening.space import Tunable, candidates
from frostglass.hardening.study import Outcome, Trial
from frostglass.hardening.tuning import Tuner, tuning_experiment
from frostglass.metrics.base import Rows
from frostglass.report.seeds import SeedRow, Share
from frostglass.training.settings import Training

FACES = {"name": "faces", "identities": 8, "images": 6}
MANY = FACES | {"public_identities": 20, "public_images": 3}
FEW = FACES | {"public_identities": 20, "public_images": 1}


NO_STORE = SimpleNamespace(executor=None)


def experiment(**values):
    return Experiment.parse({"prior": {"name": "pretrained"}, "data": MANY, **values})


# What a trial is made with


def test_tuning_shares_no_people_no_seed_and_no_embedder_of_the_final_table():
    exp = experiment()
    tuned = tuning_experiment(exp)
    assert (tuned.data.which, tuned.data.whole) == ("first", exp.data)
    assert tuned.seed not in range(exp.seed, exp.seed + 1000)
    assert [type(each) for each in tuned.evaluators] == [Training, Training, Embedder]
    assert tuned.evaluators[2].source == "public"
    assert exp.evaluators[2].source != "public"
    assert tuned.attack == exp.attack


def test_without_enough_public_images_tuning_has_no_embedder():
    tuned = tuning_experiment(experiment(data=FEW))
    assert [type(each) for each in tuned.evaluators] == [Training, Training]


def model_of(accuracy):
    return SimpleNamespace(target=SimpleNamespace(info={"accuracy": {"test": accuracy}}))


class Calls:
    """Stands for the pipeline: a model of some accuracy, and an audit of it."""

    def __init__(self, accuracy, verified=(1, 0, 0, 0), vacuous="", error=None):
        self.accuracy, self.vacuous, self.error = accuracy, vacuous, error
        first = torch.tensor([verified], dtype=torch.double).T
        columns = {"verified_1": torch.cat([first, torch.ones_like(first)], 1)}
        self.rows = Rows(labels=torch.arange(len(verified)), columns=columns)
        self.attacked = 0

    def exposed(self, exp, store):
        self.exp = exp
        return model_of(self.accuracy)

    def audit(self, exp, store):
        self.attacked += 1
        if self.error:
            raise self.error
        controls = SimpleNamespace(vacuous=self.vacuous, deciding="verified_1")
        return SimpleNamespace(controls=controls, rows=self.rows)


def tuned(calls, monkeypatch, values=None):
    monkeypatch.setattr(goals, "exposed", calls.exposed)
    monkeypatch.setattr(tuning, "audit", calls.audit)
    (candidate,) = candidates(["calor"], Tunable("model", 4))
    tuner = Tuner(experiment(), NO_STORE, ModelGoal(0.9))
    return tuner(candidate, values or {"calor.rank": 3, "calor.b": 8.0})


def test_a_trial_measures_the_first_guess(monkeypatch):
    calls = Calls(0.9)
    outcome = tuned(calls, monkeypatch)
    assert (outcome.utility, outcome.leak, outcome.reason) == (0.9, 0.25, "")
    assert outcome.low <= 0.25 <= outcome.high
    assert [(each.name, each.rank) for each in calls.exp.defenses] == [("calor", 3)]


def test_a_model_that_misses_the_accuracy_is_not_attacked(monkeypatch):
    calls = Calls(0.89)
    assert tuned(calls, monkeypatch) == Outcome(0.89, reason="misses the accuracy")
    assert calls.attacked == 0


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (Calls(0.95, vacuous="the search stopped early"), "vacuous: the search stopped early"),
        (Calls(0.95, error=RunError("not finite")), "failed: not finite"),
    ],
)
def test_an_audit_that_proves_nothing_is_no_leak_of_zero(calls, reason, monkeypatch):
    assert tuned(calls, monkeypatch) == Outcome(0.95, reason=reason)


def test_settings_that_cannot_work_are_no_trial(monkeypatch):
    calls = Calls(0.95)
    outcome = tuned(calls, monkeypatch, {"calor.rank": 5, "calor.b": 8.0})  # of 4 people
    assert outcome.leak is outcome.utility is None
    assert "calor.rank must be at most 4" in outcome.reason
    assert calls.attacked == 0


def test_an_attack_that_does_not_break_the_undefended_model_tunes_nothing(monkeypatch):
    monkeypatch.setattr(tuning, "audit", Calls(0.99, vacuous="it does not break").audit)
    with pytest.raises(RunError, match="nothing can be tuned: it does not break"):
        Tuner(experiment(), NO_STORE, ModelGoal(0.9)).undefended()


# Finalists

TUNED = ["calor", "bido", "mid", "transfer"]
KNOWN = {each.title: each for each in candidates(TUNED, Tunable("model", 20))}


def trial(title, leak, accuracy=0.97, number=0):
    candidate = KNOWN[title]
    reason = "" if leak is not None else "misses the accuracy"
    outcome = Outcome(accuracy, leak, leak, leak, reason=reason)
    values = candidate.first() | {f"{candidate.names[0]}.number": number}
    return Trial(candidate, number, values, 1.0, outcome)


def qualify(trials, monkeypatch, accuracies):
    """Choose finalists; `accuracies` of the models of everybody, by title and number."""
    made = []

    def built(tables):
        return tables

    def exposed(exp, store):
        title = " + ".join(table["name"] for table in exp.defenses)
        made.append((title, exp.defenses[0]["number"]))
        return model_of(accuracies.get(made[-1], 0.95))

    monkeypatch.setattr(final, "built", built)
    monkeypatch.setattr(goals, "exposed", exposed)
    found = finalists(trials, experiment(), None, ModelGoal(0.95))
    return [(each.title, each.trial.number) for each in found], made


def test_each_candidate_sends_its_least_leak(monkeypatch):
    trials = [
        trial("calor", 0.5, number=0),
        trial("bido", 0.7, number=0),
        trial("calor", 0.3, number=1),
        trial("calor", None, 0.8, number=2),
    ]
    assert qualify(trials, monkeypatch, {})[0] == [("calor", 1), ("bido", 0)]


def test_of_equal_leaks_the_more_accurate_is_first(monkeypatch):
    trials = [trial("calor", 0.0, 0.96), trial("bido", 0.0, 0.98), trial("mid", 0.0, 0.97)]
    found, _ = qualify(trials, monkeypatch, {})
    assert [title for title, _ in found] == ["bido", "mid", "calor"]


def test_settings_that_miss_the_accuracy_with_everybody_are_passed_over(monkeypatch):
    trials = [trial("calor", 0.1 * number, number=number) for number in range(5)]
    found, _ = qualify(trials, monkeypatch, {("calor", 0): 0.94, ("calor", 1): 0.9499})
    assert found == [("calor", 2)]


def test_few_models_are_trained_to_qualify(monkeypatch):
    trials = [trial("calor", 0.1 * number, number=number) for number in range(9)]
    trials.append(trial("bido", 0.9))
    low = {("calor", number): 0.5 for number in range(9)}
    found, made = qualify(trials, monkeypatch, low)
    assert found == [("bido", 0)]
    assert made == [("calor", 0), ("calor", 1), ("calor", 2), ("bido", 0)]


def test_there_are_four_finalists_at_most(monkeypatch):
    titles = list(KNOWN)[:6]
    found, _ = qualify([trial(each, 0.1) for each in titles], monkeypatch, {})
    assert len(found) == 4


def test_no_finalist_says_what_was_best(monkeypatch):
    trials = [trial("calor", 0.3), trial("bido", 0.2)]
    low = {("calor", 0): 0.94, ("bido", 0): 0.9}
    with pytest.raises(RunError, match=r"of everybody reaches .* 95.0%: the best is calor .*94.0%"):
        qualify(trials, monkeypatch, low)


def test_no_accurate_trial_says_what_was_best(monkeypatch):
    trials = [trial("calor", None, 0.8), trial("bido", None, 0.93)]
    with pytest.raises(RunError, match=r"95.0% in 2 trials: the best is bido \(.* with 93.0%"):
        qualify(trials, monkeypatch, {})
    with pytest.raises(RunError, match="there was no time for a trial"):
        qualify([], monkeypatch, {})


# The final table


def test_the_attacks_of_a_final_table():
    exp = experiment(attack={"name": "gmi", "steps": 30, "candidates": 4, "keep": 2, "pool": 50})
    cases = {case["case"]: case for case in model_cases(exp, ["calor", "mid"])}
    assert list(cases) == [
        "GMI",
        "MIRROR",
        "GMI, margin",
        "GMI, aimed",
        "GMI, straight",
        "GMI, noise",
    ]
    mirror = cases["MIRROR"]
    assert mirror["prior"]["weights"] == "styles32"
    assert {name: mirror["attack"][name] for name in ("steps", "candidates", "keep")} == {
        "steps": 30, "candidates": 4, "keep": 2,
    }  # fmt: skip
    assert cases["GMI, straight"]["attack"]["straight_through"] is True
    assert cases["GMI, noise"]["attack"]["pool"] == 50
    assert "prior" not in cases["GMI, noise"]


def test_an_attack_is_not_run_twice_under_two_names():
    exp = experiment(attack={"name": "gmi", "variant": "margin"})
    names = [case["case"] for case in model_cases(exp, ["calor", "label_smoothing"])]
    assert names == ["GMI", "MIRROR", "GMI, aimed", "GMI, straight", "GMI, poincare"]


def test_an_attack_without_gradients_leaves_the_variants_to_mirror():
    exp = experiment(attack={"name": "brepmi"}, prior={"name": "wgan"})
    cases = model_cases(exp, ["calor"])
    assert [case["case"] for case in cases] == [
        "BREP-MI", "MIRROR", "MIRROR, margin", "MIRROR, aimed", "MIRROR, straight",
    ]  # fmt: skip
    assert not any("prior" in case for case in cases)


def test_an_attacker_who_knows_decoys_subtracts_students_and_lists_people():
    exp = experiment(attack={"name": "gmi", "steps": 30, "candidates": 4, "keep": 2, "pool": 50})
    cases = {case["case"]: case for case in model_cases(exp, ["decoys"])}
    assert list(cases) == [
        "GMI", "MIRROR", "GMI, subtract", "Modes of GMI", "Members of GMI", "Repel of GMI",
        "Unlearn of GMI",
    ]  # fmt: skip
    prior = cases["GMI, subtract"]["prior"]
    assert prior["name"] == "students"
    assert prior["base"]["name"] == exp.prior.name
    assert prior["draws"] > 0
    modes = cases["Modes of GMI"]["attack"]
    assert modes["keep"] == 4
    assert modes["base"]["steps"] == 30
    assert "candidates" not in modes["base"]


def adaptive(attack, name):
    exp = experiment(attack=attack)
    return {case["case"]: case for case in model_cases(exp, [name])[1:] if case["case"] != "MIRROR"}


def test_attackers_who_know_the_newer_defenses():
    gmi = {"name": "gmi", "steps": 30, "candidates": 4, "keep": 2, "pool": 50}
    (students,) = adaptive(gmi, "trap_mid").items()
    assert students[0] == "GMI, students"
    assert students[1]["attack"]["alone"] is True
    assert students[1]["prior"]["name"] == "students"
    (erased,) = adaptive(gmi, "midre").items()
    assert erased[0] == "GMI, erased"
    assert erased[1]["attack"]["erase"] == 0.4
    # SSD changes nothing for an attacker with the weights; one with scores asks several times.
    assert not adaptive(gmi, "ssd")
    smile = {"name": "smile", "max_queries": 64}
    (repeated,) = adaptive(smile, "ssd").items()
    assert repeated[0] == "SMILE, repeated"
    assert (repeated[1]["attack"]["samples"], repeated[1]["attack"]["max_queries"]) == (8, 64)


@pytest.mark.parametrize("configured", ["students", "erased", "subtract"])
def test_a_variant_for_one_defense_has_nothing_of_another(configured):
    """Else a search by students alone would be one that averages the target's noise."""
    gmi = {"name": "gmi", "steps": 30, "candidates": 4, "keep": 2, "pool": 50}
    for name in ("mid", "calor", "trap_mid", "midre", "decoys"):
        for title, case in adaptive({**gmi, "variant": configured}, name).items():
            attack, variant = case["attack"], title.removeprefix("GMI, ")
            if attack["name"] == "gmi":
                assert attack.get("alone", False) == (variant == "students")
                assert bool(attack.get("erase")) == (variant == "erased")
                assert bool(attack.get("subtract")) == (variant == "subtract")


def test_an_attack_without_a_variant_leaves_it_to_mirror():
    cases = adaptive({"name": "kedmi", "steps": 30}, "decoys")
    assert "MIRROR, subtract" in cases
    assert cases["MIRROR, subtract"]["prior"]["name"] == "students"
    assert cases["MIRROR, subtract"]["prior"]["base"]["weights"] == "styles32"


@pytest.mark.parametrize(
    "tables",
    [[], [{"attack": {"name": "gmi"}}], [{"case": "GMI"}], [{"case": "x", "attack": {}, "y": 1}]],
)
def test_attacks_that_cannot_be_read(tables):
    with pytest.raises(ConfigError, match=r"^attacks"):
        given_cases(tables, "prior")


@pytest.mark.parametrize("population", final.POPULATIONS)
def test_a_final_grid_is_a_config(population):
    settings = {"prior": {"name": "pretrained"}, "data": MANY, "seed": 5, "attack": {"name": "gmi"}}
    exp = Experiment.parse(settings)
    tables = [[{"name": "calor", "rank": 3}], [{"name": "calor", "rank": 3}, {"name": "bido"}]]
    cases = model_cases(exp, ["calor", "midre", "trap_mid", "decoys"])
    for given in (cases, [case | {"prior": {"name": "wgan"}} for case in cases[:4]]):
        (values,) = final_settings(settings, exp, population, tables, given, 2)
        chosen = experiments(values)
        assert len(chosen) == 3 * len(given) * 2
        assert {each.seed for _, each in chosen} == {5, 6}
        assert chosen[0][0] == "undefended, GMI, seed=5"
        assert {each.data.counts()[0] for _, each in chosen} == {8 if "every" in population else 4}
    assert not {each.seed for _, each in chosen} & {tuning_experiment(exp).seed}


def model(title, accuracy, leak):
    share = Share(leak, max(0.0, leak - 0.1), min(1.0, leak + 0.1))
    shares = {"verified, prior only": Share(0.0, 0.0, 0.05)}
    row = SeedRow("model", "GMI", (0,), 8, shares, ())
    return Model(title, [], Share(accuracy, accuracy, accuracy), share, share, "GMI", {"GMI": row})


def test_dominated_defenses_are_named_with_what_beats_them():
    models = [
        model("undefended", 0.98, 0.9),
        model("calor", 0.97, 0.6),
        model("bido", 0.96, 0.7),
        model("mid", 0.97, 0.6),
        model("transfer", 0.97, 0.95),
        model("decoys", 0.95, 0.1),
    ]
    assert dominated(models) == {"bido": "calor", "transfer": "calor"}


def test_the_undefended_model_can_beat_a_defense():
    models = [model("undefended", 0.98, 0.5), model("bido", 0.97, 0.5)]
    assert dominated(models) == {"bido": "undefended"}
    assert dominated([model("undefended", 0.9, 0.9), model("bido", 0.97, 0.5)]) == {}


@pytest.mark.parametrize(
    ("leaks", "remarks"),
    [
        ({"undefended": 0.9, "calor": 0.3}, []),
        ({"undefended": 0.9, "calor": 0.8}, ["No clear gain: of second half, calor leaks 80.0%"]),
        (
            {"undefended": 0.9, "calor": 0.85, "bido": 0.2},
            ["In the final table bido is at least as accurate", "No clear gain: of second half"],
        ),
    ],
)
def test_what_speaks_against_a_recommendation_is_said(leaks, remarks):
    models = [model(title, 0.97, leak) for title, leak in leaks.items()]
    found = SimpleNamespace(
        final=SimpleNamespace(models={"second half": models, "everybody": models}),
        chosen=[SimpleNamespace(title="calor")],
        goal=ModelGoal(0.9),
    )
    text = _remark(found, dominated(models))
    assert all(remark in text for remark in remarks)
    assert bool(text) is bool(remarks)


def test_the_frontier_is_a_drawing_of_its_own():
    from xml.etree import ElementTree

    text = frontier(
        [model("undefended", 0.98, 0.9), model("a < b", 0.96, 0.2)], "everybody", ModelGoal(0.9)
    )
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    marks = [each for each in root.iter() if each.get("class", "").startswith("point")]
    assert len(marks) == 2
    assert "verified 20.0% (10.0% to 30.0%)" in text


def audits(**reasons):
    """A run whose audits are vacuous for these reasons, by case."""
    made = [
        SimpleNamespace(
            experiment=SimpleNamespace(case=case), controls=SimpleNamespace(vacuous=reason)
        )
        for case, each in reasons.items()
        for reason in each
    ]
    return SimpleNamespace(audits=made, labels=[each.experiment.case for each in made])


def test_a_table_needs_one_attack_that_works_with_every_seed():
    goal = ModelGoal(0.9)
    assert final._unsound([audits(gmi=["", ""], mirror=["weak", ""])], goal) == []
    unsound = audits(gmi=["", "weak"], mirror=["weak", ""])
    assert final._unsound([unsound], goal) == ["gmi: weak"]
    # Seeds may be runs of their own.
    apart = [audits(gmi=[""], mirror=["weak"]), audits(gmi=["weak"], mirror=[""])]
    assert final._unsound(apart, goal) == ["mirror: weak"]
    assert final._unsound([apart[0], audits(gmi=[""], mirror=[""])], goal) == []
