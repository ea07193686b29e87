"""`frostglass audit`: a model that its owner has, as a file, a function or an endpoint."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import frostglass as fg
from commands import changed, error_of, frostglass
from endpoints import answering, serving
from frostglass.data.faces import Faces
from given_models import fitted, linear

SIZE, PEOPLE = 16, 4
TINY = changed(
    "prior.steps=2", "prior.width=4", "prior.batch=8", "prior.critic_steps=1",
    'evaluators=[{model="lenet",epochs=1}]', "target.epochs=1",
    "judging.positive_control=false",
)  # fmt: skip
GRADIENTS = changed("attack.steps=2", "attack.pool=8", "attack.candidates=1", "attack.keep=1")
GENETIC = changed(
    "attack.pool=8", "attack.population=4", "attack.elite=1", "attack.generations=1",
    "attack.candidates=1", "attack.keep=1",
)  # fmt: skip
LABELS = changed(
    "attack.points=4", "attack.max_queries=10", "attack.tries=256", "attack.candidates=1",
    "attack.keep=1",
)  # fmt: skip


def write(images, folder):
    for number, label in enumerate(images.labels.tolist()):
        place = folder / images.names[label]
        place.mkdir(parents=True, exist_ok=True)
        pixels = (images.floats([number])[0] * 255).round().byte().permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(place / f"{number}.png")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of people, and a model that knows them: as weights, ONNX, TorchScript, function."""
    root = tmp_path_factory.mktemp("audit")
    data = Faces(size=SIZE, identities=PEOPLE, images=8, public_identities=30, public_images=1)
    private, public = data.tables()
    write(private, root / "private")
    write(public, root / "public")
    model = linear(PEOPLE, (3, SIZE, SIZE))
    weights = fitted(private)
    model.load_state_dict(weights)
    save_file(weights, root / "model.safetensors")
    example = torch.rand(2, 3, SIZE, SIZE)
    torch.jit.trace(model, example).save(root / "script.pt")
    names = {"input_names": ["x"], "output_names": ["y"]}
    free = {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    for name, each in (("logits", model), ("softmax", nn.Sequential(model, nn.Softmax(1)))):
        torch.onnx.export(each, (example,), root / f"{name}.onnx", dynamo=False, **names, **free)
    return root


@pytest.fixture
def here(world, monkeypatch, tmp_path):
    monkeypatch.chdir(world)
    return ["--private", "private", "--public", "public", "--quick", "--store", tmp_path / "store",
            "--out", tmp_path / "out"]  # fmt: skip


def audited(tmp_path):
    """Return the audit of the run that was written."""
    (audit,) = json.loads((tmp_path / "out" / "run.json").read_text())["audits"]
    return audit


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("model.safetensors", ["--arch", "given_models:linear", "--size", 16, *GRADIENTS]),
        ("logits.onnx", ["--access", "scores", *GENETIC]),
        ("softmax.onnx", ["--access", "labels", *LABELS]),
        ("script.pt", ["--access", "scores", "--size", 16, "--trust", *GENETIC]),
    ],
)
def test_files(here, tmp_path, model, options):
    result = frostglass("audit", model, *options, *here, *TINY, "--yes")
    assert result.code == 1, result.err  # no positive control: such an audit proves nothing
    assert "VACUOUS" in result.err
    audit = audited(tmp_path)
    assert audit["target"]["accuracy"]["test"] > 0.9, audit["target"]
    assert audit["queries"] > 0


@pytest.mark.parametrize(("kind", "attack"), [("scores", GENETIC), ("labels", LABELS)])
def test_endpoints(here, tmp_path, kind, attack):
    model = linear(PEOPLE, (3, SIZE, SIZE))
    model.load_state_dict(fitted(Faces(
        size=SIZE, identities=PEOPLE, images=8, public_identities=30, public_images=1
    ).tables()[0]))  # fmt: skip
    access = ["--access", kind, "--size", SIZE]
    with serving(answering(model, kind)) as url:
        result = frostglass("audit", url, *access, *here, *TINY, *attack, "--yes")
        assert result.code == 1, result.err
        assert audited(tmp_path)["target"]["accuracy"]["test"] > 0.9
        if kind == "labels":
            wanted = ["--access", "scores", "--size", SIZE, *GENETIC]
            refused = frostglass("audit", url, *wanted, *here, *TINY, "--yes")
            assert refused.code in (1, 2)
            assert "answers with labels alone" in refused.err


def test_a_network_in_memory(world, tmp_path):
    model = linear(PEOPLE, (3, SIZE, SIZE))
    data = Faces(size=SIZE, identities=PEOPLE, images=8, public_identities=30, public_images=1)
    model.load_state_dict(fitted(data.tables()[0]))
    run = fg.audit_model(
        model,
        private=world / "private",
        public=world / "public",
        store=tmp_path / "store",
        size=SIZE,
        effort="quick",
        prior={"name": "wgan", "steps": 2, "width": 4, "batch": 8, "critic_steps": 1},
        attack={"name": "gmi", "steps": 2, "candidates": 1, "keep": 1},
        evaluators=[{"model": "lenet", "epochs": 1}],
        judging={"positive_control": False},
    )
    assert not run.failed
    assert run.audits[0].trial.target.info["accuracy"]["test"] > 0.9


def test_nobody_to_ask(here):
    options = ["--arch", "given_models:linear", "--size", 16]
    result = frostglass("audit", "model.safetensors", *options, *here, *TINY, *GRADIENTS)
    assert result.code == 2
    assert "repeat the command with --yes" in result.err
    assert "what this config would run" in result.out


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("nothing.pt", [], "no model at nothing.pt: expected a file"),
        ("model.safetensors", [], "--arch: model.safetensors holds weights alone"),
        ("model.safetensors", ["--arch", "given_models:linear"], "--size: expected the pixels"),
        ("logits.onnx", [], "--access weights: logits.onnx can only be asked"),
        ("script.pt", ["--access", "scores", "--size", 16], "can write files"),
        ("logits.onnx", ["--access", "all"], "access: expected weights, scores, labels"),
        ("logits.onnx", ["--thorough"], "--quick and --thorough exclude each other"),
        ("logits.onnx", ["--classes", "none.txt"], "--classes: cannot read none.txt"),
        ("model.safetensors", ["--arch", "timm:resnet18", "--size", 32], "target: "),
        ("http://me:word@host/x", ["--access", "scores", "--size", 16], "has a password"),
    ],
)
def test_what_is_refused_before_anything_is_computed(here, tmp_path, model, options, message):
    line = error_of(frostglass("audit", model, *options, *here, "--yes"))
    assert message in line
    assert not (tmp_path / "out").exists()


def test_without_public_images(world, monkeypatch):
    monkeypatch.chdir(world)
    options = ["--access", "scores", "--private", "private"]
    line = error_of(frostglass("audit", "logits.onnx", *options))
    assert line.startswith("--public: expected a folder of images of other people")
