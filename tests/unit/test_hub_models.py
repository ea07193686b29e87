"""Folders of the Hugging Face Hub as models: local files, strict weights, no code of the folder."""

import json

import pytest
import torch
from safetensors.torch import save_file

from commands import FACES, ONE_EPOCH, error_of, frostglass
from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.models.answers import read_whole, source_files
from frostglass.models.endpoint import EndpointSettings
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import split

SHAPE = (3, 32, 32)


@pytest.fixture
def folder(tmp_path):
    """A network of timm with four classes, as `timm.models.push_to_hf_hub` writes it."""
    import timm

    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=4).eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    stated = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2], "input_size": [3, 160, 160]}
    change(tmp_path, architecture="test_resnet", num_classes=4, pretrained_cfg=stated)
    return tmp_path, network


def change(folder, **values):
    path = folder / "config.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


def read(folder, classes=4):
    return read_whole(f"hf:{folder}", classes, SHAPE, EndpointSettings())


def test_a_folder_of_timm_normalises_as_it_says(folder):
    path, network = folder
    images = torch.rand(2, *SHAPE)
    mean = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(read(path)(images), network((images - mean) / 0.2))
    assert [file.name for file in source_files(f"hf:{path}")] == [
        "config.json",
        "model.safetensors",
    ]


def test_it_is_examined_like_any_given_model(folder):
    path, _ = folder
    target = train_target(Training(weights=f"hf:{path}"), split())
    assert set(target.info["accuracy"]) == {"train", "validation", "test"}
    assert target.head.endswith("fc")


def test_what_is_wrong_with_a_folder(folder, tmp_path):
    path, _ = folder
    with pytest.raises(ModelError, match=r"returns \(2, 4\) .* expected scores \(2, 5\)"):
        read(path, classes=5)
    with pytest.raises(ConfigError, match=r"nothing is downloaded here. .* `hf download me/faces"):
        read("me/faces")
    change(path, num_classes=5)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not fit"):
        read(path, classes=5)
    change(path, num_classes=4, architecture="none_such")
    with pytest.raises(ConfigError, match=r"none_such"):
        read(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no network: expected architecture"):
        read(path)
    (path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        read(path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    change_anew = {"architecture": "test_resnet", "num_classes": 4}
    (path / "config.json").write_text(json.dumps(change_anew))
    with pytest.raises(CheckpointError, match=r"no model.safetensors in .* are pickles"):
        read(path)


def test_code_of_a_folder_is_not_run(folder):
    path, _ = folder
    (path / "config.json").write_text(
        json.dumps({"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}})
    )
    with pytest.raises(ConfigError, match=r"needs code of its own .* none is run"):
        read(path)


def test_transformers_is_named_if_it_is_missing(folder, monkeypatch):
    path, _ = folder
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (path / "config.json").write_text(json.dumps({"architectures": ["ViTForImageClassification"]}))
    with pytest.raises(ConfigError, match="which is not installed: install it with `pip install"):
        read(path)


def test_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=4
    )
    torch.manual_seed(0)
    network = transformers.ResNetForImageClassification(config).eval()
    network.save_pretrained(tmp_path)
    stated = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    images = torch.rand(2, *SHAPE)
    with torch.no_grad():
        expected = network(pixel_values=(images - 0.5) / 0.25).logits
        torch.testing.assert_close(read(tmp_path)(images), expected)


def test_check_says_it_in_one_line(tmp_path):
    config = tmp_path / "toy.toml"
    config.write_text(FACES + ONE_EPOCH.replace("epochs = 1", 'weights = "hf:me/faces"', 1))
    assert "nothing is downloaded here" in error_of(frostglass("check", config))
