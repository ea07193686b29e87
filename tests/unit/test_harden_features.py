"""Hardening of features that leave a device: what is useful, what leaks, what is in the table."""

import json
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from feature_folders import make_feature_run
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.core.errors import ConfigError, RunError
from frostglass.defenses import Crafter
from frostglass.hardening import final, harden, tuning
from frostglass.hardening import goal as goals
from frostglass.hardening.cases import feature_cases, given_cases
from frostglass.hardening.final import Finalist, final_settings
from frostglass.hardening.goal import FeatureGoal, ModelGoal, goal_of
from frostglass.hardening.harden import plan_hardening
from frostglass.hardening.output import Findings, write_results
from frostglass.hardening.space import Tunable, built, candidates
from frostglass.hardening.study import Outcome, Trial
from frostglass.hardening.tuning import Tuner, tuning_experiment
from frostglass.metrics.base import Rows, Score
from run_folders import edit_run

SETTINGS = {
    "data": {
        "name": "faces",
        "identities": 8,
        "images": 6,
        "public_identities": 20,
        "public_images": 3,
    },
    "target": {"cut": "stage1", "attributes": ["all"]},
    "prior": {"name": "pretrained"},
    "seed": 5,
}
SPLIT = Tunable("features", 4)


def experiment(**values):
    return Experiment.parse({**SETTINGS, **values})


# What is asked for


@pytest.mark.parametrize(
    ("accuracy", "utility", "measure", "message"),
    [
        (None, None, "mcc", r"expected accuracy .* or utility .*, got neither"),
        (0.9, 0.8, "mcc", r"expected accuracy .* or utility .*, got both"),
        (None, 1.2, "mcc", "utility: expected a mean MCC between 0 and 1, got 1.2"),
        (None, float("nan"), "auc", "utility: expected a mean AUC between 0 and 1, got nan"),
        (None, 0.8, "f1", "measure: expected mcc or auc, got 'f1'"),
    ],
)
def test_goals_that_cannot_be_read(accuracy, utility, measure, message):
    with pytest.raises(ConfigError, match=message):
        goal_of(accuracy, utility, measure)


def test_each_goal_has_its_surface():
    split, whole = experiment(), Experiment.parse({"data": SETTINGS["data"]})
    goal_of(0.9, None, "mcc").check(whole)
    goal_of(None, 0.8, "auc").check(split)
    with pytest.raises(ConfigError, match=r"^target.cut: hardening tunes defenses of whole models"):
        ModelGoal(0.9).check(split)
    with pytest.raises(ConfigError, match=r"^target.cut: required to tune protections of features"):
        FeatureGoal(0.8).check(whole)


def test_defenses_of_a_config_are_those_to_tune_unless_others_are_named(monkeypatch):
    monkeypatch.setattr(harden, "problems", lambda planned: [])  # which build every network
    wide = {"name": "adv_learn", "decoder_width": 8, "head_start": 0}
    settings = {**SETTINGS, "defenses": [wide, Crafter(steps=3)]}  # a table or an object
    goal = FeatureGoal(0.8)
    plan = plan_hardening(settings, goal, seeds=1)
    assert [each.title for each in plan.candidates] == [
        "adv_learn", "crafter", "adv_learn + crafter",
    ]  # fmt: skip
    assert plan.candidates[0].tables({"adv_learn.pixel": 2.0}) == [{**wide, "pixel": 2.0}]
    assert built(plan.candidates[1].tables({"crafter.beta": 2.0})) == (Crafter(steps=3, beta=2.0),)
    assert plan.exp.defenses == ()  # the undefended model is that of the config
    (only,) = plan_hardening(settings, goal, defenses=["adv_learn"], seeds=1).candidates
    assert only.bases == (wide,)
    plain = plan_hardening(SETTINGS, goal, defenses=["adv_learn"], seeds=1)
    known = plan_hardening(settings, goal, defenses=["adv_learn"], seeds=1)
    assert known.study_settings() != plain.study_settings()  # another study


