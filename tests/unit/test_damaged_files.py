"""Damaged files of steps, attributes, priors and clients: one line each, and no absurd memory."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from frostglass.auditing.steps import _load_pretrained, _load_reconstructions
from frostglass.core.errors import CheckpointError, DataError, FrostglassError, StoreError
from frostglass.data._attributes import Attributes
from frostglass.deploy.amortizer import TrainedAmortizer
from frostglass.deploy.client import Client, split_model
from frostglass.deploy.server import Server
from frostglass.models.checkpoint import load_target, save_target
from frostglass.networks.amortizer import Amortizer
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import KIND, load_generator
from frostglass.priors import _files
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.wgan import Wgan
from frostglass.store.files import write_tensors
from frostglass.training.build import rebuild_network, untrained
from frostglass.training.settings import Training

CPU = torch.device("cpu")
SHAPE = (3, 16, 16)


@pytest.mark.parametrize(
    "timing", [None, "{", "[]", "{}", '{"seconds": "3"}', '{"seconds": NaN}', '{"seconds": -1}']
)
def test_a_step_without_its_timing(tmp_path, timing):
    if timing is not None:
        (tmp_path / "timing.json").write_text(timing)
    with pytest.raises(StoreError, match=r"timing\.json is missing or does not say how long"):
        _load_pretrained(tmp_path, CPU)
    write_tensors(tmp_path / "reconstructions.safetensors", {}, {"queries": 3})
    with pytest.raises(StoreError, match=r"timing\.json is missing or does not say how long"):
        _load_reconstructions(tmp_path, CPU)


def test_an_attribute_table_with_an_endless_field(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"image,glasses\na.png,{'1' * 200_000}\n")
    with pytest.raises(DataError, match=r"table\.csv is not a table of attributes \(field larger"):
        Attributes(path)


@pytest.fixture(scope="module")
def prior():
    return Wgan(latent=5, width=4).untrained(SHAPE, 0)


def edited(prior, path, change):
    """Write a prior whose record was changed."""
    write_prior(prior, path)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["frostglass_prior"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    facts = change(facts, tensors) or facts
    text = facts if isinstance(facts, str) else json.dumps(facts)
    save_file(tensors, path, metadata={"frostglass_prior": text})
    return path


def test_an_unchanged_prior_is_read(prior, tmp_path):
    path = edited(prior, tmp_path / "p.safetensors", lambda facts, tensors: None)
    assert read_prior(path).info == json.loads(json.dumps(dict(prior.info)))


PRIOR_CHANGES = {
    "no JSON": lambda facts, tensors: "{",
    "nested without end": lambda facts, tensors: "[" * 100_000,
    "a list": lambda facts, tensors: "[]",
    "no info": lambda facts, tensors: facts.pop("info") and None,
    "info is text": lambda facts, tensors: facts.update(info="wgan"),
    "no method": lambda facts, tensors: facts["info"].pop("method") and None,
    "a number as name": lambda facts, tensors: facts["info"]["method"].update(name=3),
    "an unknown name": lambda facts, tensors: facts["info"]["method"].update(name="wgam"),
    "parameters are a list": lambda facts, tensors: facts["info"]["method"].update(parameters=[]),
    "a text as width": lambda facts, tensors: facts["info"]["method"]["parameters"].update(
        width="wide"
    ),
    "self": lambda facts, tensors: facts["info"]["method"]["parameters"].update(self=1),
    "students are a number": lambda facts, tensors: facts["info"]["method"]["parameters"].update(
        students=3
    ),
    "a base that is no record": lambda facts, tensors: facts["info"].update(base=3),
    "one side": lambda facts, tensors: facts.update(image_shape=[3]),
    "a shape of text": lambda facts, tensors: facts.update(image_shape="3x16x16"),
    "no side": lambda facts, tensors: facts.update(image_shape=[3, 0, 0]),
    "endless sides": lambda facts, tensors: facts.update(image_shape=[3, 2**40, 2**40]),
    "critic is text": lambda facts, tensors: facts.update(critic="yes"),
    "other latents": lambda facts, tensors: facts.update(latent=6),
    "classes are text": lambda facts, tensors: facts.update(classes="four"),
    "a condition that is none": lambda facts, tensors: facts.update(condition="label"),
    "hashes of people as floats": lambda facts, tensors: tensors.update(
        seen_identities=torch.zeros(3)
    ),
    "features of another shape": lambda facts, tensors: tensors.update(features=torch.zeros(3)),
}


@pytest.mark.parametrize("name", PRIOR_CHANGES)
def test_a_prior_with_a_damaged_record(prior, tmp_path, name):
    path = edited(prior, tmp_path / "p.safetensors", PRIOR_CHANGES[name])
    with pytest.raises(CheckpointError, match="make the prior again") as caught:
        read_prior(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [20_000, 2**62])
def test_a_prior_that_names_an_absurd_width_takes_no_memory(prior, tmp_path, width, monkeypatch):
    def widen(facts, tensors):
        facts["info"]["method"]["parameters"].update(width=width, critic_width=None)

    path = edited(prior, tmp_path / "p.safetensors", widen)
    build, devices = _files._skeleton, set()

    def watched(*args):
        devices.add(torch.get_default_device().type)
        return build(*args)

    monkeypatch.setattr(_files, "_skeleton", watched)
    with pytest.raises(CheckpointError):
        read_prior(path)
    assert devices == {"meta"}


@pytest.mark.parametrize(
    "base",
    [{"name": "spy:Prior"}, {"name": "generator", "source": "spy:make", "latent": "normal:5"}],
)
def test_a_prior_whose_parameters_name_code_deep_inside(prior, tmp_path, monkeypatch, base):
    def hide(facts, tensors):
        facts["info"]["method"] = {"name": "students", "parameters": {"students": [], "base": base}}

    (tmp_path / "spy.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    path = edited(prior, tmp_path / "p.safetensors", hide)
    with pytest.raises(CheckpointError, match=r"names code to run \(spy:"):
        read_prior(path)


def test_a_converted_generator_that_names_absurd_widths(tmp_path):
    settings = StyleSettings(
        resolution=8, z_dim=4, w_dim=4, layers=1, channel_base=32, channel_max=4
    )
    state = StyleGenerator(settings).state_dict()
    path = tmp_path / "g.safetensors"
    write_tensors(path, state, {KIND: asdict(settings)})
    assert load_generator(path).settings == settings
    wide = replace(settings, channel_base=2**24, channel_max=16384)
    write_tensors(path, state, {KIND: asdict(wide)})
    with pytest.raises(CheckpointError, match="far larger than its"):
        load_generator(path)


@pytest.fixture(scope="module")
def halves():
    config = Training(model="cnn", options={"width": 4}, cut="stage1")
    target = untrained(config, ("a", "b"), SHAPE, (), seed=0)
    recipe = {"training": asdict(config), "defenses": [], "seed": 0}
    return split_model(replace(target, info={"build": recipe}))


CLIENT_CHANGES = {
    "a shape of text": lambda facts: facts.update(image_shape="3x16x16"),
    "two sides": lambda facts: facts.update(image_shape=[16, 16]),
    "negative sides": lambda facts: facts.update(image_shape=[3, -16, -16]),
    "other images": lambda facts: facts.update(image_shape=[3, 32, 32]),
    "other features": lambda facts: facts.update(feature_shape=[3]),
    "features are null": lambda facts: facts.update(feature_shape=None),
    "a number as cut": lambda facts: facts.update(cut=3),
    "recipe is text": lambda facts: facts.update(recipe="cnn"),
    "recipe without training": lambda facts: facts["recipe"].pop("training"),
    "recipe without seed": lambda facts: facts["recipe"].pop("seed"),
    "training without model": lambda facts: facts["recipe"]["training"].pop("model"),
    "a number as model": lambda facts: facts["recipe"]["training"].update(model=3),
    "options are a list": lambda facts: facts["recipe"]["training"].update(options=[3]),
    "a text as width": lambda facts: facts["recipe"]["training"].update(options={"width": "x"}),
    "an absurd width": lambda facts: facts["recipe"]["training"].update(options={"width": 2**20}),
    "defenses are text": lambda facts: facts["recipe"].update(defenses="bido"),
    "a defense without name": lambda facts: facts["recipe"].update(defenses=[{}]),
    "absurd classes": lambda facts: facts["recipe"].update(classes=10**12),
}
OF_ONE = {
    "client": {
        "protection is text": lambda facts: facts.update(protection="crafter"),
        "protection without name": lambda facts: facts.update(protection={"beta": 3}),
        "a defense of training": lambda facts: facts.update(protection={"name": "bido"}),
        "an unknown crop": lambda facts: facts.update(crop="middle"),
    },
    "server": {
        "classes are text": lambda facts: facts.update(classes="ab"),
        "numbers as classes": lambda facts: facts.update(classes=[1, 2]),
        "attributes are text": lambda facts: facts.update(attributes="yes"),
    },
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, own in OF_ONE.items() for name in (*CLIENT_CHANGES, *own)],
)
def test_a_client_or_server_with_damaged_facts(halves, tmp_path, kind, name):
    half = dict(zip(("client", "server"), halves, strict=True))[kind]
    folder = half.save(tmp_path / kind)
    path = folder / "facts.json"
    facts = json.loads(path.read_text())
    (CLIENT_CHANGES | OF_ONE[kind])[name](facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(FrostglassError) as caught:
        (Client if kind == "client" else Server).load(folder)
    assert "\n" not in str(caught.value)


MODEL_CHANGES = {
    "info is text": lambda text: text.update(info="cnn"),
    "recipe without training": lambda text: text["info"]["build"].pop("training"),
    "training is null": lambda text: text["info"]["build"].update(training=None),
    "an absurd width": lambda text: text["info"]["build"]["training"].update(
        options={"width": 2**20}
    ),
    "defenses are a number": lambda text: text["info"]["build"].update(defenses=3),
    "numbers as taps": lambda text: text.update(taps=[3]),
    "two sides": lambda text: text.update(image_shape=[16, 16]),
}


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_model_with_a_damaged_description(tmp_path, name):
    config = Training(model="cnn", options={"width": 4})
    target = untrained(config, ("a", "b"), SHAPE, (), seed=0)
    recipe = {"training": asdict(config), "defenses": [], "seed": 0}
    save_target(replace(target, info={"build": recipe}), tmp_path)
    assert load_target(tmp_path, rebuild_network).classes == ("a", "b")
    path = tmp_path / "target.json"
    text = json.loads(path.read_text())
    MODEL_CHANGES[name](text)
    path.write_text(json.dumps(text))
    with pytest.raises(FrostglassError) as caught:
        load_target(tmp_path, rebuild_network)
    assert "\n" not in str(caught.value)


def test_an_amortizer_with_a_damaged_record(tmp_path):
    config = Amortizer(steps=1, batch=4, width=4)
    shape = (4, 8, 8)
    TrainedAmortizer(config.network(shape, 5), config, shape, 5).save(tmp_path)
    assert TrainedAmortizer.load(tmp_path, CPU).latent == 5
    path = tmp_path / "amortizer.safetensors"
    tensors = config.network(shape, 5).state_dict()
    whole = {"config": asdict(config), "feature_shape": list(shape), "latent": 5}
    for change in (
        {"config": 3},
        {"config": {"width": "wide"}},
        {"config": {**asdict(config), "width": 10**6}},
        {"feature_shape": 3},
        {"latent": "five"},
        {"latent": 6},
    ):
        write_tensors(path, tensors, whole | change)
        with pytest.raises(CheckpointError, match=r"Save it again|write the file again"):
            TrainedAmortizer.load(tmp_path, CPU)
