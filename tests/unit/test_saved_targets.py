"""Targets written to a folder and loaded again."""

import json
from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import CheckpointError
from frostglass.core.types import Target
from frostglass.models.build import build
from frostglass.models.checkpoint import load_target, save_target
from frostglass.models.wrap import wrap

SHAPE = (3, 16, 16)


def net(**options):
    return build("cnn", classes=5, image_shape=SHAPE, seed=0, width=4, **options)


def target(**info):
    wrapped = wrap(net(mean=[0.5] * 3, std=[0.25] * 3), classes=list("vwxyz"), image_shape=SHAPE)
    recipe = {
        "name": "cnn",
        "options": {"width": 4},
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "defenses": [],
    }
    return Target(
        wrapped.module,
        wrapped.classes,
        SHAPE,
        wrapped.head,
        wrapped.taps,
        {**wrapped.info, "build": recipe, **info},
    )


def rebuild(recipe):
    mean, std = recipe["mean"], recipe["std"]
    return build(
        recipe["name"],
        classes=recipe["classes"],
        image_shape=recipe["image_shape"],
        mean=mean,
        std=std,
        seed=9,
        **recipe["options"],
    )


def test_a_target_is_loaded_as_it_was_saved(tmp_path):
    saved = replace(target(accuracy=0.9), cut="net.stage2", attributes=True)
    save_target(saved, tmp_path)
    loaded = load_target(tmp_path, rebuild)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "target.json",
        "weights.safetensors",
    ]
    for name in ("classes", "image_shape", "head", "taps", "info", "cut", "attributes"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert not any(part.training for part in loaded.module.modules())
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    saved.module.eval()
    for ours, theirs in zip(loaded.outputs(images), saved.outputs(images), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rebuilt_network_that_does_not_fit_is_refused(tmp_path):
    save_target(target(), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_target(tmp_path, lambda recipe: build("lenet", classes=5, image_shape=SHAPE, seed=0))


def test_a_target_without_a_recipe_is_not_saved(tmp_path):
    plain = wrap(net(), classes=5, image_shape=SHAPE)
    with pytest.raises(CheckpointError, match=r'without a recipe in info\["build"\]'):
        save_target(plain, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.zeros(1), float("nan")])
def test_info_that_is_not_plain_is_not_saved(tmp_path, value):
    with pytest.raises(CheckpointError, match="info must be plain finite values"):
        save_target(target(loss=value), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_holds_no_target(tmp_path):
    with pytest.raises(CheckpointError, match=r"target.json is missing"):
        load_target(tmp_path, rebuild)


@pytest.mark.parametrize("damage", ["{", "[]", json.dumps({"classes": ["a"]})])
def test_a_damaged_description_is_refused(tmp_path, damage):
    save_target(target(), tmp_path)
    (tmp_path / "target.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"target.json .* is damaged"):
        load_target(tmp_path, rebuild)


def test_missing_weights_are_refused(tmp_path):
    save_target(target(), tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint file"):
        load_target(tmp_path, rebuild)
