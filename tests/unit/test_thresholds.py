"""Thresholds: read from a config, and recorded in the store before anything is computed."""

import hashlib
import json
import os
import time

import pytest

from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.model_file import model_file
from frostglass.auditing.thresholds import (
    THRESHOLDS,
    Thresholds,
    fixed_before,
    other_thresholds,
    record_thresholds,
)
from frostglass.core.errors import ConfigError
from frostglass.store.store import Store
from run_folders import BROKEN, make_run

FEATURES = {"target": {"cut": "stage1", "attributes": ["all"]}, "attack": {"name": "decoder"}}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, r"thresholds\.max_first: expected it or another limit of the leak \(max_any, max_rec"),
        ({"min_accuracy": 0.9}, r"thresholds.* got none: add one, or remove \[thresholds\]"),
        (
            {"max_first": 0.3, "max_any": 0.2},
            r"max_first \(0.3\) exceeds max_any \(0.2\), and who is recognised by one guess",
        ),
        ({"max_recognised": 0.3, "max_any": 0.2}, r"max_recognised \(0.3\) exceeds max_any"),
        ({"max_first": 1.2}, "max_first: expected at most 1, got 1.2"),
        ({"max_frist": 0.2}, "max_frist: no such parameter; did you mean 'max_first'"),
        ({"max_similarity": 0.2}, "max_similarity: a limit for audits of features, and this conf"),
        ({"max_first": 0.1, "min_utility": 0.5}, "min_utility: a limit for audits of features"),
    ],
)
def test_limits_that_contradict_or_cannot_be_measured_are_refused(limits, message):
    with pytest.raises(ConfigError, match=message):
        Experiment.parse({"thresholds": limits})


def test_limits_of_models_are_refused_for_features():
    with pytest.raises(
        ConfigError, match=r"thresholds\.min_accuracy: a limit for audits of models"
    ):
        Experiment.parse(FEATURES | {"thresholds": {"max_recognised": 0.1, "min_accuracy": 0.9}})
    both = {"max_similarity": 0.3, "min_utility": 0.5, "max_recognised": 0.1}
    assert Experiment.parse(FEATURES | {"thresholds": both}).thresholds.limits == {
        "max_recognised": 0.1,
        "max_similarity": 0.3,
        "min_utility": 0.5,
    }


def test_a_grid_has_one_set_of_thresholds():
    with pytest.raises(ConfigError, match="grid: thresholds must be the same in all experiments"):
        experiments(
            {"thresholds": {"max_first": 0.1}, "grid": {"thresholds.max_first": [0.1, 0.2]}}
        )
    assert Experiment.parse({}).thresholds is None


def test_thresholds_keep_their_first_time(tmp_path):
    limits = Thresholds(max_first=0.1)
    first = record_thresholds(tmp_path / "store", "demo", limits)
    assert first.endswith("+00:00")
    time.sleep(1.1)  # times have a resolution of a second
    assert record_thresholds(tmp_path / "store", "demo", limits) == first
    assert record_thresholds(tmp_path / "store", "demo", Thresholds(max_first=0.2)) > first
    assert record_thresholds(tmp_path / "store", "other", limits) > first
    assert record_thresholds(tmp_path / "store", "demo", None) == ""
    assert other_thresholds(tmp_path / "store", "demo", limits) == 1
    assert other_thresholds(tmp_path / "store", "other", limits) == 0
    records = [path for path in (tmp_path / "store" / THRESHOLDS.name).iterdir() if path.is_dir()]
    assert len(records) == 3


def test_thresholds_that_are_recorded_after_an_attack_do_not_count(tmp_path):
    attack = tmp_path / "attack"
    attack.mkdir()
    timing = {"seconds": 1.0, "finished": "2026-01-02T00:00:00+00:00"}
    (attack / "timing.json").write_text(json.dumps(timing))
    assert fixed_before("2026-01-01T23:59:59+00:00", [attack])
    assert fixed_before("2026-01-02T00:00:00+00:00", [attack])
    assert not fixed_before("2026-01-02T00:00:01+00:00", [attack])
    assert not fixed_before("", [attack])
    assert not fixed_before("2026-01-01T23:59:59+00:00", [attack, tmp_path / "no time"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_is_read_only_has_no_record(tmp_path):
    Store(tmp_path / "store").create()
    (tmp_path / "store").chmod(0o500)
    assert record_thresholds(tmp_path / "store", "demo", Thresholds(max_first=0.1)) == ""


def test_a_run_records_limits_date_file_and_attributes(tmp_path):
    marks = {"glasses": [place < 5 for place in range(20)], "hat": [True] * 20}
    run = make_run(tmp_path / "run", [BROKEN], thresholds={"max_first": 0.1}, attributes=marks)
    document = json.loads((run / "run.json").read_text())
    assert document["thresholds"] == {
        "limits": {"max_first": 0.1},
        "recorded": "2026-01-02T03:04:05+00:00",
        "before_results": True,
        "others": 0,
    }
    assert document["date"] == "2026-01-03T10:20:30+00:00"
    assert document["attributes"] == {"glasses": marks["glasses"]}, "all have hats"
    assert document["audits"][0]["file"] == {"name": "target targettrial0", "sha256": None}


class _Given:
    """An audit of a given model, as far as its file is concerned."""

    def __init__(self, weights):
        self.experiment = Experiment.parse({"target": {"model": "cnn", "weights": weights}})


def test_the_file_of_a_given_model_is_hashed(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    expected = {"name": "model.safetensors", "sha256": digest}
    assert model_file(_Given(str(path)), "") == expected
    assert model_file(_Given("https://host/path"), "") == {
        "name": "https://host/path",
        "sha256": None,
    }
