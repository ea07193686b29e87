"""What the code of the docs takes for granted, and smaller sizes for what it computes."""

from collections import OrderedDict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import nn

import frostglass as fg
from frostglass.data import Faces
from frostglass.priors import Pretrained
from frostglass.testing import TINY_AUDITS

# Of each page: what is run in place of what. Everything on the left must be on the page.
SMALLER: dict[str, dict[str, str]] = {
    "README.md": {
        '"rank": 10': '"rank": 2',
        '"prior": {"name": "pretrained"}': "**TINY_AND_LONGER",
    },
    "docs/attacks.md": {
        "steps=300": "steps=1, critic_steps=1, batch=4",
        "steps=600": "steps=2",
        "steps=2000": "steps=1, critic_steps=1, batch=4",
    },
    "docs/audit-a-model.md": {
        "size=64)": "size=32, **QUICK)",
        '"size": 64': '"size": 32',
        '{"model": "timm:resnet18", "epochs": 30}': "TINY['target']",
        '"prior": {"name": "wgan", "steps": 20000},': '"prior": TINY["prior"], **EVALUATORS,',
        "pool=5000, candidates=5": "pool=16, steps=2, candidates=2",
        "pool=3000, candidates=5": "pool=16, steps=2, candidates=2",
        "(3, 64, 64)": "(3, 32, 32)",
    },
    "docs/defenses.md": {
        "identities=40, images=60": "identities=4, images=8, public_identities=8",
        "epochs=24": "epochs=1",
    },
    "docs/protect-features.md": {
        "(3, 64, 64)": "(3, 32, 32)",
        "Crafter(beta=1.0)": "Crafter(beta=1.0, steps=1, first_steps=1, index_steps=1, pool=1)",
    },
    "docs/tutorial-model-owner.md": {
        "identities=20, images=40, public_identities=400": "identities=3, images=8, "
        "public_identities=8",
        "epochs=15": "epochs=1",
    },
    "docs/tutorial-split-inference.md": {
        "images=4, public_identities=2": "images=3, public_identities=2"
    },
    "docs/tutorial-researcher.md": {},
}
# Code that cannot run in a test, by a word of it, and why.
NOT_RUN = {
    "ray_cluster": "needs a Ray cluster; tests/slow/test_cluster.py has one",
    "serve_study": "serves until it is interrupted; tests/unit/test_study_server.py does both",
}


# Pages whose code is nearly that of others.
SLOW = ("examples/plugin/README.md", "docs/tutorial-researcher.md")


def given(folder: Path, page: str) -> dict[str, Any]:
    """Return the names that fragments call the reader's own; folders of photos are in `folder`."""
    _write_photos(folder)
    split = _faces()
    if page == "docs/tutorial-split-inference.md":
        _ship(folder)
    module = _network(split)
    target = fg.wrap(module, classes=split.classes, image_shape=split.train.shape)
    images = split.test.floats()
    shape = len(split.classes), 4
    drawn = split.public.floats()[: shape[0] * shape[1]].unflatten(0, shape)
    trace = torch.zeros(*shape, 3, 3)
    reconstructions = fg.Reconstructions(
        drawn, torch.arange(shape[0]), torch.zeros(*shape, 4), torch.ones(shape), 1, 0.0
    )
    evaluator = {"model": "lenet", "epochs": 1}
    return {
        "split": split,
        "target": target,
        "names": split.classes,
        "my_module": module,
        "attributes": split.classes,
        "prior": Pretrained().train(split.public),
        "images": images,
        "victims": split.train.first_of_each(),
        "reconstructions": reconstructions,
        "evaluators": [target],
        "audit": SimpleNamespace(reconstructions=replace(reconstructions, trace=trace)),
        "TINY": TINY_AUDITS["model"],
        "TINY_AND_LONGER": TINY_AUDITS["model"]
        | {"target": {**TINY_AUDITS["model"]["target"], "epochs": 4}},
        "EVALUATORS": {"evaluators": [evaluator]},
        "QUICK": {
            "evaluators": [evaluator],
            "judging": {"positive_control": False},
            "prior": TINY_AUDITS["model"]["prior"],
            "attack": TINY_AUDITS["model"]["attack"],
        },
    }


@cache
def _faces() -> fg.Split:
    data = Faces(identities=4, images=8, public_identities=40, public_images=1)
    return fg.make_split(data, test_fraction=0.25, validation_fraction=0.25, seed=0)


def _ship(folder: Path) -> None:
    """Write what `frostglass protect` and `release` would have written."""
    experiment = fg.Experiment.parse(TINY_AUDITS["features"])
    fg.ship(experiment, fg.Store(folder / ".frostglass"), folder / "split")
    photos = folder / "private" / "private0"
    fg.release_folder(folder / "split" / "client", photos, folder / "features.safetensors")


def _network(split: fg.Split) -> nn.Module:
    """Return the reader's network: it can be cut after `layer1`, and knows the people well."""
    torch.manual_seed(0)
    parts = {
        "layer1": nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU()),
        "flat": nn.Flatten(),
        "head": nn.Linear(8 * 8 * 8, len(split.classes)),
    }
    network = nn.Sequential(OrderedDict(parts))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(60):
        loss = nn.functional.cross_entropy(network(split.train.floats()), split.train.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def _write_photos(folder: Path) -> None:
    """Write the folders that the docs call private and public."""
    data = Faces(identities=4, images=8, public_identities=12, public_images=3)
    for side, photos in zip(("private", "public"), data.tables(), strict=True):
        for number, person in enumerate(photos.labels.tolist()):
            path = folder / side / f"{side}{person}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photos.pixels[number].permute(1, 2, 0).numpy()).save(path)
