"""Logs of values: they get the epochs and the scores, and change no bit of a result."""

import sys
import tomllib

import pytest

from commands import TOY, error_of, frostglass
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import write_run
from frostglass.core.errors import ConfigError
from frostglass.core.value_log import KINDS, ValueLog, open_log
from frostglass.store.store import Store


class Kept(ValueLog):
    def __init__(self):
        self.values = []

    def record(self, what, step, values):
        self.values.append((what, step, dict(values)))

    def close(self):
        pass


def test_results_are_the_same_with_a_log(tmp_path):
    """All files of a run and of the store are compared byte by byte."""
    contents, log = [], Kept()
    for name, used in (("plain", None), ("logged", log)):
        store = Store(tmp_path / name)
        store.log = used
        write_run(
            run_all(tomllib.loads(TOY.replace("width = 4", "width = 8")), store),
            tmp_path / f"{name} run",
        )
        files = [*sorted(store.root.rglob("*.safetensors")), tmp_path / f"{name} run" / "rows.csv"]
        contents.append([file.read_bytes() for file in files])
    assert len(contents[0]) > 5
    assert contents[0] == contents[1]
    epochs = [step for what, step, _ in log.values if what.startswith("target ")]
    assert epochs.count(1) == 3  # the target and two evaluators, each from its first epoch
    (audit,) = [values for what, _, values in log.values if what.startswith("audit ")]
    assert {"target_top1", "prior-only target_top1", "accuracy test"} <= set(audit)
    assert all(
        "validation_accuracy" in values for what, _, values in log.values if "audit" not in what
    )


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("mlflow", "mlflow.tracking"),
        ("wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named(kind, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    config = tmp_path / "toy.toml"
    config.write_text(TOY)
    out = tmp_path / "run"
    line = error_of(
        frostglass(
            "run", config, "--log", f"{kind}:{tmp_path}", "--store", tmp_path / "s", "--out", out
        )
    )
    assert f"the package {kind} is not installed" in line
    assert not out.exists()


def test_a_log_that_is_none(monkeypatch):
    monkeypatch.delenv("FROSTGLASS_LOG", raising=False)
    assert open_log(None, "run") is None
    monkeypatch.setenv("FROSTGLASS_LOG", "paper")
    with pytest.raises(
        ConfigError, match=r"--log: expected tensorboard:PLACE, mlflow:PLACE, wandb"
    ):
        open_log(None, "run")


@pytest.mark.parametrize("kind", KINDS)
def test_logs_of_installed_packages(kind, tmp_path, monkeypatch):
    pytest.importorskip(kind)
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = open_log(f"{kind}:{tmp_path}", "run")
    for step in (1, 2):
        log.record("target abc", step, {"verified_0@1%": 0.5, "cross_entropy": 0.1})
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 100
