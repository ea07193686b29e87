"""Secret people: where they come from, who may see them, and an audit of decoys end to end."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from commands import frostglass
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import audit
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import summary
from frostglass.core.errors import ConfigError, DataError
from frostglass.data._checks import check_split
from frostglass.data._splits import load_split, make_split, save_split
from frostglass.data.faces import Faces
from frostglass.data.folder import Folder
from frostglass.plan.estimate import estimate
from frostglass.plan.problems import problems
from frostglass.store.store import Store
from frostglass.training.strangers import strangers_accepted
from worlds import images, split, target

DATA = {
    "size": 16, "identities": 4, "images": 8, "public_identities": 30, "public_images": 2,
}  # fmt: skip
TOY = {
    "name": "toy",
    "data": {"name": "faces", **DATA, "secret_identities": 8, "secret_images": 4},
    "target": {"epochs": 2, "batch": 16, "options": {"width": 4}},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8},
    "attack": {"name": "gmi", "steps": 2, "candidates": 3, "keep": 3},
    "defenses": [{"name": "decoys", "people": 2}],
}


def names(parts):
    return set(parts.public.names), set(parts.secret.names)


def test_withheld_people_leave_the_public_part():
    everyone = make_split(Faces(**DATA), seed=0).public
    parts = make_split(Faces(**DATA), secret_people=10, seed=0)
    public, secret = names(parts)
    assert (len(public), len(secret)) == (20, 10)
    assert public | secret == set(everyone.names)
    assert not public & secret
    for part in (parts.public, parts.secret):
        for row in (0, len(part) - 1):
            whole = everyone.sources.index(part.sources[row])
            assert torch.equal(part.pixels[row], everyone.pixels[whole])
            assert part.names[part.labels[row]] == everyone.names[everyone.labels[whole]]
    assert parts.manifest["secret_people"] == 10


def test_another_seed_withholds_other_people():
    one, other = (make_split(Faces(**DATA), secret_people=10, seed=seed) for seed in (0, 1))
    assert names(one)[1] != names(other)[1]


def test_withheld_people_join_those_of_the_data():
    own = Faces(**DATA, secret_identities=3, secret_images=5)
    assert own.secret_people() == [5, 5, 5]
    parts = make_split(own, secret_people=2, seed=0)
    assert len(parts.secret.names) == 5
    assert parts.secret.labels.bincount().tolist() == [5, 5, 5, 2, 2]


def test_a_saved_split_keeps_its_secret_part(tmp_path):
    parts = make_split(Faces(**DATA), secret_people=10, seed=0)
    save_split(parts, tmp_path)
    again = load_split(tmp_path)
    assert torch.equal(again.secret.pixels[:], parts.secret.pixels[:])
    assert again.secret.names == parts.secret.names
    assert again.evaluators is None


@pytest.mark.parametrize(
    ("side", "message"),
    [("train", "both private and secret"), ("public", "both public and secret")],
)
def test_a_decoy_must_be_nobody_on_another_side(side, message):
    parts = split()
    copied = replace(parts, secret=getattr(parts, side))
    with pytest.raises(DataError, match=f"identities are {message}"):
        check_split(copied)
    renamed = replace(copied.secret, names=tuple(f"new {n}" for n in copied.secret.names))
    with pytest.raises(DataError, match=f"images are {message}"):
        check_split(replace(parts, secret=renamed))


def test_nearly_the_same_image_is_found_too():
    parts = make_split(Faces(**DATA | {"size": 32}), secret_people=10, seed=0)
    mirrored = replace(
        parts.secret, pixels=torch.cat([parts.train.pixels[:1].flip(3), parts.secret.pixels[1:]])
    )
    with pytest.raises(DataError, match="1 secret images are nearly the same as a private one"):
        check_split(replace(parts, secret=mirrored))


def test_withholding_needs_enough_named_people():
    with pytest.raises(ConfigError, match=r"split.secret: expected at most 28, .* got 29"):
        make_split(Faces(**DATA), secret_people=29, seed=0)


@pytest.fixture
def folders(tmp_path):
    rng = torch.Generator().manual_seed(0)
    for side, count in (("private", 2), ("public", 3), ("secret", 2)):
        for who in range(count):
            folder = tmp_path / side / f"{side} {who}"
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = torch.randint(0, 256, (16, 16, 3), generator=rng, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return {side: tmp_path / side for side in ("private", "public", "secret")}


def test_a_folder_of_secret_people_is_read(folders):
    data = Folder(**folders, size=16)
    parts = make_split(data, seed=0)
    assert parts.secret.names == ("secret 0", "secret 1")
    assert data.secret_people() == [4, 4]
    assert any("secret 1" in str(path) for path in data.files())


def test_loose_images_are_no_people(folders):
    loose = folders["secret"] / "secret 0"
    with pytest.raises(DataError, match="holds loose images: secret people need one sub-folder"):
        make_split(Folder(**folders | {"secret": loose}, size=16), seed=0)


def test_an_audit_of_decoys_tells_the_crowd_first_and_any_guess(tmp_path):
    exp = Experiment.parse(TOY)
    store = Store(tmp_path)
    assert problems([("toy", exp)]) == []
    assert estimate([("toy", exp)], store)["memory_unknown"] in ("", None)
    run = run_all(TOY, store)
    facts = json.loads(json.dumps(summary(run)))["audits"][0]
    assert facts["training"]["facts"]["decoys"]["k"] == 3
    assert 0 <= facts["training"]["strangers_accepted"] <= 1
    assert 0 <= facts["agreement"] <= 1
    assert facts["scores"]["verified_1"].keys() >= {"first", "any"}
    assert audit(exp, store).facts["agreement"] == facts["agreement"]  # stored


def test_too_few_secret_people_are_told_before_anything_runs(tmp_path):
    values = TOY | {"data": {**TOY["data"], "secret_identities": 7}}
    (problem,) = problems([("toy", Experiment.parse(values))])
    assert "expected 8 secret people (2 for each of 4 classes), got 7" in problem


def test_the_attacker_never_sees_a_secret_person(tmp_path):
    values = TOY | {"split": {"secret": 8}, "data": {"name": "faces", **DATA}}
    found = audit(Experiment.parse(values), Store(tmp_path))
    seen = found.trial.prior.seen_identities
    assert len(seen) == 22  # of 30 public people
    assert len(found.split.secret.names) == 8


def test_strangers_are_accepted_by_a_model_that_is_sure_of_everything():
    model = target()
    with torch.no_grad():
        model.module[6].weight.zero_()
        model.module[6].bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    assert strangers_accepted(model, split()) == 1.0
    assert strangers_accepted(replace(model, attributes=True), split()) is None


def test_strangers_are_counted_at_the_threshold_of_private_images():
    parts = replace(split(), public=images(40, 5, seed=9, names="stranger"))
    assert strangers_accepted(target(), replace(parts, public=parts.test)) == pytest.approx(
        0.95, abs=0.05
    )


def test_show_explains_decoys():
    result = frostglass("show", "decoys")
    assert result.code == 0
    assert "1 / (m + 1)" in result.out
