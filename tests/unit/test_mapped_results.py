"""Reconstructions in a mapped file of 8 bits: the same images, whether interrupted or not."""

import pytest
import torch

from frostglass.attacks._search.collected import CollectedImages
from frostglass.attacks.base import invert, prior_only
from frostglass.attacks.model.gmi import Gmi
from frostglass.auditing.steps import _load_reconstructions, _save_reconstructions
from frostglass.core.assets import Assets
from frostglass.core.errors import RunError
from frostglass.core.pixels import ByteImages, as_bytes
from frostglass.store.files import Work, write_json
from frostglass.store.sharing import Leave, SharedWork
from worlds import prior, target

ATTACK = Gmi(steps=2, candidates=2, keep=2, batch=4, critic_weight=0.0)


class Killed(Exception):
    pass


def mapped_work(folder, saves=None):
    """A work that maps its results, and dies instead of saving once more than `saves` times."""
    left = [saves]

    def before_save():
        if left[0] is not None:
            if not left[0]:
                raise Killed
            left[0] -= 1

    folder.mkdir(exist_ok=True)
    return Work(folder, before_save=before_save, maps_results=True)


def attack(work=None):
    view = target().view(["gradients"])
    return invert(ATTACK, view, Assets(prior=prior()), people=range(4), seed=0, work=work)


def test_an_attack_writes_its_images_in_8_bits_and_resumes(tmp_path):
    plain, whole = attack(), attack(mapped_work(tmp_path / "whole"))
    assert isinstance(whole.images, ByteImages)
    assert torch.equal(whole.images.pixels, as_bytes(plain.images).pixels)
    assert torch.equal(whole.latents, plain.latents)
    with pytest.raises(Killed):
        attack(mapped_work(tmp_path / "killed", saves=1))
    resumed = attack(mapped_work(tmp_path / "killed"))
    assert resumed.images.path.read_bytes() == whole.images.path.read_bytes()


def test_a_helper_leaves_the_file_of_all_images_to_the_process_with_the_lease(tmp_path):
    """It may make the last part while the other process is writing that file."""
    (tmp_path / "work").mkdir()
    attack(SharedWork(tmp_path / "work", maps_results=True))
    written = (tmp_path / "work" / "images").stat().st_ino
    with pytest.raises(Leave):
        attack(SharedWork(tmp_path / "work", maps_results=True, helping=True))
    assert (tmp_path / "work" / "images").stat().st_ino == written


def test_saved_reconstructions_are_linked_and_read_in_parts(tmp_path):
    found = attack(mapped_work(tmp_path / "work"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "timing.json", {"seconds": 1.5})
    _save_reconstructions(found, tmp_path / "one")
    _save_reconstructions(attack(), tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert (tmp_path / "one" / "images.safetensors").samefile(found.images.path)
    loaded = _load_reconstructions(tmp_path / "one", torch.device("cpu"))
    assert loaded.images.shape == (4, 2, 3, 16, 16)
    flat = loaded.images.flatten(0, 1)
    assert torch.equal(torch.cat(list(flat.split(3))), loaded.images[:].flatten(0, 1))
    assert torch.equal(flat[torch.tensor([5])], found.images[2, 1][None])
    assert loaded.seconds == 1.5


def test_the_baseline_is_the_same_in_a_file(tmp_path):
    plain = prior_only(prior(), range(3), 50, seed=0)
    there = prior_only(prior(), range(3), 50, seed=0, work=mapped_work(tmp_path / "work"))
    assert torch.equal(there.images.pixels, as_bytes(plain.images).pixels)


def test_images_that_are_not_finite_are_refused_before_they_become_bytes(tmp_path):
    images = CollectedImages(mapped_work(tmp_path / "work"), 1)
    with pytest.raises(RunError, match="got 1 with other values or NaN: check the attack"):
        images.smaller({"images": torch.full((1, 1, 3, 4, 4), torch.nan)})