# What a trial is made with


def test_a_pair_that_does_not_fit_the_network_is_left_out():
    """Disco prunes what a server still computes from, and behind the head nothing comes."""
    small = {"attack": {"name": "decoder", "epochs": 1, "width": 4}, "judging": {"images": 1}}
    settings = {**SETTINGS, **small}
    plan = plan_hardening(settings, FeatureGoal(0.5), defenses=["disco", "later_cut"], seeds=1)
    assert [each.title for each in plan.candidates] == ["disco", "later_cut"]
    assert "nothing comes after head" in plan.left_out["disco + later_cut"]


def test_tuning_trains_an_embedder_of_its_own():
    exp = experiment()
    exp = replace(exp, embedder=replace(exp.embedder, weights="a.safetensors", classes=("x", "y")))
    tuned = tuning_experiment(exp)
    assert (tuned.embedder.weights, tuned.embedder.classes) == (None, ())
    assert exp.embedder.weights


class Calls:
    """Stands for the pipeline: utilities of released features, and an audit of them."""

    def __init__(self, mcc=0.9, auc=0.6, lift=0.5, vacuous=""):
        self.utility = {"mean_mcc": mcc, "mean_auc": auc}
        self.attacked = 0
        columns = {
            "verified_1": torch.ones(2, 2),
            "verified_2": torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
            "similarity": torch.full((2, 2), 0.4),
        }
        lifts = tuple(
            Score(name, value, value, value, torch.zeros(2))
            for name, value in (("verified_1", 0.0), ("verified_2", lift), ("similarity", 0.9))
        )
        self.result = SimpleNamespace(
            controls=SimpleNamespace(
                vacuous=vacuous, deciding="similarity", control_lift=lifts, margin=0.1
            ),
            rows=Rows(labels=torch.arange(2), columns=columns),
            verified="verified_2",
        )

    def audit(self, exp, store):
        self.attacked += 1
        return self.result


def tuner(calls, monkeypatch, measure="mcc"):
    monkeypatch.setattr(goals, "exposed", lambda exp, store: goals.FeatureExposure(*[None] * 5))
    monkeypatch.setattr(goals, "released_facts", lambda exposure: {"utility": calls.utility})
    monkeypatch.setattr(tuning, "audit", calls.audit)
    monkeypatch.setattr(tuning, "problems", lambda chosen: [])
    return Tuner(experiment(), SimpleNamespace(executor=None), FeatureGoal(0.8, measure))


def tuned(*args):
    (candidate,) = candidates(["adv_learn"], SPLIT)
    return tuner(*args)(candidate, {"adv_learn.pixel": 4.0})


def test_a_trial_counts_the_images_that_the_deciding_evaluator_verifies(monkeypatch):
    outcome = tuned(Calls(), monkeypatch)
    assert (outcome.utility, outcome.leak, outcome.reason) == (0.9, 0.25, "")
    assert outcome.similarity == pytest.approx(0.4)


def test_features_that_miss_the_utility_are_not_attacked(monkeypatch):
    calls = Calls(mcc=0.9, auc=0.6)
    assert tuned(calls, monkeypatch, "auc") == Outcome(0.6, reason="misses the utility")
    assert calls.attacked == 0


def test_nothing_is_tuned_by_an_evaluator_that_does_not_see_the_leak(monkeypatch):
    calls = Calls(lift=0.09)
    with pytest.raises(RunError, match=r"nothing can be tuned: evaluator 2 .* 0.09 more often"):
        tuner(calls, monkeypatch).undefended()
    assert tuned(calls, monkeypatch).leak is None


def test_vacuous_features_have_no_leak(monkeypatch):
    outcome = tuned(Calls(vacuous="it stopped early"), monkeypatch)
    assert outcome == Outcome(0.9, reason="vacuous: it stopped early")


# The final table


