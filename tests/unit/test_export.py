"""`frostglass export`: a run's model as a folder with a card, which can be audited again."""

import json
import tomllib

import pytest
import torch

from commands import TOY, error_of, frostglass
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import write_run
from frostglass.models.answers import read_whole
from frostglass.models.checkpoint import load_target
from frostglass.models.endpoint import EndpointSettings
from frostglass.store.store import Store
from frostglass.training.build import rebuild_network


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    settings = tomllib.loads(TOY.replace("width = 4", "width = 8")) | {
        "grid": {"defenses": [[], [{"name": "label_smoothing"}]]}
    }
    result = run_all(settings, Store(folder / "store"))
    write_run(result, folder / "run")
    return folder, result


def test_the_model_and_its_card(run, tmp_path):
    folder, result = run
    label = result.labels[0]
    done = frostglass("export", folder / "run", tmp_path / "model", "--only", label, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["audits"] == [label]
    audit = result.audits[0]
    read = load_target(tmp_path / "model", rebuild_network)
    images = torch.rand(2, *read.image_shape)
    with torch.no_grad():
        torch.testing.assert_close(read.module(images), audit.target.module(images))
    assert read.classes == audit.target.classes
    text = (tmp_path / "model" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: frostglass\n")
    score = audit.rows.score(audit.controls.deciding)
    assert f"| {score.value:.1%} ({score.low:.1%} to {score.high:.1%}) |" in text
    assert "it names the private people" in text
    assert ("proves nothing" in text) == bool(audit.controls.vacuous)
    assert "A defense makes them harder" in text  # this model may have none
    again = read_whole(
        f"hf:{tmp_path / 'model'}", 4, read.image_shape, EndpointSettings(), rebuild_network
    )
    with torch.no_grad():
        torch.testing.assert_close(again(images), read.module(images))


def test_names_can_be_left_out(run, tmp_path):
    folder, result = run
    options = ("--only", result.labels[0], "--redact")
    assert frostglass("export", folder / "run", tmp_path / "model", *options).code == 0
    read = load_target(tmp_path / "model", rebuild_network)
    assert read.classes == ("person 1", "person 2", "person 3", "person 4")
    text = (tmp_path / "model" / "README.md").read_text()
    assert "it names the private people" not in text
    assert "people are numbered" in text


def test_bad_calls(run, tmp_path):
    folder, _ = run
    several = error_of(frostglass("export", folder / "run", tmp_path / "m"))
    assert "the run attacked 2 models: choose one" in several
    unknown = error_of(frostglass("export", folder / "run", tmp_path / "m", "--only", "x"))
    assert "no audit is labelled 'x'" in unknown
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "is not empty" in error_of(frostglass("export", folder / "run", full))
    label = run[1].labels[0]
    moved = ("export", folder / "run", tmp_path / "m", "--only", label, "--store", tmp_path)
    assert "is not in the store" in error_of(frostglass(*moved))
    assert "not a finished run" in error_of(frostglass("export", full, tmp_path / "m"))
    assert not (tmp_path / "m").exists()
