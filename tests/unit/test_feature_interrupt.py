"""Ctrl-C while features are released and while they are attacked: the usual line, and the same command goes on where it was."""

import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from frostglass.cli.main import app
from frostglass.report.charts import toml
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
    "judging": {"identities": 3, "pictures": 2},
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
STOPPED = "frostglass: stopped; the same command goes on from here\n"


@pytest.fixture
def saved(monkeypatch):
    """DryRunWork the checkpoints that are kept; `saved.stop_at` is one after which somebody presses Ctrl-C."""

    class Noted(list):
        stop_at = ""

    noted, save = Noted(), Work.save

    def save_and_note(self, name, *kept):
        save(self, name, *kept)
        noted.append(name)
        if name == noted.stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Work, "save", save_and_note)
    return noted


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def interrupted(saved, checkpoint, *words):
    saved.stop_at = checkpoint
    done = call(*words)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", STOPPED)
    saved.stop_at = ""
    saved.clear()


def test_a_release_goes_on_after_ctrl_c(tmp_path, saved):
    (tmp_path / "toy.toml").write_text(toml(TOY))
    done = call(
        "protect", tmp_path / "toy.toml", "--store", tmp_path / "store", "--out", tmp_path / "split"
    )
    assert done.exit_code == 0, done.stderr
    (tmp_path / "album").mkdir()
    for number, picture in enumerate(images(6, 6).floats()):
        (tmp_path / "album" / f"{number}.png").write_bytes(sheet_of(picture[None]))
    words = ("release", tmp_path / "split" / "client", tmp_path / "album", "--out")
    interrupted(saved, "crafter-1", *words, tmp_path / "features.safetensors")
    assert not (tmp_path / "features.safetensors").exists()
    assert list(tmp_path.glob(".features.safetensors.partial/*/crafter-1.safetensors"))

    assert call(*words, tmp_path / "features.safetensors").exit_code == 0
    assert "crafter-2" in saved
    assert not {"crafter-0", "crafter-1"} & set(saved)  # what was finished is not made again
    assert not list(tmp_path.glob(".*.partial"))
    assert call(*words, tmp_path / "other.safetensors").exit_code == 0
    found, uninterrupted = (
        load_file(tmp_path / f"{name}.safetensors")["features"] for name in ("features", "other")
    )
    assert torch.equal(found, uninterrupted)


ATTACKS = {
    "a search": (
        {"name": "latent", "steps": 2, "tries": 6, "batch": 16},
        "latent-00000",
        "latent-00001",
    ),
    "a lesson": ({"name": "decoder", "epochs": 2, "width": 4}, "decoder", "decoder"),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_feature_attack_goes_on_after_ctrl_c(kind, tmp_path, saved):
    attack, stopped_at, next_one = ATTACKS[kind]
    (tmp_path / "toy.toml").write_text(toml(TOY | {"attack": attack}))

    def words(store):
        return (
            "run",
            tmp_path / "toy.toml",
            "--store",
            tmp_path / store,
            "--out",
            tmp_path / f"run of {store}",
        )

    interrupted(saved, stopped_at, *words("store"))
    assert not (tmp_path / "run of store").exists()
    assert not list(tmp_path.glob("store/*/*.lease"))
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    (step,) = (tmp_path / "other").glob("*/*.partial")
    shutil.rmtree(step)  # there it begins anew

    resumed = call(*words("store"))
    assert "VACUOUS" in resumed.stderr  # a toy attack proves nothing, and that is known at the end
    assert next_one in saved
    assert stopped_at not in saved[: saved.index(next_one)]
    count = len(saved)
    saved.clear()
    assert call(*words("other")).stderr == resumed.stderr
    assert len(saved) > count  # all of it was made there
    one, other = (
        (tmp_path / f"run of {store}" / "rows.csv").read_bytes() for store in ("store", "other")
    )
    assert one == other
