"""Every analysis runs from a config to files and a report, and its steps are shared with audits."""

import json

import pytest

from commands import FACES, SETTINGS, frostglass
from frostglass.analyses.base import analyses

MODEL = f'name = "toy"\n{FACES}{SETTINGS}'
FEATURES = f"""
name = "toy"
{FACES}
[target]
epochs = 1
batch = 16
options = {{ width = 4 }}
attributes = ["all"]
cut = "stage1"

[embedder]
epochs = 1
options = {{ width = 4 }}

[[evaluators]]
model = "lenet"
epochs = 1

[attack]
name = "decoder"
epochs = 1
width = 4
adapt = 4
"""
CHECKPOINTS = ["grid.target.epochs=[1,2]", "target.schedule=constant", "target.keep=last"]
BIDO = '{name="bido",lambda_y=0.0,measure="coco_frobenius",layers=["head"]'
CASES = {
    "toy_world": (None, ["analysis.steps=20", "analysis.epochs=20", "analysis.networks=2"]),
    "fisher": (
        MODEL,
        [
            "data.public_images=3",
            "perceptual.epochs=1",
            "analysis.people=2",
            "analysis.steps=[0,2]",
        ],
    ),
    "head_ranks": (MODEL, ['grid.defenses=[[],[{name="calor",rank=2,a=0.0}]]']),
    "rank_sweep": (
        MODEL,
        ['grid.defenses=[[],[{name="calor",rank=2,a=0.0}],[{name="calor",rank=3,a=0.0}]]'],
    ),
    "checkpoints": (MODEL, CHECKPOINTS),
    "likelihood": (MODEL, []),
    "confidence": (MODEL, []),
    "gradients": (MODEL, ["analysis.people=3", "analysis.steps=[0,2]"]),
    "bottleneck": (MODEL, ["analysis.ranks=[1,2]", "analysis.steps=2", "analysis.width=4"]),
    "layer_dependence": (MODEL, [f"grid.defenses=[[],[{BIDO},lambda_x=1.0}}]]"]),
    "lda_layers": (MODEL, []),
    "tsne": (
        MODEL,
        ["analysis.attribute=smiling", "analysis.perplexity=2", "analysis.neighbours=2"],
    ),
    "unilateral": (
        MODEL,
        [f"grid.defenses=[[{BIDO},lambda_x=1.0}}],[{BIDO},lambda_x=5.0}}]]", "analysis.batch=4"],
    ),
    "fsim_utility": (FEATURES, ["data.public_images=3"]),
    "adaptive_epochs": (FEATURES, ["data.public_images=3", "grid.attack.adapt_epochs=[1,2]"]),
}


def test_every_analysis_has_a_case():
    assert sorted(CASES) == analyses.names()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_analysis_runs_twice_alike_from_one_store(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, settings = CASES[name]
    config = []
    if text:
        (tmp_path / "toy.toml").write_text(text)
        config = ["toy.toml"]
    options = [word for setting in settings for word in ("--set", setting)]
    first = frostglass("analyze", name, *config, *options, "--json", "--out", "one")
    assert first.code == 0, first.err
    again = frostglass("analyze", name, *config, *options, "--json", "--out", "two")
    assert again.progress == []  # every step was in the store
    numbers, others = json.loads(first.out), json.loads(again.out)
    files = numbers.pop("files")
    others.pop("files")
    assert numbers == others
    assert [file for file in files if file.endswith(".svg")]
    assert numbers["tables"][0]["rows"]
    if name in ("likelihood", "confidence", "rank_sweep", "checkpoints"):  # a toy attack fails
        assert any(note.startswith("VACUOUS") for note in numbers["notes"])