def test_the_attacks_on_features():
    exp = experiment(attack={"name": "decoder", "epochs": 12, "width": 16})
    cases = {case["case"]: case["attack"] for case in feature_cases(exp, ["adv_learn"])}
    assert list(cases) == ["decoder", "hybrid", "latent"]
    assert cases["hybrid"]["starter"] == {"epochs": 12, "width": 16}
    cases = {case["case"]: case["attack"] for case in feature_cases(exp, ["adv_learn", "crafter"])}
    assert list(cases) == ["decoder", "hybrid", "latent", "decoder, A1", "decoder, A3"]
    assert cases["decoder, A1"]["adapt"] == 64
    assert cases["decoder, A3"]["averaged"] == 2
    assert {attack["epochs"] for attack in cases.values() if attack["name"] == "decoder"} == {12}
    without = replace(exp, prior=None)
    assert [case["case"] for case in feature_cases(without, ["adv_learn"])] == ["decoder", "hybrid"]


def test_attacks_on_features_that_know_a_protection():
    exp = experiment(attack={"name": "decoder", "epochs": 12, "unit_channels": True})
    cases = {case["case"]: case["attack"] for case in feature_cases(exp, ["disco"])}
    plain = ["decoder", "hybrid", "latent"]
    assert [*cases] == ["decoder, channels", *plain, "hybrid, channels", "latent, channels"]
    assert (cases["decoder"]["epochs"], cases["decoder"]["unit_channels"]) == (12, False)
    assert cases["hybrid"]["starter"] == {"epochs": 12}
    assert cases["hybrid, channels"]["starter"] == {"epochs": 12, "unit_channels": True}
    assert cases["hybrid, channels"]["gap"] == cases["latent, channels"]["gap"] == "channels"
    assert cases["latent, channels"]["pool"] == cases["latent"]["pool"]


def test_the_attack_of_the_config_comes_first_and_stays():
    exp = experiment(attack={"name": "decoder", "adapt": 32, "epochs": 3})
    first, plain, *rest = feature_cases(exp, ["crafter"])
    assert (first["case"], first["attack"]["adapt"]) == ("decoder, A1", 32)
    assert (plain["case"], plain["attack"]["adapt"], plain["attack"]["epochs"]) == ("decoder", 0, 3)
    assert [case["case"] for case in rest] == ["hybrid", "latent", "decoder, A3"]
    latent = feature_cases(experiment(attack={"name": "latent"}), ["crafter"])
    assert [case["case"] for case in latent][:2] == ["latent", "decoder"]


def test_a_case_may_bring_the_prior_of_the_attacker():
    case = {"case": "A2", "attack": {"name": "latent"}, "attacker_prior": {"name": "wgan"}}
    assert given_cases([case], FeatureGoal(0.8).prior) == [case]
    with pytest.raises(ConfigError, match=r"^attacks\[0\]: .* perhaps with prior; got case, "):
        given_cases([case], ModelGoal(0.8).prior)


@pytest.mark.parametrize("population", final.POPULATIONS)
def test_each_seed_of_a_final_table_is_a_config(population):
    exp = experiment()
    tables = [[{"name": "adv_learn", "pixel": 3.0}], [{"name": "adv_learn"}, {"name": "crafter"}]]
    cases = feature_cases(exp, ["adv_learn", "crafter"])
    configs = final_settings(SETTINGS, exp, population, tables, cases, 2)
    assert [values["seed"] for values in configs] == [5, 6]
    assert len({values["name"] for values in configs}) == 1  # or tables would not join them
    for values in configs:
        chosen = experiments(values)
        assert len(chosen) == 3 * len(cases)
        assert {each.data.counts()[0] for _, each in chosen} == {8 if "every" in population else 4}


def finalist(name):
    (candidate,) = candidates([name], SPLIT)
    return Finalist(Trial(candidate, 0, candidate.first(), 1.0, Outcome(0.8, 0.1)), 0.8)


