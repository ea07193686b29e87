"""Every analysis keeps the contract, on models and features that take seconds to make."""

import pytest

from frostglass.analyses import Analysis, AnalysisMethod, Axis, Curve, Figure, Table
from frostglass.analyses.base import analyses
from frostglass.core.parameters import parameters
from frostglass.store.store import Store
from frostglass.testing import TINY_NETWORK, check_analysis

CALOR = [[{"name": "calor", "rank": rank, "a": 0.0}] for rank in (2, 3)]
BIDO = {"name": "bido", "measure": "coco_frobenius", "lambda_y": 0.0, "layers": ["head"]}
# Parameters that make it short, and what the tiny config lacks.
CASES = {
    "toy_world": ({"steps": 20, "epochs": 20, "networks": 2}, {}),
    "fisher": ({"people": 2, "steps": (0, 2)}, {}),
    "head_ranks": ({}, {"grid": {"defenses": [[], CALOR[0]]}}),
    "rank_sweep": ({}, {"grid": {"defenses": [[], *CALOR]}}),
    "checkpoints": (
        {},
        {
            "target": {**TINY_NETWORK, "schedule": "constant", "keep": "last"},
            "grid": {"target": {"epochs": [1, 2]}},
        },
    ),
    "likelihood": ({}, {}),
    "confidence": ({"bins": 2}, {}),
    "gradients": ({"people": 3, "steps": (0, 2)}, {}),
    "bottleneck": ({"ranks": (1, 2), "steps": 2, "width": 4}, {}),
    "lda_layers": ({}, {}),
    "layer_dependence": ({}, {"grid": {"defenses": [[], [{**BIDO, "lambda_x": 1.0}]]}}),
    "tsne": ({"attribute": "smiling", "perplexity": 2, "neighbours": 2}, {}),
    "unilateral": (
        {"batch": 4},
        {"grid": {"defenses": [[{**BIDO, "lambda_x": weight}] for weight in (1.0, 5.0)]}},
    ),
    "fsim_utility": ({}, {}),
    "server_training": ({"images": 8, "epochs": 1, "batch": 4}, {}),
    "adaptive_epochs": ({}, {"grid": {"attack": {"adapt_epochs": [1, 2]}}}),
}
SLOW = ("rank_sweep", "checkpoints", "fsim_utility", "adaptive_epochs")  # several attacks each
COUNTING = ("rank_sweep", "checkpoints", "likelihood", "confidence")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in analyses.names()],
)
def test_contract(name, store):
    values, settings = CASES[name]
    result = check_analysis(analyses.get(name)(**values), settings, store)
    if name in COUNTING:  # the tiny attack breaks nothing, which must be said
        assert any(note.startswith("VACUOUS") for note in result.notes)


class Outside(AnalysisMethod):
    """Base of analyses that break a promise."""

    surfaces = frozenset({"model"})

    def run(self, context):
        self.runs.append(context)
        word = context.subjects[0].split.classes[0] if self.names else "a"
        value = float(len(self.runs)) if self.random else 1.0
        figure = Figure("f", Axis("x"), Axis("y"), (Curve("c", (1.0,), (value,)),))
        return Analysis((Table("t", ("v",), ((word,),)),), (figure,) if self.draws else ())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("names", "must not name people"),
        ("random", "a seed must repeat the result"),
        ("draws", "at least one table and one figure"),
    ],
)
def test_a_broken_promise_is_found(broken, message, store):
    flags = {"names": False, "random": False, "draws": True}
    members = {**flags, broken: not flags[broken], "runs": [], "__doc__": "Broken."}
    method = parameters(type("Broken", (Outside,), members))
    with pytest.raises(AssertionError, match=message):
        check_analysis(method(), store=store)


def test_a_config_that_does_not_suit_is_named(store):
    with pytest.raises(AssertionError, match="expected several ranks of calor"):
        check_analysis(analyses.get("rank_sweep")(), store=store)
