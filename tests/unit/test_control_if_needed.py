"""A positive control that is trained only where the audited model itself does not break."""

import tomllib

import pytest

from commands import TOY
from frostglass.auditing import pipeline
from frostglass.auditing.experiment import experiments
from frostglass.auditing.pipeline import audit
from frostglass.store.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def exp():
    settings = tomllib.loads(TOY) | {
        "defenses": [{"name": "label_smoothing", "alpha": -0.05}],
        "judging": {"positive_control": "if_needed"},
    }
    ((_, experiment),) = experiments(settings)
    return experiment


def test_a_model_that_does_not_break_is_compared_with_an_undefended_one(exp, store):
    result = audit(exp, store)  # two epochs: nothing to find
    assert result.control is not None
    assert result.control.target.key != result.trial.target.key
    assert (
        "does not break the undefended model" in result.controls.vacuous or result.controls.vacuous
    )


def test_a_model_that_breaks_is_its_own_control(exp, store, monkeypatch):
    monkeypatch.setattr(pipeline, "is_broken", lambda *_: True)
    result = audit(exp, store)
    assert result.control is result.trial
    assert "no positive control" not in result.controls.vacuous
    assert any("breaks the audited model itself" in note for note in result.controls.warnings)
