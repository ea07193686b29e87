"""Client and server: their answers, their files, and what is refused when they are read."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from frostglass.core.assets import Assets
from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.data._splits import make_split
from frostglass.data.faces import Faces
from frostglass.defenses.release.crafter import Crafter
from frostglass.defenses.release.later_cut import LaterCut
from frostglass.defenses.training.adv_learn import AdvLearn
from frostglass.deploy.amortizer import TrainedAmortizer
from frostglass.deploy.client import Client, split_model
from frostglass.deploy.server import Server
from frostglass.models.wrap import wrap
from frostglass.networks.amortizer import Amortizer
from frostglass.priors._files import write_prior
from frostglass.priors.wgan import Wgan
from frostglass.runtime.freezing import frozen
from frostglass.store.manifest import seal
from frostglass.training.loop import train_target
from frostglass.training.settings import Training, targets_for
from worlds import same_weights

SHAPE = (3, 16, 16)
SHORT = {
    "steps": 2, "inner_steps": 2, "terms": 2, "critic_steps": 1, "batch": 4,
    "first_steps": 2, "index_steps": 2, "pool": 4,
}  # fmt: skip


def reseal(folder):
    """Write the manifest anew, as of a client that was saved like this."""
    seal(folder, [path.name for path in folder.iterdir() if path.name != "manifest.json"])


@pytest.fixture(scope="module")
def split():
    return make_split(
        Faces(size=16, identities=4, images=10, public_identities=20, public_images=1),
        test_fraction=0.3,
        validation_fraction=0.1,
        seed=0,
    )


@pytest.fixture(scope="module")
def target(split):
    config = Training(
        model="cnn", options={"width": 4}, attributes=("all",), cut="stage1", epochs=1, batch=16
    )
    recipe = {"training": asdict(config), "defenses": [], "seed": 0}
    target = train_target(config, split)
    return replace(target, info={**target.info, "build": recipe})


@pytest.fixture(scope="module")
def prior(split):
    return Wgan(steps=1, width=4, latent=5, batch=4).train(split.public)


def test_the_halves_answer_like_the_whole(target, split):
    client, server = split_model(target)
    images = split.test.floats()
    with torch.no_grad():
        assert torch.equal(server.answer(client.protect(images)), target.module(images))
    assert server.classes == target.classes
    assert server.attributes


def test_the_halves_are_copies_with_separate_weights(target):
    client, server = split_model(target)
    both = {**client.encoder.state_dict(), **server.rest.state_dict()}
    assert set(both) == set(target.module.state_dict())
    assert not set(client.encoder.state_dict()) & set(server.rest.state_dict())
    with torch.no_grad():
        next(client.encoder.parameters()).add_(1)
    assert not torch.equal(next(client.encoder.parameters()), next(target.module.parameters()))


def amortizer_of(client, prior) -> TrainedAmortizer:
    config = Amortizer(steps=1, batch=4, width=4)
    network = config.network(client.feature_shape, prior.latent)
    return TrainedAmortizer(network, config, client.feature_shape, prior.latent)


def test_a_trained_amortizer_is_an_asset_and_a_product(target, prior):
    client, _ = split_model(target)
    amortizer = amortizer_of(client, prior)
    features = torch.zeros(2, *client.feature_shape)
    assert amortizer(features).shape == (2, prior.latent)
    assert amortizer in Assets(amortizer=amortizer).modules
    with frozen(*Assets(amortizer=amortizer).modules):
        assert not amortizer.network.training
    assert amortizer.network.training
    keyed = replace(amortizer, key="some")
    assert keyed.key == "some"
    assert keyed.network is amortizer.network


def test_loaded_halves_protect_and_answer_alike(target, prior, split, tmp_path):
    client, server = split_model(target, Crafter(beta=2.0, **SHORT), prior=prior)
    client = replace(client, amortizer=amortizer_of(client, prior))
    loaded = Client.load(client.save(tmp_path / "client"), device=torch.device("cpu"))
    answering = Server.load(server.save(tmp_path / "server"), device=torch.device("cpu"))
    images = split.test.floats()[:4]
    features = client.protect(images, seed=3)
    assert torch.equal(loaded.protect(images, seed=3), features)
    assert not torch.equal(features, split_model(target)[0].protect(images))
    assert torch.equal(answering.answer(features), server.answer(features))
    assert loaded.protection == client.protection
    assert same_weights(loaded.amortizer, client.amortizer)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_a_client_holds_nothing_of_the_server(target, tmp_path):
    client, server = split_model(target)
    client.save(tmp_path / "client")
    server.save(tmp_path / "server")
    ours, theirs = (
        set(load_file(tmp_path / part / "weights.safetensors")) for part in ("client", "server")
    )
    assert ours == set(client.encoder.state_dict())
    assert not ours & theirs


def test_a_module_of_ones_own_is_passed_to_load(split, tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))

    own = wrap(build(), classes=3, image_shape=SHAPE, cut="1")
    client, server = split_model(own)
    images = split.test.floats()
    with torch.no_grad():
        assert torch.equal(server.answer(client.protect(images)), own.module(images))
    folder = client.save(tmp_path / "client")
    with pytest.raises(CheckpointError, match="was saved from a module of your own"):
        Client.load(folder)
    torch.manual_seed(1)
    assert torch.equal(Client.load(folder, build()).protect(images), client.protect(images))
    assert torch.equal(
        Server.load(server.save(tmp_path / "server"), build()).answer(client.protect(images)),
        server.answer(client.protect(images)),
    )


@pytest.mark.parametrize("place", ["model", "defense", "protection"])
def test_a_folder_that_names_code_is_refused_before_any_runs(target, tmp_path, monkeypatch, place):
    client, _ = split_model(target)
    folder = client.save(tmp_path / "client")
    facts = json.loads((folder / "facts.json").read_text())
    if place == "model":
        facts["recipe"]["training"]["model"] = "spy:build"
    elif place == "defense":
        facts["recipe"]["defenses"] = [{"name": "spy:Defense"}]
    else:
        facts["protection"] = {"name": "spy:Defense"}
    (folder / "facts.json").write_text(json.dumps(facts))
    reseal(folder)
    (tmp_path / "spy.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="names code to run"):
        Client.load(folder)


def test_changed_removed_and_added_files_of_a_client_are_refused(target, tmp_path):
    folder = split_model(target)[0].save(tmp_path / "client")
    facts, weights = folder / "facts.json", folder / "weights.safetensors"
    whole = facts.read_bytes()
    facts.write_bytes(whole.replace(b'"crop": "centre"', b'"crop": "center"'))
    with pytest.raises(CheckpointError, match=r"facts.json is corrupted or was edited"):
        Client.load(folder)
    facts.write_bytes(whole)
    weights.rename(folder / "prior.safetensors")
    with pytest.raises(CheckpointError, match=r"do not both have prior.safetensors"):
        Client.load(folder)
    (folder / "prior.safetensors").rename(weights)
    Client.load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest.json, so its files cannot be"):
        Client.load(folder)


def test_damaged_and_confused_folders_are_refused(target, tmp_path):
    client, server = split_model(target)
    client.save(tmp_path / "client")
    server.save(tmp_path / "server")
    with pytest.raises(CheckpointError, match=r"expected a client in .*, got a server"):
        Client.load(tmp_path / "server")
    with pytest.raises(CheckpointError, match="no client in"):
        Client.load(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        client.save(tmp_path / "client")
    (tmp_path / "client" / "weights.safetensors").write_bytes(
        (tmp_path / "server" / "weights.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match=r"another size than in the manifest\. Save the"):
        Client.load(tmp_path / "client")
    reseal(tmp_path / "client")
    with pytest.raises(CheckpointError, match="does not fit the network"):
        Client.load(tmp_path / "client")


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(2, 3, 8, 8), r"expected float images of shape \(N, 3, 16, 16\)"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "expected float images"),
        (
            torch.full((2, 3, 16, 16), 255.0),
            r"expected images in \[0, 1\], got values from 255 to 255. Divide by 255",
        ),
        (torch.full((2, 3, 16, 16), torch.nan), r"expected images in \[0, 1\]"),
    ],
)
def test_images_that_cannot_be_protected_are_refused(target, images, match):
    with pytest.raises(ConfigError, match=match):
        split_model(target)[0].protect(images)


def test_features_of_another_shape_are_refused(target):
    with pytest.raises(
        ConfigError, match="they come from another model, or from another cut of it"
    ):
        split_model(target)[1].answer(torch.zeros(2, 3, 3))


def test_protections_that_cannot_work_are_refused(target, prior):
    with pytest.raises(ConfigError, match="got adv_learn, which acts during training"):
        split_model(target, AdvLearn(pixel=1.0))
    with pytest.raises(ConfigError, match="got later_cut, which says where to cut: cut the target"):
        split_model(target, LaterCut())
    with pytest.raises(ConfigError, match=r"crafter needs assets\.prior, got none"):
        split_model(target, Crafter(beta=1.0))
    with pytest.raises(ConfigError, match="at least 2"):
        split_model(target, Crafter(beta=1.0, **SHORT), prior=prior)[0].protect(
            torch.zeros(1, *SHAPE)
        )


def test_a_server_is_retrained_on_released_features(target, split):
    client, server = split_model(target)
    features, answers = client.protect(split.train.floats()), targets_for(target, split.train)
    before = {name: tensor.clone() for name, tensor in server.rest.state_dict().items()}
    better = server.retrained(features, answers, epochs=30, lr=3e-3)
    loss = nn.functional.binary_cross_entropy_with_logits
    assert loss(better.answer(features), answers) < 0.8 * loss(server.answer(features), answers)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in server.rest.state_dict().items()
    )
    with pytest.raises(ConfigError, match="expected as many features as answers"):
        server.retrained(features, answers[:3])


def test_a_server_without_layers_cannot_be_retrained(target, split):
    client, server = split_model(replace(target, cut="head"))
    features, answers = client.protect(split.train.floats()), targets_for(target, split.train)
    assert torch.equal(server.answer(features), features)
    with pytest.raises(ConfigError, match="nothing to train: nothing comes after 'head'"):
        server.retrained(features, answers)


def test_a_prior_that_names_code_is_neither_saved_nor_loaded(target, prior, tmp_path, monkeypatch):
    method = {"name": "generator", "parameters": {"source": "spy:build", "latent": "normal:5"}}
    client, _ = split_model(target, Crafter(**SHORT), prior=replace(prior, info={"method": method}))
    with pytest.raises(CheckpointError, match="the client's prior is made by code"):
        client.save(tmp_path / "client")
    with pytest.raises(CheckpointError, match="does not say how it was made"):
        replace(client, prior=replace(prior, info={})).save(tmp_path / "other")
    sound = replace(client, prior=prior).save(tmp_path / "sound")
    write_prior(replace(prior, info={"method": method}), sound / "prior.safetensors")
    reseal(sound)
    (tmp_path / "spy.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="names code to run"):
        Client.load(sound)


def test_answering_does_not_change_the_features(split):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 3)
    )
    client, server = split_model(wrap(net, classes=3, image_shape=SHAPE, cut="0"))
    features = client.protect(split.test.floats())
    before = features.clone()
    server.answer(features)
    assert torch.equal(features, before)
    assert (features < 0).any()


def test_other_precisions_are_converted_and_damaged_facts_refused(target, split, tmp_path):
    client, server = split_model(target)
    images = split.test.floats()
    features = client.protect(images.double())
    assert torch.equal(features, client.protect(images))
    assert torch.equal(server.answer(features.double()), server.answer(features))
    with pytest.raises(ConfigError, match="NaN or infinity"):
        server.answer(torch.full_like(features, torch.nan))
    with pytest.raises(ConfigError, match="expected answers"):
        server.retrained(features, torch.zeros(len(features), 3))
    assert server.retrained(features, split.test.attributes, epochs=1).answer(features).shape == (
        len(features),
        17,
    )
    folder = client.save(tmp_path / "client")
    facts = json.loads((folder / "facts.json").read_text())
    del facts["cut"]
    (folder / "facts.json").write_text(json.dumps(facts))
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"was changed \(cut: required, and not given\)"):
        Client.load(folder)
