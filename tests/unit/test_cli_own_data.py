"""The command `run` on a user's own images and model: from folders to a report, or one error."""

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from commands import SETTINGS, changed, enter, error_of, frostglass, script
from frostglass.data.faces import photograph
from frostglass.models.build import build
from frostglass.models.checkpoint import save_weights

OWN = f"""
name = "own"

[data]
name = "folder"
private = "photos/private"
public = "photos/public"
size = 16
{SETTINGS}"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """Photos of three private and eight public people, one folder each."""
    root = tmp_path_factory.mktemp("album")
    for side, first, people, shots in (("private", 0, 3, 6), ("public", 1_000_000, 8, 2)):
        for number in range(people):
            folder = root / side / f"{side} {number}"
            folder.mkdir(parents=True)
            pixels, _ = photograph(0, torch.full((shots,), first + number), torch.arange(shots), 16)
            for shot, image in enumerate(pixels):
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{shot}.png")
    return root


@pytest.fixture(autouse=True)
def photos(here, album):
    """A copy of the album to damage, and a config that reads it."""
    shutil.copytree(album, here / "photos")
    (here / "own.toml").write_text(OWN)
    return here / "photos"


def copy_identity(photos):
    shutil.copytree(photos / "private/private 0", photos / "public/PRIVATE 0")


def copy_image(photos):
    shutil.copy(photos / "private/private 0/0.png", photos / "public/public 1/copy.png")


def leave_one_image(photos):
    for path in list((photos / "private/private 1").iterdir())[1:]:
        path.unlink()


def leave_one_person(photos):
    for number in (1, 2):
        shutil.rmtree(photos / f"private/private {number}")


def cut_image(photos):
    path = photos / "public/public 1/0.png"
    path.write_bytes(path.read_bytes()[:100])


def empty_image(photos):
    (photos / "private/private 0/0.png").write_bytes(b"")


def write_text_as_image(photos):
    (photos / "private/private 0/0.png").write_text("no image")


def empty_identity(photos):
    for path in (photos / "private/private 0").iterdir():
        path.unlink()


def empty_side(photos):
    shutil.rmtree(photos / "public")
    (photos / "public").mkdir()


def remove_side(photos):
    shutil.rmtree(photos / "private")


def move_image_out(photos):
    (photos / "private/private 0/0.png").rename(photos / "private/0.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (copy_identity, "1 identities are both private and public: private 0"),
        (
            copy_image,
            r"1 images are both private and public: \w+ private 0/0.png = public public 1/copy.png",
        ),
        (leave_one_image, r"at least 3 images of each private person.*, got private 1 \(1\)"),
        (leave_one_person, "private identities: 1; a classifier needs at least 2"),
        (cut_image, r"1 of 34 images cannot be used: photos/public/public 1/0.png \(.*\)"),
        (
            empty_image,
            r"1 of 34 images cannot be used: photos/private/private 0/0.png \(empty, 0 bytes\)",
        ),
        (
            write_text_as_image,
            r"private 0/0.png \(not a PNG, JPEG, .* image, whatever its name says\)",
        ),
        (empty_identity, "1 sub-folders of photos/private hold no images: private 0"),
        (empty_side, "no images in photos/public .*: expected files ending in .bmp, "),
        (remove_side, "no folder at photos/private: expected one with a sub-folder per identity"),
        (
            move_image_out,
            "photos/private holds 1 loose images beside its sub-folders: photos/private/0.png",
        ),
    ],
)
def test_bad_images(here, photos, damage, message):
    damage(photos)
    result = frostglass("run", "own.toml")
    assert re.search(message, error_of(result, worked=bool(result.progress)))
    assert not (here / "runs").exists()


def cnn(classes=3, seed=5):
    return build("cnn", classes=classes, image_shape=(3, 16, 16), seed=seed, width=4)


def other_classes(path):
    save_weights(cnn(classes=5), path)


def other_names(path):
    save_file({f"net.{name}": value.clone() for name, value in cnn().state_dict().items()}, path)


def old_pickle(path):
    path.write_bytes(pickle.dumps({"weights": print}, protocol=2))


def new_pickle(path):
    path.write_bytes(pickle.dumps({"weights": print}, protocol=4))


def some_text(path):
    path.write_text("these are not weights")


def not_finite(path):
    save_weights(cnn(), path)
    state = load_file(path)
    state["head.bias"][0] = float("nan")
    save_file(state, path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (other_classes, "does not fit Sequential: the checkpoint has 5 classes, the model 3"),
        (other_names, "missing (stage1.0.weight, stage1.1.weight, stage1.1.bias, ...)"),
        (old_pickle, "w holds more than tensors or is damaged; unpickling could run any code"),
        (new_pickle, "w holds more than tensors or is damaged"),
        (some_text, "w is neither safetensors nor a file of torch.save"),
        (not_finite, "1 of its tensors hold NaN or infinity (head.bias)"),
        (lambda path: None, "no checkpoint file at 'w'"),
        (Path.mkdir, "no checkpoint file at 'w'"),
    ],
)
def test_bad_weights_are_refused_before_any_work(here, write, message):
    write(here / "w")
    line = error_of(frostglass("run", "own.toml", *changed("target.weights=w")))
    assert line.startswith("target: ")
    assert message in line
    assert not (here / ".frostglass").exists()


def test_an_order_of_classes_is_checked_by_the_folders_names(here):
    save_weights(cnn(), here / "w")
    order = 'target.classes=["private 0", "private 2", "private 3"]'
    for command in ("check", "run"):
        line = error_of(frostglass(command, "own.toml", *changed("target.weights=w", order)))
        assert line.startswith("target: classes: expected the names of the 3 people, each once")
        assert line.endswith("got 3 without 'private 1' and with the unknown 'private 3'")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet18", "no model named 'resnet18': did you mean 'timm:resnet18'?"),
        ("timm:resnet19", "timm has no model named 'resnet19': did you mean"),
        ("json:make", "no function 'make' in 'json'"),
        ("json:dumps", "json:dumps: missing a required argument: 'obj'"),
    ],
)
def test_bad_models(model, message):
    settings = changed(f"target.model={model}", "target.options={}")
    assert message in error_of(frostglass("run", "own.toml", *settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["target.lr=1e30", "target.batch=4"],
            "the loss is not finite at epoch 0, batch 1 (cross_entropy nan)",
        ),
        (["prior.lr=1e30"], "wgan: the loss is not finite at step 0"),
        (
            ["attack.lr=1e38", "attack.weight=1e38", "attack.clamp=0.0"],
            "was not finite. Lower attack.lr",
        ),
        (
            ["target.lr=1e4", "target.optimizer=sgd"],
            "cnn: NaN or infinity after epoch 1: lower the learning rate",
        ),
    ],
)
def test_a_run_that_diverges_says_where(here, settings, message):
    result = frostglass("run", "own.toml", *changed(*settings))
    assert message in error_of(result, 1, worked=True)
    assert not (here / "runs").exists()


def learn(net, photos):
    """Train a network on the private photos, as a user did before an audit."""
    people = sorted((photos / "private").iterdir())
    files = [(label, path) for label, folder in enumerate(people) for path in folder.iterdir()]
    pixels = [np.asarray(Image.open(path), np.float32).transpose(2, 0, 1) for _, path in files]
    seen, labels = torch.from_numpy(np.stack(pixels)) / 255, torch.tensor([n for n, _ in files])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(seen), labels).backward()
        optimizer.step()
    assert (net(seen).argmax(1) == labels).float().mean() > 0.9


def test_a_good_folder_and_a_model_of_the_users_own(here, photos):
    """From images and a module that only the user has, called as a user does, to a report."""
    (here / "mynet.py").write_text(
        "from torch import nn\n\n"
        "def make(classes, image_shape, hidden):\n"
        "    first, last = nn.Linear(3 * 16 * 16, hidden), nn.Linear(hidden, classes)\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)\n"
    )
    torch.manual_seed(0)
    layers = torch.nn.Linear(768, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3)
    net = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    learn(net, photos)
    torch.save({"state_dict": net.state_dict()}, here / "mine.pt")
    settings = changed(
        "target.model=mynet:make",
        "target.options={hidden=10}",
        "target.weights=mine.pt",
        "judging.identities=2",
    )
    done = script("run", "own.toml", "--json", *settings)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("frostglass: VACUOUS: ")
    facts = json.loads(done.stdout)
    target = facts["audits"][0]["target"]
    assert (target["model"], target["history"]) == ("mynet:make", [])
    assert target["parameters"] == 768 * 10 + 10 + 30 + 3
    assert target["given"]
    assert facts["identities"] == ["private 0", "private 1"]
    assert facts["data"]["manifest"]["parts"]["public"]["images"] == 16
    loaded = [
        path.parent
        for path in here.glob(".frostglass/target/*/target.json")
        if json.loads(path.read_text())["info"]["model"] == "mynet:make"
        and not json.loads(path.read_text())["info"]["history"]
    ]
    assert len(loaded) == 1
    assert torch.equal(load_file(loaded[0] / "weights.safetensors")["1.weight"], net[1].weight)
    assert "private 0" in (here / "runs" / "own" / "report.html").read_text()
