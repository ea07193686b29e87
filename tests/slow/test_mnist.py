"""GMI on real MNIST: digits 0 to 4 private, 5 to 9 public."""

from pathlib import Path

import pytest

from frostglass.audit.config import experiments, read_config
from frostglass.audit.grid import run_all
from frostglass.audit.pipeline import run
from frostglass.store.store import Store

ROOT = Path(__file__).parents[2]
MNIST = ROOT.parent / "shared" / "data" / "mnist"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs MNIST's idx files in {MNIST.name}/"),
]


def test_the_shipped_config_runs_and_its_judges_are_good(tmp_path, capsys):
    settings = read_config(ROOT / "configs" / "mnist" / "gmi.toml", [f"data.root={MNIST}"])
    audit = run(experiments(settings)[0][1], Store(tmp_path / "store"))
    with capsys.disabled():
        scores = {name: round(audit.rows.score(name).value, 3) for name in audit.rows.columns}
        blind = {
            name: round(audit.prior_rows.score(name).value, 3) for name in ("top1_1", "top1_2")
        }
        print(
            "\nmnist:",
            scores,
            "prior only:",
            blind,
            "target:",
            audit.target.info["accuracy"],
            audit.controls.vacuous,
        )
    assert audit.target.info["accuracy"]["test"] > 0.97
    assert all(evaluator.info["accuracy"]["test"] > 0.97 for evaluator in audit.evaluators)
    assert audit.rows.score("target_top1").value > 0.9  # the attack optimises


def test_every_defense_trains_on_the_papers_networks(tmp_path, capsys):
    settings = read_config(ROOT / "configs" / "mnist" / "defenses.toml", [f"data.root={MNIST}"])
    done = run_all(settings, Store(tmp_path / "store"))
    with capsys.disabled():
        for label, audit in zip(done.labels, done.audits, strict=True):
            scores = {
                name: round(audit.rows.score(name).value, 3)
                for name in ("top1_1", "top1_2", "target_top1")
            }
            print(
                f"\n{label}: accuracy {audit.target.info['accuracy']['test']:.3f}, {scores}, {audit.controls.vacuous}"
            )
    undefended = done.audits[0]
    assert undefended.target.info["accuracy"]["test"] > 0.97
    assert all(evaluator.info["accuracy"]["test"] > 0.97 for evaluator in undefended.evaluators)
    assert (
        min(score.value for score in undefended.controls.lift) > 0.4
    )  # the attack works where nothing defends
    assert [audit.target.info["accuracy"]["test"] > 0.5 for audit in done.audits] == [True] * len(
        done.audits
    )  # guessing gives 0.2
