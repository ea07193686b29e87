"""Networks from files: the order of their classes, the target among the evaluators, warnings."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from frostglass.auditing.expand import expand
from frostglass.auditing.given import given_warnings, is_given, naming, refuse_target
from frostglass.auditing.steps import _load_target, _train
from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.evaluators.embedder import Embedder, Embedding
from frostglass.models.checkpoint import save_target
from frostglass.report.labels import accuracy_images, model_name
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from given_models import fitted
from worlds import NoWork, images, split, target

DATA = split()
EVERYONE = images(96, 4, seed=1).joined(images(96, 4, seed=2))


def given(tmp_path, rows=None, **settings):
    """Load a linear classifier of the people whose outputs are in the order `rows`."""
    save_file(fitted(EVERYONE, rows=rows), tmp_path / "w.safetensors")
    weights = str(tmp_path / "w.safetensors")
    return Training(model="given_models:linear", weights=weights, **settings)


def test_stated_classes_put_the_outputs_in_the_order_of_the_people(tmp_path):
    plain = train_target(given(tmp_path), DATA)
    rows = [2, 0, 1, 3]
    order = tuple(DATA.classes[row] for row in rows)
    stated = train_target(given(tmp_path, rows, classes=order), DATA)
    shown = DATA.test.floats()
    assert torch.allclose(stated.module(shown), plain.module(shown), atol=1e-4)
    assert stated.classes == DATA.classes
    assert stated.info["accuracy"] == plain.info["accuracy"]
    with pytest.raises(ConfigError, match="3 of 4 classes are in another order than stated"):
        train_target(given(tmp_path, rows), DATA)


def test_stated_classes_are_the_way_past_a_false_refusal(tmp_path):
    rows = [1, 0, 2, 3]
    with pytest.raises(ConfigError, match="If the stated order is right, give it as classes"):
        train_target(given(tmp_path, rows), DATA)
    kept = train_target(given(tmp_path, rows, classes=DATA.classes), DATA)
    (warning,) = kept.info["examination"]["warnings"]
    assert "2 of 4 classes seem to be in another order than stated" in warning


def test_a_stored_model_stays_in_order_and_is_still_given(tmp_path):
    rows = [2, 0, 1, 3]
    config = given(tmp_path, rows, classes=tuple(DATA.classes[row] for row in rows))
    inputs = {"defenses": (), "data": "private", "files": "", "start": None, "perceptual": None}
    device = torch.device("cpu")
    made = _train(config, split=DATA, seed=0, work=NoWork(), device=device, **inputs)
    save_target(made, tmp_path)
    (tmp_path / "timing.json").write_text('{"seconds": 1}')
    loaded = _load_target(tmp_path, device)
    shown = DATA.test.floats()
    assert torch.equal(loaded.module(shown), made.module(shown))
    assert loaded.info["given"] is True
    assert loaded.info["examination"]["recall"] == made.info["examination"]["recall"]
    assert loaded.tested_on == "the private images given"
    assert repr(loaded).endswith("accurate on the private images given)")


def test_which_networks_are_given():
    assert is_given(Training(weights="w"))
    assert not is_given(Training())
    assert is_given(Embedder(source="onnx:net.onnx"))
    assert not is_given(Embedder(source="public"))


def test_problems_are_put_under_their_section():
    with pytest.raises(ConfigError) as caught, naming("evaluators[1]"):
        raise ConfigError(["one", "two"])
    assert caught.value.problems == ("evaluators[1]: one", "evaluators[1]: two")


def renamed(module):
    """The same network inside another one, so that its tensors have other names."""
    return nn.Sequential(nn.Identity(), module)


def test_the_target_is_found_among_evaluators_by_its_weights():
    own = target()
    copy = replace(own, module=renamed(deepcopy(own.module)), head="1.6", key="other")
    with pytest.raises(ConfigError, match="has the target's weights, and would accept whatever"):
        refuse_target(copy, own, DATA.test)
    with torch.no_grad():
        copy.module[1][6].weight.normal_()  # another head on the same body
    with pytest.raises(ConfigError, match="has the target's weights"):
        refuse_target(copy, own, DATA.test)
    refuse_target(target(seed=1), own, DATA.test)


def test_the_target_is_found_among_evaluators_by_its_outputs():
    """An export folds batch norms, and an embedder lacks the head."""
    own = target()
    norm, conv = own.module[1], own.module[0]
    folded = deepcopy(own.module)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    with torch.no_grad():
        folded[0].weight.copy_(conv.weight * scale[:, None, None, None])
        folded[0].bias.copy_((conv.bias - norm.running_mean) * scale + norm.bias)
    folded[1] = nn.Identity()
    export = replace(own, module=folded)
    with pytest.raises(ConfigError, match="returns the target's outputs for the private images"):
        refuse_target(export, own, DATA.test)
    embedder = Target(Embedding(folded[:6]), classes=(), image_shape=own.image_shape, head="end")
    with pytest.raises(ConfigError, match="returns the target's outputs"):
        refuse_target(embedder, own, DATA.test)


def described(accuracy, *, given=True, warnings=()):
    info = {"accuracy": {"test": accuracy}, "given": given}
    return replace(target(), info=info | {"examination": {"warnings": list(warnings)}})


def test_a_given_model_far_below_the_control_is_a_warning():
    control = described(0.95, given=False)
    near, far = (given_warnings(described(value), control) for value in (0.9, 0.7))
    assert far[:-1] == near
    assert far[-1].startswith("given model: it classifies 70% of the images correctly, and the")
    assert "undefended control 95%" in far[-1]
    assert given_warnings(control, control) == []
    assert given_warnings(described(0.9, warnings=["noisy"]), None)[0] == "given model: noisy"


def test_one_name_for_each_kind_of_model():
    assert model_name([], given=True) == "given model"
    assert model_name([], given=False) == "undefended"
    assert model_name([], given=False, control=True) == "undefended control"
    assert model_name(["MID", "BiDO"], given=False) == "MID + BiDO"
    assert accuracy_images(given=False) == "held-out images"
    grid = {"grid": {"defenses": [[]]}}
    assert [label for label, _ in expand(grid | {"target": {"weights": "w"}})] == ["given model"]
    assert [label for label, _ in expand(grid)] == ["undefended"]
