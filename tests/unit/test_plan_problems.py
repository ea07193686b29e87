"""Every problem of a config is found before anything is computed, all of them at once."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

from frostglass.auditing.experiment import experiments
from frostglass.core.errors import ConfigError
from frostglass.plan.problems import problems
from frostglass.priors.wgan import Wgan

SMALL = {"epochs": 1, "batch": 16, "options": {"width": 4}}
FACES = {
    "name": "faces",
    "size": 16,
    "identities": 4,
    "images": 10,
    "public_identities": 8,
    "public_images": 4,
}
WGAN = {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8, "latent": 6}
MODEL = {
    "data": FACES,
    "target": {**SMALL, "model": "cnn"},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "prior": WGAN,
    "attack": {"name": "gmi", "steps": 2, "candidates": 2, "keep": 1},
}
CRAFT = {
    "name": "crafter",
    "steps": 2,
    "inner_steps": 2,
    "terms": 2,
    "critic_steps": 1,
    "index_steps": 3,
    "first_steps": 2,
    "batch": 4,
}
FEATURES = {
    "data": FACES,
    "split": {"test": 0.3, "validation": 0.1},
    "target": {**SMALL, "model": "cnn", "attributes": ["all"], "cut": "stage1"},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "embedder": {**SMALL, "model": "resnet"},
    "perceptual": {**SMALL, "model": "cnn"},
    "prior": WGAN,
    "amortizer": {"steps": 2, "batch": 4, "width": 4},
    "attack": {"name": "latent", "steps": 2},
    "judging": {"identities": 3, "images": 2},
}
RESIZED = {"name": "pretrained", "weights": "faces32", "resize": True}


def of_model(changes, **options):
    return problems(experiments(MODEL | changes), **options)


def of_features(changes, **options):
    return problems(experiments(FEATURES | changes), **options)


def one(found, start, *words):
    """Check that there is one problem, and that it says what is expected."""
    (problem,) = found
    assert problem.startswith(start)
    assert all(word in problem for word in words), problem
    assert "\n" not in problem


@pytest.mark.parametrize("check", [of_model, of_features])
def test_a_good_config_has_no_problems(check):
    before = torch.get_rng_state()
    assert check({}) == []
    assert torch.equal(before, torch.get_rng_state())


def test_four_unrelated_problems_are_reported_at_once():
    found = of_model(
        {
            "target": {**SMALL, "model": "cnn", "weights": "nowhere.safetensors"},
            "evaluators": [{"model": "vgg16", "options": {"depth": 3}}],
            "prior": {"name": "pretrained", "weights": "nowhere"},
            "judging": {"identities": 5},
        }
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "target",
        "judging",
        "evaluators[0]",
        "prior",
    ]


# --- data -----------------------------------------------------------------------------------------


def folder_of(place, people, *, images=4):
    for number, person in enumerate(people):
        (place / person).mkdir(parents=True)
        for image in range(images):
            shade = (40 * image + number, 9 * len(place.name), 7 * image)
            Image.new("RGB", (16, 16), shade).save(place / person / f"{person}{image}.png")
    return place


@pytest.fixture
def album(tmp_path):
    """Two folders of images, and a table of attributes of the private ones."""
    private = folder_of(tmp_path / "private", ["anna", "bo"])
    public = folder_of(tmp_path / "public", ["cleo", "dimitri"])
    files = sorted(private.rglob("*.png"))
    lines = [f"{file.relative_to(private).as_posix()},{i % 2},1" for i, file in enumerate(files)]
    (tmp_path / "table.csv").write_text("\n".join(["image,hat,nose", *lines]), encoding="utf-8")
    return {"name": "folder", "private": str(private), "public": str(public), "size": 16}


@pytest.fixture
def split_album(album, tmp_path):
    data = {**album, "attributes": str(tmp_path / "table.csv")}
    return FEATURES | {"data": data, "judging": {"images": 1, "identities": 2}}


def test_folders_of_two_groups_of_people_are_accepted(album, split_album):
    assert of_model({"data": album}) == []
    assert problems(experiments(split_album)) == []


def test_a_missing_folder_is_a_problem(album):
    one(of_model({"data": {**album, "private": "nowhere"}}), "data: ", "no folder at nowhere")


def test_an_unreadable_folder_is_a_problem(album, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "anna")

    monkeypatch.setattr("frostglass.data._catalogue.os.scandir", refuse)
    one(of_model({"data": album}), "data: ", "anna", "Permission denied")


def test_people_without_names_are_a_problem(album, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    Image.new("RGB", (16, 16)).save(loose / "a.png")
    one(of_model({"data": {**album, "private": str(loose)}}), "data: ", "one sub-folder per person")


@pytest.mark.parametrize("images", [1, 2])
def test_too_few_images_of_a_person_are_a_problem(album, tmp_path, images):
    folder_of(tmp_path / "private", ["eve"], images=images)
    found = of_model({"data": album})
    one(found, "data: ", "at least 3 images", f"eve ({images})", "Add images")


def test_the_same_folder_on_both_sides_is_a_problem(album, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(album["private"])
    for public in (album["private"], str(link)):
        one(of_model({"data": {**album, "public": public}}), "data: ", "same one twice")


def test_a_person_on_both_sides_is_a_problem(album, tmp_path):
    folder_of(tmp_path / "public", ["anna"])
    one(of_model({"data": album}), "data: ", "private and public at once: anna")


def test_networks_trained_on_public_people_need_named_ones(album, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (16, 16)).save(flat / "a.png")
    data = {**album, "public": str(flat)}
    assert of_model({"data": data}) == []
    started = {"data": data, "target": {**SMALL, "start": "public"}}
    one(of_model(started), "data: ", "training on public people")


def test_attributes_must_exist_and_vary(split_album):
    def with_attributes(*names):
        target = {**FEATURES["target"], "attributes": list(names)}
        return problems(experiments(split_album | {"target": target}))

    one(with_attributes("nose"), "target: ", "same for all private images")
    assert any("beard" in problem for problem in with_attributes("beard"))
    assert with_attributes("hat") == []


def test_public_attributes_are_needed_only_to_start_there(split_album):
    begun = split_album | {"target": {**FEATURES["target"], "start": "public"}}
    one(problems(experiments(begun)), "data: ", "public images have no attributes")


def test_some_person_needs_two_training_images(tmp_path):
    few = {"data": {**FACES, "images": 3}, "judging": {"images": 1}}
    one(of_features(few), "data: ", "at least 2 training images", "3 images, 2 held out")
    assert of_features(few, attacks=False) == []


# --- networks, judging ----------------------------------------------------------------------------


def test_networks_that_cannot_be_built_are_problems():
    one(of_model({"target": {"model": "cnn", "options": {"depth": 99}}}), "target: ", "depth")
    cut = {**FEATURES["target"], "cut": "stage9"}
    assert of_features({"target": cut})[0].startswith("target: ")


def test_weights_that_do_not_fit_are_problems(tmp_path):
    torch.save(nn.Linear(3, 4).state_dict(), tmp_path / "other.pth")
    found = of_model({"target": {**SMALL, "weights": str(tmp_path / "other.pth")}})
    assert found[0].startswith("target: ")
    found = of_model({"target": {**SMALL, "start": str(tmp_path / "nowhere.pth")}})
    assert "nowhere.pth" in found[0]


class Reading(nn.Module):
    """A network that reads values of its input, which meta tensors do not have."""

    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(768, max(512, classes))
        self.head = nn.Linear(512, classes)

    def forward(self, images):
        assert images.detach().numpy() is not None
        return self.head(self.layer(images.flatten(1)))


def reading(classes, image_shape):
    return Reading(classes)


def test_a_network_that_reads_values_is_accepted():
    assert of_model({"target": {"model": f"{__name__}:reading"}}) == []


def test_problems_of_defenses_are_found():
    found = of_model({"defenses": [{"name": "calor", "rank": 99}]})
    one(found, "target: ", "99", "rank")


def test_more_people_than_there_are_is_a_problem():
    for found in (
        of_model({"judging": {"identities": 5}}),
        of_features({"judging": {"identities": 5}}),
    ):
        one(found, "judging: identities must be at most 4", "got 5", "Lower it")


def test_more_images_than_are_held_out_is_a_problem():
    one(of_features({"judging": {"images": 4}}), "judging: images must be at most 3", "got 4")


# --- priors and attacks ---------------------------------------------------------------------------


def test_a_prior_may_need_more_public_images():
    changes = {
        "prior": {"name": "conditional", "width": 4, "top": 33},
        "attack": {"name": "plgmi"},
    }
    one(of_model(changes), "prior: ", "33", "32 public images")


def test_what_is_wrong_with_a_prior_is_reported_once():
    changes = {"prior": {"name": "pretrained", "weights": "nowhere"}, "defenses": [CRAFT]}
    one(of_features(changes), "prior: ")


def test_an_attack_that_does_not_fit_the_prior_is_a_problem():
    found = of_model({"attack": {"name": "lomma"}})
    assert all(problem.startswith("attack: lomma") for problem in found)
    assert any("students" in problem for problem in found)


def test_a_prior_fitted_with_more_access_than_the_attack_has_is_a_problem():
    tied = {"name": "kplus1", "width": 4}
    found = of_model({"prior": tied, "attack": {"name": "brepmi", "points": 8, "batch": 32}})
    assert any("brepmi has access to labels only" in problem for problem in found)
    students = {"name": "students", "base": WGAN, "students": [{"model": "cnn"}]}
    assert of_model({"prior": students, "attack": {"name": "lomma"}}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attack": {"name": "latent", "adapt": 33}}, ("latent.adapt", "33", "32")),
        ({"attack": {"name": "decoder", "adapt": 33}}, ("decoder.adapt", "33", "32")),
        ({"attack": {"name": "hybrid", "starter": {"adapt": 33}}}, ("decoder.adapt", "33", "32")),
        ({"attack": {"name": "latent", "adapt": 1}}, ("latent.adapt", "held out", "got 1")),
        ({"attack": {"name": "mapper", "validation": 0.99}}, ("mapper", "32", "held out")),
    ],
)
def test_attacks_need_enough_public_images(changes, words):
    one(of_features(changes), "attack: ", *words)


def test_a_protection_that_does_not_fit_is_a_problem():
    odd = {"data": {**FACES, "size": 24}, "prior": RESIZED, "defenses": [CRAFT]}
    assert any("crafter" in problem and "24" in problem for problem in of_features(odd))
    found = of_features({"prior": RESIZED, "defenses": [{"name": "crafter_z"}]})
    assert any("3×32×32" in problem and "3×16×16" in problem for problem in found)


def test_features_have_no_condition_for_a_prior():
    found = of_features({"prior": {"name": "context", "diversity": 0.0}})
    assert "prior: context generates images for a given hint" in found[0]


@pytest.mark.parametrize("name", ["crafter", "crafter_z"])
def test_a_critic_that_is_missing_is_a_problem(name, monkeypatch):
    whole = Wgan.untrained
    monkeypatch.setattr(
        Wgan, "untrained", lambda self, *given: replace(whole(self, *given), critic=None)
    )
    one(of_features({"defenses": [{"name": name, "realism": 1.0}]}), "defenses: ", "realism")
    one(of_features({"attack": {"name": "latent", "critic_weight": 1.0}}), "attack: ", "critic")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"metrics": [{"name": "accuracy"}]}, "metrics: verification is required"),
        ({"data": {**FACES, "images": 1}}, "data.images: expected at least 3, got 1"),
        ({"attack": {"name": "decoder"}}, "attack: decoder attacks features"),
        ({"judging": {"identities": 1}}, "judging.identities: expected at least 2, got 1"),
        ({"defenses": [CRAFT]}, "defenses: crafter acts on features"),
    ],
)
def test_a_config_alone_tells_some_problems(changes, match):
    with pytest.raises(ConfigError, match=match):
        experiments(MODEL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attack": {"name": "latent", "adapt": 32}, "defenses": [CRAFT]},
        {"attack": {"name": "latent", "start": "amortized"}, "prior": RESIZED},
        {"attack": {"name": "hybrid", "starter": {"epochs": 1}}},
        {"attack": {"name": "decoder", "variant": "perceptual"}, "defenses": [CRAFT]},
        {"judging": {"identities": 4}},
    ],
)
def test_configs_that_can_run_are_accepted(changes):
    assert of_features(changes) == []
