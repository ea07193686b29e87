"""An analysis runs from a config file to its own files, and shares its steps with others."""

import json

import pytest

from commands import FACES, SETTINGS, changed, frostglass

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
CASES = {
    "likelihood": (MODEL, []),
    "fsim_utility": (FEATURES, ["data.public_images=3"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_analysis_runs_twice_alike_from_one_store(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, settings = CASES[name]
    (tmp_path / "toy.toml").write_text(text)
    command = ["analyze", name, "toy.toml", *changed(*settings), "--json", "--out"]
    first, again = (frostglass(*command, out) for out in ("one", "two"))
    assert first.code == 0, first.err
    assert again.progress == []  # every step was in the store
    numbers, others = json.loads(first.out), json.loads(again.out)
    files = numbers.pop("files")
    others.pop("files")
    assert numbers == others
    assert [file for file in files if file.endswith(".svg")]
    assert numbers["tables"][0]["rows"]
