"""The demo breaks the undefended model clearly, and decoys hide most people."""

import pytest

from frostglass.auditing.config_file import demo_config
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import summary
from frostglass.store.store import Store

pytestmark = pytest.mark.slow


def test_the_undefended_model_is_broken_and_the_evaluators_are_good(tmp_path):
    facts = summary(run_all(demo_config(), Store(tmp_path / "store")))
    undefended, defended = facts["audits"]
    *classifiers, embedder = facts["evaluators"]
    assert all(evaluator["accuracy"]["test"] > 0.95 for evaluator in classifiers)
    assert embedder["verifier"]["true_accepts"][0] > 0.95
    assert undefended["controls"]["deciding"] == "verified_3"
    for score, least in (("verified_3", 0.6), ("top1_1", 0.8), ("top1_2", 0.8)):
        assert undefended["scores"][score]["value"] >= least
        assert undefended["prior_only"][score]["value"] <= 0.1
        # One in ten, besides chance: a crowd of ten people.
        assert defended["scores"][score]["first"] <= 0.35
    assert defended["target"]["accuracy"]["test"] >= 0.93
    assert facts["vacuous"] == []
