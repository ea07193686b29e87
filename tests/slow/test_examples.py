"""The examples run and give sensible results."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_users_model_leaks_more_than_the_prior_only_baseline():
    program = runpy.run_path(str(EXAMPLES / "audit_your_model.py"))
    assert program["main"]() > 0.1  # of 12 people, 3 or 4 were recognised


def test_a_server_predicts_attributes_from_protected_features():
    program = runpy.run_path(str(EXAMPLES / "split_inference.py"))
    assert program["main"]() > 0.9
