"""The command `robustness` at toy scale: what is printed, written, shared and refused."""

import csv
import json
from dataclasses import replace

import pytest

from commands import FACES, changed, enter, error_of, frostglass
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import expose, split_of
from frostglass.robustness import Badnets, Fgsm, measure_experiment
from frostglass.store.store import Store

SMALL = f"""
name = "toy"
threats = [{{ name = "fgsm" }}, {{ name = "badnets", rate = 0.1 }}]
{FACES}
[target]
epochs = 2
batch = 16
lr = 1e-2
options = {{ width = 4 }}
[grid]
seed = [0, 1]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def test_models_are_measured_written_and_kept(here):
    result = frostglass("robustness", "small.toml", "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    (model,) = facts["models"]
    assert model["title"] == "undefended"
    assert model["seeds"] == [0, 1]
    names = ["accuracy", "FGSM", "BadNets", "BadNets, not poisoned"]
    assert list(model["rates"]) == [*names, "BadNets, accuracy when poisoned"]
    for rate in model["rates"].values():
        assert 0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1
        assert len(rate["by_seed"]) == 2
    folder = here / "runs" / "toy-robustness"
    assert json.loads((folder / "robustness.json").read_text()) == {
        name: value for name, value in facts.items() if name != "folder"
    }
    rows = list(csv.DictReader((folder / "robustness.csv").read_text().splitlines()))
    for name, rate in model["rates"].items():
        mine = [row for row in rows if row["measurement"] == name]
        hits, tried = (sum(int(row[word]) for row in mine) for word in ("succeeded", "tried"))
        assert rate["images"] == tried
        assert rate["value"] == pytest.approx(hits / tried)
    # Again, as a table: nothing is computed a second time.
    again = frostglass("robustness", "small.toml")
    assert again.code == 0, again.err
    assert again.progress == []
    assert "BadNets, not poisoned" in again.out
    assert "toy: 2 seeds" in again.out
    # An audit of the same settings exposes the clean model that was trained here.
    settings = {name: value for name, value in facts["settings"].items() if name != "grid"}
    exp, store = Experiment.parse(settings), Store(here / ".frostglass")
    kept = sorted((here / ".frostglass" / "target").iterdir())
    assert len(kept) == 4  # two seeds, clean and poisoned
    expose(exp, store, split_of(exp, store), None)
    assert sorted((here / ".frostglass" / "target").iterdir()) == kept
    # From Python, with methods as objects: the same numbers.
    same = replace(exp, threats=(Fgsm(), Badnets(rate=0.1)))
    table = measure_experiment(same, store)
    assert {name: rate.value for name, rate in table.rates.items()} == pytest.approx(
        {name: rate["by_seed"][0] for name, rate in model["rates"].items()}
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("threats.0.epsilon=8", "threats[0].epsilon: expected at most 1, got 8"),
        ("threats.0.epsilon=0", "threats[0].epsilon: expected more than 0, got 0"),
        (
            "threats.1.size=16",
            "threats[1].size: expected a trigger within the image",
        ),
        ("threats.1.rate=0", "threats[1].rate: expected more than 0, got 0"),
        ("threats.1.rate=1", "threats[1].rate: expected less than 1, got 1"),
        ("threats.1.rate=0.001", "threats[1].rate: expected to poison 1 to 17 of 22 training"),
        ("threats.1.target_class=4", "threats[1].target_class: expected the number of a class, 0"),
        ('threats.0.name="fgms"', "threats[0].name: no threat named 'fgms': did you mean 'fgsm'?"),
        ("threats=[]", "threats: at least one is needed"),
        ('threats=[{name="pgd"},{name="pgd"}]', "threats: PGD (defaults) is given twice: remove"),
        ('target.weights="none.pt"', "threats[1]: backdoors poison training, and target.weights"),
        ('target.attributes=["all"]', "target: robustness is measured on classifiers of people"),
        ('defenses=[{name="calor",rank=99}]', "target: calor.rank must be at most 4"),
    ],
)
def test_bad_input_is_one_line_before_any_work(setting, message, here):
    error = error_of(frostglass("robustness", "small.toml", *changed(setting)))
    assert error.startswith(message), error
    assert not (here / "runs").exists()


def test_a_folder_of_something_else(here):
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("x")
    error = error_of(frostglass("robustness", "small.toml", "--out", "mine"))
    assert error.startswith("--out mine contains files of something else, such as notes.txt")


def test_each_method_is_explained():
    for name in ("fgsm", "bim", "pgd", "one_pixel", "badnets", "blended"):
        shown = frostglass("show", name)
        assert shown.code == 0
        assert f"{name} (threat, frostglass.robustness.methods.{name})" in shown.out
        assert "Paper: " in shown.out
        assert "target_class" in shown.out
