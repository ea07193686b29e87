"""The demo's promises: the undefended model is clearly broken, by judges that can be trusted."""

import pytest

from frostglass.audit.grid import run_all, summary
from frostglass.cli.work import demo_settings
from frostglass.store.store import Store

pytestmark = pytest.mark.slow


def test_the_undefended_model_is_broken_and_the_judges_are_good(tmp_path):
    facts = summary(run_all(demo_settings(), Store(tmp_path / "store")))
    undefended, defended = facts["audits"]
    assert all(evaluator["accuracy"]["test"] > 0.95 for evaluator in facts["evaluators"])
    for judge in ("top1_1", "top1_2"):
        assert undefended["scores"][judge]["value"] >= 0.8
        assert undefended["prior_only"][judge]["value"] <= 0.1
        assert defended["scores"][judge]["value"] < undefended["scores"][judge]["value"]
    assert facts["vacuous"] == []
