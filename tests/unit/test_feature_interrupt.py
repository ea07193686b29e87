"""Ctrl-C during a release or a feature attack: the same command resumes."""

import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from frostglass.cli.app import app
from frostglass.report.text import toml
from frostglass.store.files import Work, sheet_of
from worlds import images

SMALL = {"epochs": 1, "batch": 16, "options": {"width": 4}}
TOY = {
    "name": "toy",
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 10,
        "public_identities": 8,
        "public_images": 4,
    },
    "split": {"test": 0.3, "validation": 0.1},
    "target": {**SMALL, "model": "cnn", "attributes": ["all"], "cut": "stage1"},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "embedder": {**SMALL, "model": "resnet"},
    "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8, "latent": 6},
    "judging": {"identities": 3, "images": 2},
    "defenses": [
        {
            "name": "crafter",
            "steps": 2,
            "inner_steps": 2,
            "terms": 2,
            "critic_steps": 1,
            "index_steps": 1,
            "first_steps": 1,
            "batch": 2,
        }
    ],
}
STOPPED = "frostglass: stopped; run the same command again to resume\n"


class Checkpoints(list):
    """Names of saved checkpoints; after saving `stop_at` the process gets Ctrl-C."""

    stop_at = ""


@pytest.fixture
def saved(monkeypatch):
    names, save = Checkpoints(), Work.save

    def save_and_record(self, name, *checkpoint):
        save(self, name, *checkpoint)
        names.append(name)
        if name == names.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Work, "save", save_and_record)
    return names


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def interrupt(saved, checkpoint, *words):
    """Run a command that is stopped after a checkpoint."""
    saved.stop_at = checkpoint
    result = call(*words)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith(STOPPED)
    saved.stop_at = ""
    saved.clear()


def test_an_interrupted_release_resumes(tmp_path, saved):
    config, client, photos = tmp_path / "toy.toml", tmp_path / "split" / "client", tmp_path / "in"
    config.write_text(toml(TOY))
    result = call("protect", config, "--store", tmp_path / "store", "--out", client.parent)
    assert result.exit_code == 0, result.stderr
    photos.mkdir()
    for number, image in enumerate(images(6, 6).floats()):
        (photos / f"{number}.png").write_bytes(sheet_of(image[None]))
    words = ("release", client, photos, "--out")
    interrupt(saved, "crafter-1", *words, tmp_path / "features.safetensors")
    assert not (tmp_path / "features.safetensors").exists()
    assert list(tmp_path.glob(".features.safetensors.partial/*/crafter-1.safetensors"))

    assert call(*words, tmp_path / "features.safetensors").exit_code == 0
    assert "crafter-2" in saved
    assert not {"crafter-0", "crafter-1"} & set(saved)  # finished batches are not repeated
    assert not list(tmp_path.glob(".*.partial"))
    assert call(*words, tmp_path / "other.safetensors").exit_code == 0
    resumed, uninterrupted = (
        load_file(tmp_path / f"{name}.safetensors")["features"] for name in ("features", "other")
    )
    assert torch.equal(resumed, uninterrupted)


SEARCH = {"name": "latent", "steps": 2, "tries": 6, "batch": 16}
TRAINING = {"name": "decoder", "epochs": 2, "width": 4}


@pytest.mark.parametrize(
    ("attack", "stop_at", "following"),
    [(SEARCH, "latent-00000", "latent-00001"), (TRAINING, "decoder", "decoder")],
    ids=["search", "training"],
)
def test_an_interrupted_feature_attack_resumes(attack, stop_at, following, tmp_path, saved):
    (tmp_path / "toy.toml").write_text(toml(TOY | {"attack": attack}))

    def words(store):
        stores, out = tmp_path / store, tmp_path / f"run of {store}"
        return ("run", tmp_path / "toy.toml", "--store", stores, "--out", out)

    interrupt(saved, stop_at, *words("store"))
    assert not (tmp_path / "run of store").exists()
    assert not list(tmp_path.glob("store/*/*.lease"))
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    (step,) = (tmp_path / "other").glob("*/*.partial")
    shutil.rmtree(step)  # the other store has to start this step again

    resumed = call(*words("store"))
    assert "VACUOUS" in resumed.stderr + resumed.stdout  # a toy attack proves nothing
    assert following in saved
    assert stop_at not in saved[: saved.index(following)]
    count = len(saved)
    saved.clear()
    assert call(*words("other")).exit_code == resumed.exit_code
    assert len(saved) > count
    one, other = (
        (tmp_path / f"run of {store}" / "rows.csv").read_bytes() for store in ("store", "other")
    )
    assert one == other