def write_seed(folder, seed):
    """Write the run of one seed: decoder and hybrid verify equally many images."""
    audits = [
        {
            "label": f"{name}, {case}",
            "defenses": [{"name": each} for each in protections],
            "similarity": similarity,
            "hits": hits,
            "mcc": 0.7 + seed / 10,
            "auc": 0.9,
        }
        for name, protections, hits in (("undefended", [], 8), ("crafter", ["crafter"], 2))
        for case, similarity in (("decoder", 0.5), ("hybrid", 0.6))
    ]
    settings = {"name": folder.name.partition("-seed-")[0], "seed": seed}
    make_feature_run(folder, audits, settings=settings)
    document = json.loads((folder / "run.json").read_text())
    for facts in document["audits"]:
        facts["seed"] = seed
    edit_run(folder, document)
    return folder


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A final table of two seeds; run folders stand for the audits."""

    def run_all(values, store):
        return SimpleNamespace(seed=values["seed"], labels=(), audits=(), failed=("x: no",))

    monkeypatch.setattr(final, "run_all", run_all)
    monkeypatch.setattr(final, "write_run", lambda result, folder: write_seed(folder, result.seed))
    settings = {each: [{"seed": 0}, {"seed": 1}] for each in final.POPULATIONS}
    return final.measure_final(settings, [finalist("crafter")], None, tmp_path, FeatureGoal(0.5))


def test_the_files_of_features(table, tmp_path):
    for plain, crafted in table.models.values():
        # Seeds are joined, and similarity tells which of two attacks is the stronger.
        assert (plain.title, crafted.title) == ("undefended", "crafter")
        assert str(crafted.utility) == "0.75 (0.70 to 0.80)"
        assert crafted.leak.value == pytest.approx(2 / 16)
        assert (crafted.attack, str(crafted.widest)[:4]) == ("hybrid", "0.60")
        assert crafted.rows["decoder"].seeds == (0, 1)
    assert table.failed[:2] == ("second half, seed 0: x: no", "second half, seed 1: x: no")
    delivered = []

    def deliver(folder):
        delivered.append(folder)
        info = {"model": "cnn"}
        return SimpleNamespace(image_shape=(3, 8, 8), classes=("a", "b"), cut="stage1", info=info)

    found = Findings(
        name="split",
        goal=FeatureGoal(0.5),
        seeds=2,
        chosen=[finalist("crafter")],
        trials=[finalist("crafter").trial],
        final=table,
        baseline=Outcome(0.9, 0.5, 0.4, 0.6, 0.8),
        left_out={},
        deliver=deliver,
    )
    facts = write_results(tmp_path, found, redact=False)
    assert delivered == [tmp_path / "model"]
    assert json.loads((tmp_path / "result.json").read_text()) == facts
    assert (facts["utility"], facts["measure"]) == (0.5, "mcc")
    assert facts["undefended_in_tuning"]["similarity"] == 0.8
    crafted = facts["final"]["everybody"][1]
    assert crafted["verified"]["value"] == pytest.approx(2 / 16)
    assert crafted["utility"] == pytest.approx({"value": 0.75, "low": 0.7, "high": 0.8})
    header, trial = (tmp_path / "trials.csv").read_text().splitlines()
    assert header == "candidate,number,settings,utility,leak,low,high,reason"
    assert trial.startswith("crafter,0,crafter (beta 2.0),0.8,0.1,")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "# split, protected with crafter" in card
    assert "at an MCC of at least 0.500" in card
    assert "| 0.75 (0.70 to 0.80) | 12.5% (" in card
    assert "| MCC | AUC | similarity | verified |" in (tmp_path / "table.md").read_text()
    for name in ("frontier-second-half.svg", "frontier-everybody.svg"):
        drawing = (tmp_path / name).read_text()
        ElementTree.fromstring(drawing)
        assert "MCC and verified leak of 2 models" in drawing
        assert "utility for the server (mean MCC)" in drawing
