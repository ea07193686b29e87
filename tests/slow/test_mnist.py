"""GMI on real MNIST: digits 0 to 4 private, 5 to 9 public."""

from pathlib import Path

import pytest

from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import experiments
from frostglass.auditing.pipeline import audit
from frostglass.auditing.run import run_all
from frostglass.store.store import Store

ROOT = Path(__file__).parents[2]
MNIST = ROOT.parent / "shared" / "data" / "mnist"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs MNIST's idx files in {MNIST.name}/"),
]


def values(rows, names):
    return {name: round(rows.score(name).value, 3) for name in names}


def test_the_shipped_config_runs_and_its_evaluators_are_good(tmp_path, capsys):
    settings = read_config(ROOT / "configs" / "mnist" / "gmi.toml", [f"data.root={MNIST}"])
    result = audit(experiments(settings)[0][1], Store(tmp_path / "store"))
    accuracy = result.target.info["accuracy"]
    baseline = values(result.trial.baseline_rows, ("top1_1", "top1_2"))
    with capsys.disabled():
        print("\nmnist:", values(result.rows, result.rows.columns), "prior-only:", baseline)
        print("target:", accuracy, result.controls.vacuous)
    assert accuracy["test"] > 0.97
    assert all(evaluator.info["accuracy"]["test"] > 0.97 for evaluator in result.evaluators)
    assert result.rows.score("target_top1").value > 0.9  # the attack optimises


def test_every_defense_trains_on_the_papers_networks(tmp_path, capsys):
    settings = read_config(ROOT / "configs" / "mnist" / "defenses.toml", [f"data.root={MNIST}"])
    run = run_all(settings, Store(tmp_path / "store"))
    accuracy = [each.target.info["accuracy"]["test"] for each in run.audits]
    with capsys.disabled():
        for label, each, share in zip(run.labels, run.audits, accuracy, strict=True):
            scores = values(each.rows, ("top1_1", "top1_2", "target_top1"))
            print(f"\n{label}: accuracy {share:.3f}, {scores}, {each.controls.vacuous}")
    undefended = run.audits[0]
    assert accuracy[0] > 0.97
    assert min(accuracy) > 0.5  # chance is 0.2
    assert all(evaluator.info["accuracy"]["test"] > 0.97 for evaluator in undefended.evaluators)
    # The attack works on the undefended model.
    assert min(score.value for score in undefended.controls.lift) > 0.4
