"""Examples are programs that tests run."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_model_of_ones_own_leaks_more_than_blind_draws():
    program = runpy.run_path(str(EXAMPLES / "audit_your_model.py"))
    assert program["main"]() > 0.3


def test_a_server_answers_from_protected_features_alone():
    program = runpy.run_path(str(EXAMPLES / "split_inference.py"))
    assert program["main"]() > 0.9
