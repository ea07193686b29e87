"""Logs of values: they get the epochs and the scores, and change no bit of a result."""

import socket
import sys
import tomllib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from commands import TOY, error_of, frostglass
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import write_run
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.value_log import KINDS, ValueLog, open_log
from frostglass.store.store import Store

# With the package itself, so that an installed one is not imported halfway.
MLFLOW = ("mlflow", "mlflow.exceptions", "mlflow.tracking")


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
        ("mlflow", "mlflow"),
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
def test_a_place_that_is_no_folder(kind, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for module in ("torch.utils.tensorboard", *MLFLOW, "wandb"):
        monkeypatch.setitem(sys.modules, module, MagicMock())
    with pytest.raises(ConfigError, match=f"--log {kind}: expected a folder .*give another place"):
        open_log(f"{kind}:{file}", "run")


def test_an_mlflow_that_cannot_be_used(tmp_path, monkeypatch):
    """A server that is lost or never answers, and mlflow-skinny, which lacks the database."""

    class Refused(Exception):
        pass

    tracking = MagicMock()
    modules = (MagicMock(), SimpleNamespace(MlflowException=Refused), tracking)
    for name, module in zip(MLFLOW, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    log = open_log("mlflow:http://there", "run")
    tracking.MlflowClient().log_metric.side_effect = Refused("gone")
    with pytest.raises(RunError, match=r"values were lost \(gone\): run the same command again"):
        log.record("target abc", 1, {"cross_entropy": 0.25})
    tracking.MlflowClient.side_effect = Refused("no\nanswer")
    with pytest.raises(ConfigError, match=r"mlflow: cannot use http://there \(no answer\)"):
        open_log("mlflow:http://there", "run")
    tracking.MlflowClient.side_effect = ImportError("No module named 'sqlalchemy'")
    with pytest.raises(ConfigError, match=r"mlflow is not installed \(No module named 'sqlalch"):
        open_log(f"mlflow:{tmp_path}", "run")


def test_wandb_gets_numbers_only(tmp_path, monkeypatch):
    """W&B would also keep the console, the arguments, the host and the git remote."""
    wandb = MagicMock(Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    open_log(f"wandb:{tmp_path}", "run")
    options = wandb.init.call_args.kwargs
    assert options["mode"] == "offline"
    assert options["settings"]["console"] == "off"
    assert options["settings"]["host"] == ""
    for key in ("disable_code", "disable_git", "x_disable_meta", "x_disable_stats"):
        assert options["settings"][key] is True


VALUES = {1: {"verified_0@1%": 0.5, "cross_entropy": 0.25}, 2: {"cross_entropy": 0.125}}


def written(kind, folder):
    """Write VALUES to a log of an installed package, and something to the console."""
    pytest.importorskip(kind)
    log = open_log(f"{kind}:{folder}", "run")
    for step, values in VALUES.items():
        log.record("target abc", step, values)
        print("console of a private run")
    log.close()


def test_tensorboard_reads_the_values(tmp_path):
    written("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"target abc/verified_0@1%", "target abc/cross_entropy"}
    read = [(each.step, each.value) for each in events.Scalars("target abc/cross_entropy")]
    assert read == [(1, 0.25), (2, 0.125)]


def test_mlflow_reads_the_values(tmp_path):
    written("mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("frostglass")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert set(run.data.metrics) == {"target abc/verified_0-1-", "target abc/cross_entropy"}
    history = client.get_metric_history(run.info.run_id, "target abc/cross_entropy")
    assert [(each.step, each.value) for each in history] == [(1, 0.25), (2, 0.125)]


def test_wandb_keeps_the_values(tmp_path, monkeypatch):
    """W&B has no reader of its files: names and JSON values are in them as text."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    written("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for text in (b"target abc/verified_0@1%", b"target abc/cross_entropy", b"0.25", b"0.125"):
        assert text in content
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for text in (b"console of a private run", socket.gethostname().encode()):
        assert [path.name for path in files if text in path.read_bytes()] == []
