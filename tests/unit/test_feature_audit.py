"""Audits of features at toy scale: what is shared and refused, and the commands around them."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from frostglass.attacks.base import prior_only
from frostglass.auditing import steps
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.pipeline import audit as run_audit
from frostglass.auditing.pipeline import audited_target, split_of
from frostglass.auditing.products import Device, Released
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import summary, write_run
from frostglass.auditing.victims import victims_of
from frostglass.cli.app import app
from frostglass.cli.split import _shipped
from frostglass.core.assets import Assets
from frostglass.core.display import image_grid
from frostglass.core.errors import ConfigError, DataError, ModelError
from frostglass.core.pixels import as_bytes
from frostglass.data._splits import make_split
from frostglass.data.faces import Faces, photograph
from frostglass.deploy.client import Client
from frostglass.deploy.server import Server
from frostglass.models.cut import halves
from frostglass.plan.problems import problems
from frostglass.report.text import toml
from frostglass.store.files import Work
from frostglass.store.store import Store

SMALL = {"epochs": 1, "batch": 16, "options": {"width": 4}}
CRAFT = {
    "name": "crafter",
    "beta": 2.0,
    "steps": 2,
    "inner_steps": 2,
    "terms": 2,
    "critic_steps": 1,
    "index_steps": 2,
    "first_steps": 2,
    "batch": 4,
}
TOY = {
    "name": "toy features",
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 10,
        "public_identities": 8,
        "public_images": 4,
    },
    "split": {"test": 0.3, "validation": 0.1},
    "target": {**SMALL, "model": "cnn", "attributes": ["all"], "cut": "stage1"},
    "evaluators": [{"model": "lenet", "epochs": 1}, {**SMALL, "model": "resnet"}],
    "embedder": {**SMALL, "model": "resnet"},
    "perceptual": {**SMALL, "model": "cnn"},
    "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8, "latent": 6},
    "amortizer": {"steps": 2, "batch": 4, "width": 4},
    "attack": {"name": "latent", "steps": 2},
    "judging": {"identities": 3, "images": 2},
}
GAME = {"name": "adv_learn", "pixel": 1.0, "decoder_width": 4, "head_start": 1, "public_batch": 8}
GRID = {key: value for key, value in TOY.items() if key != "attack"} | {
    "grid": {
        "defenses": [[], [GAME], [CRAFT]],
        "case": [
            {
                "case": "decoder",
                "attack": {
                    "name": "decoder",
                    "epochs": 1,
                    "width": 4,
                    "adapt": 4,
                    "adapt_epochs": 1,
                    "averaged": 2,
                },
            },
            {"case": "latent", "attack": {"name": "latent", "steps": 2, "tries": 2}},
            {"case": "mapper", "attack": {"name": "mapper", "epochs": 1, "width": 4}},
        ],
    }
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return folder, run_all(GRID, Store(folder))


def made(folder):
    return {
        name.name: len([f for f in name.iterdir() if f.is_dir()])
        for name in folder.iterdir()
        if name.is_dir()
    }


def test_steps_are_shared_between_experiments(finished):
    folder, _ = finished
    # Targets: undefended and the same cut, AdvLearn's, two evaluators, the embedder. Pretraining:
    # decoder and mapper for two encoders; Crafter's is the undefended one. Released: the victims'
    # features by two encoders and by Crafter, again by Crafter (averaged), and public images by
    # each (adapted). Baselines have as many images as an attack returns, each with a second set of
    # draws.
    assert made(folder) == {
        "split": 1,
        "target": 6,
        "verifier": 2,
        "prior": 1,
        "pretrain": 4,
        "release": 3 + 1 + 3,
        "attack": 9,
        "prior_only": 2 * 2,
        "scores": 9 + 2 * 2,
    }


def test_one_training_serves_all_cuts(tmp_path, monkeypatch):
    trained = []
    train = steps.train_target
    monkeypatch.setattr(
        steps, "train_target", lambda *args, **kw: trained.append(args[0]) or train(*args, **kw)
    )
    store = Store(tmp_path)
    cuts = {
        cut: Experiment.parse(TOY | {"target": TOY["target"] | {"cut": cut}})
        for cut in ("stage1", "stage2")
    }
    split = split_of(cuts["stage1"], store)
    first, second = (audited_target(exp, store, split) for exp in cuts.values())
    assert [config.cut for config in trained] == [""]
    assert (first.cut, second.cut) == ("stage1", "stage2")
    assert first.key != second.key
    assert first.info["build"]["training"]["cut"] == "stage1"
    assert first.info["seconds"] == second.info["seconds"] > 0  # the training's, not the cut's
    images = split.test.floats()[:2]
    assert torch.equal(first.module(images), second.module(images))
    shapes = [halves(target).feature_shape for target in (first, second)]
    assert shapes[0] != shapes[1]


def test_a_cut_network_after_a_first_stage_is_saved_without_its_times(tmp_path):
    exp = Experiment.parse(TOY | {"target": TOY["target"] | {"start": "public"}})
    store = Store(tmp_path)
    target = audited_target(exp, store, split_of(exp, store))
    assert target.info["stage_seconds"] > 0
    saved = json.loads((tmp_path / "target" / target.key / "target.json").read_text())
    assert saved["cut"] == "stage1"
    assert not set(saved["info"]) & {"seconds", "stage_seconds"}


def test_a_layer_that_cannot_be_cut_at_is_refused_before_the_training(tmp_path):
    exp = Experiment.parse(TOY | {"target": TOY["target"] | {"cut": "stage9"}})
    events = []
    store = Store(tmp_path, listener=events.append)
    split = split_of(exp, store)
    with pytest.raises(ModelError, match="stage9"):
        audited_target(exp, store, split)
    assert {event.step for event in events} == {"split"}


def test_a_second_run_computes_nothing_and_says_the_same(finished):
    folder, first = finished
    events = []
    again = run_all(GRID, Store(folder, listener=events.append))
    assert {event.kind for event in events} == {"cached"}
    assert json.dumps(summary(first)) == json.dumps(summary(again))


def test_shapes_and_labels(finished):
    _, result = finished
    assert result.labels[:3] == ("undefended, decoder", "undefended, latent", "undefended, mapper")
    by = dict(zip(result.labels, result.audits, strict=True))
    assert by["undefended, latent"].reconstructions.images.shape == (
        3,
        4,
        3,
        16,
        16,
    )  # 3 people, 2 × 2
    assert by["undefended, decoder"].reconstructions.images.shape == (3, 2, 3, 16, 16)
    plain, crafted = by["undefended, latent"], by["crafter, latent"]
    assert plain.target.key == crafted.target.key != by["adv_learn, latent"].target.key
    assert plain.facts["facts"]["deviation"] == 0
    assert crafted.facts["facts"]["deviation"] > 0
    assert crafted.trial.exposure.released.facts
    for audit in result.audits:
        assert math.isfinite(audit.facts["utility"]["mean_mcc"])
        assert audit.rows.columns["similarity"].shape == audit.reconstructions.images.shape[:2]


def test_the_mapper_is_scored_by_its_embeddings(finished):
    audit = dict(zip(finished[1].labels, finished[1].audits, strict=True))["undefended, mapper"]
    assert not torch.equal(audit.rows.columns["similarity"], audit.rows.columns["face_similarity"])
    baseline = audit.trial.baseline_rows.columns
    assert torch.equal(baseline["similarity"], baseline["face_similarity"])


def test_the_run_folder_holds_every_number(finished, tmp_path):
    folder = write_run(finished[1], tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    assert {audit["surface"] for audit in facts["audits"]} == {"features"}
    lines = list(csv.DictReader((folder / "rows.csv").open()))
    for audit in facts["audits"]:
        mine = [float(line["similarity"]) for line in lines if line["audit"] == audit["label"]]
        assert sum(mine) / len(mine) == pytest.approx(
            audit["scores"]["similarity"]["value"], abs=1e-5
        )
    with safe_open(folder / "images.safetensors", framework="pt") as file:
        assert file.get_tensor("victims").shape == (3, 2, 3, 16, 16)
        assert set(file.keys()) == {"victims", *(f"audit.{number}" for number in range(9))}


class PrivateError(Exception):
    pass


class Guarded(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise PrivateError(f"private images were touched: {function}")


def test_an_attack_never_touches_private_images(finished):
    """The images on the device raise when touched; an attack gets what was released before."""
    folder, result = finished
    audit = result.audits[1]
    exp, exposure = audit.experiment, audit.trial.exposure
    hidden = replace(exposure.victims, images=torch.zeros(1).as_subclass(Guarded))
    with pytest.raises(PrivateError):
        hidden.images + 1
    guarded = replace(
        exposure, victims=hidden, images=None, device=replace(exposure.device, store=Store(folder))
    )
    reconstructions = steps.ATTACK.make(
        exp.attack,
        exposure=guarded,
        assets=Assets(audit.split.public, audit.trial.prior),
        people=[0, 1, 2],
        pretrained=None,
        seed=0,
        work=Work.scratch(),
        device=torch.device("cpu"),
    )
    assert torch.equal(as_bytes(reconstructions.images).pixels, audit.reconstructions.images.pixels)


def test_victims_are_the_first_held_out_images_of_each_person():
    split = make_split(
        Faces(size=16, identities=4, images=10, public_identities=4, public_images=1),
        test_fraction=0.3,
        validation_fraction=0.1,
        seed=0,
    )
    victims = victims_of(Experiment.parse(TOY), split)
    assert victims.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert set(victims.sources) <= set(split.test.sources)
    with pytest.raises(ConfigError, match=r"expected 9 held-out images of each person, got 3"):
        victims_of(Experiment.parse(TOY | {"judging": {"identities": 3, "images": 9}}), split)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"defenses": [{**CRAFT, "beta": -1.0}]},
            r"defenses\[0\].beta: expected at least 0, got -1.0",
        ),
        (
            {"defenses": [{"name": "adv_learn", "pixel": -1.0}]},
            r"defenses\[0\].pixel: expected at least 0",
        ),
        ({"metrics": []}, "metrics: at least one is needed"),
        ({"prior": None}, "prior: expected a table with a name"),
    ],
)
def test_configs_that_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        Experiment.parse(TOY | change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target": {**TOY["target"], "cut": "nowhere"}}, "has no layer named 'nowhere'"),
        (
            {"target": {**TOY["target"], "model": "resnet", "cut": "stage1.0.conv1"}},
            "splits a skip connection",
        ),
        (
            {"target": {**TOY["target"], "attributes": ["wings"]}},
            "the data has no attribute 'wings'; it has glasses",
        ),
        ({"judging": {"images": 9}}, "judging: images must be at most 3"),
        ({"data": {**TOY["data"], "public_images": 1}}, "data: "),
        (
            {"prior": {"name": "pretrained", "weights": "faces32"}},
            "faces32 .*32×32.*16×16",
        ),
    ],
)
def test_problems_are_found_before_anything_is_computed(change, match):
    with pytest.raises(ConfigError, match=match):
        raise ConfigError(problems(experiments(TOY | change)))


def png_bytes(image: torch.Tensor) -> bytes:
    data = io.BytesIO()
    image_grid(image[None]).save(data, format="PNG")
    return data.getvalue()


def photographs(root):
    """Write 5 images of 3 private and 3 public people; return the lines of an attribute table.

    Its second attribute never varies.
    """
    lines = []
    for side, first in (("private", 0), ("public", 50)):
        for person in range(first, first + 3):
            pixels, _ = photograph(0, torch.full((5,), person), torch.arange(5), 16)
            (root / side / f"person {person}").mkdir(parents=True)
            for number, image in enumerate(pixels):
                name = f"person {person}/{number}.png"
                (root / side / name).write_bytes(png_bytes(image / 255))
                lines += [f"{name},{number % 2},1"] if side == "private" else []
    return lines


def test_attributes_that_never_vary_are_found_before_anything_is_computed(tmp_path):
    lines = photographs(tmp_path)
    (tmp_path / "table.csv").write_text("\n".join(["image,own,same", *lines]))
    data = {
        "name": "folder",
        "private": tmp_path / "private",
        "public": tmp_path / "public",
        "size": 16,
        "attributes": tmp_path / "table.csv",
    }

    def problems_of(*attributes):
        return problems(
            experiments(
                TOY
                | {
                    "data": data,
                    "judging": {"images": 1},
                    "target": {**TOY["target"], "attributes": attributes},
                }
            )
        )

    assert problems_of("all") == problems_of("own") == []
    (problem,) = problems_of("same")
    assert "same" in problem
    assert "Name one that varies" in problem
    (tmp_path / "table.csv").write_text("\n".join(["image,own,same", *lines[1:]]))
    (problem,) = problems_of("all")
    assert "1 of 15 private images" in problem
    assert "person 0/0.png" in problem


def test_victims_who_are_all_alike_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "frostglass.auditing.victims.attributes_in",
        lambda images, names: torch.ones(len(images), len(names)),
    )
    with pytest.raises(DataError, match=r"17 attributes .*6 images"):
        run_audit(Experiment.parse(TOY), Store(tmp_path))
    assert set(made(tmp_path)) == {"split"}


def test_a_problem_of_part_of_a_grid_comes_with_its_place():
    grid = TOY | {
        "grid": {
            "seed": [0],
            "defenses": [[], [{**CRAFT, "beta": -1.0}], [{**CRAFT, "beta": 3.0}]],
            "target.epochs": [1, 2],
        }
    }
    with pytest.raises(ConfigError) as caught:
        experiments(grid)
    label = (
        "seed=0, crafter(beta=-1.0, steps=2, inner_steps=2, terms=2, critic_steps=1, "
        "index_steps=2, first_steps=2, batch=4), target.epochs=1"
    )
    assert caught.value.problems == (
        "defenses[0].beta: expected at least 0, got -1.0; the default is 2.0 "
        f"(in the grid's {label!r} and 1 more)",
    )
    with pytest.raises(ConfigError) as caught:
        experiments(grid | {"split": {"test": 2.0}})
    problem = 'split.test: expected more than 0 and less than 1, or "published", got 2.0'
    assert problem in caught.value.problems  # which is everywhere


def test_experiments_of_one_run_share_their_scale():
    with pytest.raises(ConfigError, match="grid: judging must be the same"):
        experiments(TOY | {"grid": {"judging.images": [1, 2]}})


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(toml(GRID))
    return path


def test_the_commands(finished, config, tmp_path):
    store, _ = finished
    done = call("run", config, "--store", store, "--out", tmp_path / "run")
    assert done.exit_code == 1, done.output  # a toy attack proves nothing
    assert "VACUOUS" in done.output + done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    checked = call("check", config, "--store", store, "--json")
    assert checked.exit_code == 0, checked.output
    assert "crafter" in checked.output
    several = call("protect", config, "--store", store, "--out", tmp_path / "split")
    assert several.exit_code == 2
    assert "name one with --only" in several.stderr
    protected = call(
        "protect",
        config,
        "--store",
        store,
        "--out",
        tmp_path / "split",
        "--only",
        "crafter",
        "--json",
    )
    assert protected.exit_code == 0, protected.output
    told = json.loads(protected.stdout)
    client, server = Client.load(told["client"]), Server.load(told["server"])
    assert client.protection.name == "crafter"
    assert (
        call(
            "protect",
            config,
            "--store",
            store,
            "--out",
            tmp_path / "split",
            "--only",
            "crafter",
        ).exit_code
        == 2
    )

    album = tmp_path / "album"
    album.mkdir()
    for number in range(3):
        (album / f"{number}.png").write_bytes(png(number))
    released = call("release", told["client"], album, "--out", tmp_path / "features.safetensors")
    assert released.exit_code == 0, released.output
    with safe_open(tmp_path / "features.safetensors", framework="pt") as file:
        features = file.get_tensor("features")
        assert json.loads(file.metadata()["values"])["images"] == ["0.png", "1.png", "2.png"]
    assert server.answer(features).shape == (3, 17)
    assert not list(tmp_path.glob(".*.partial"))
    assert (
        call("release", told["client"], album, "--out", tmp_path / "features.safetensors").exit_code
        == 2
    )
    assert call("release", tmp_path, album, "--out", tmp_path / "other.safetensors").exit_code == 2


def test_what_is_shipped_has_no_attack():
    """Cases are attacks; one that brings a prior of its own changes what Crafter releases."""
    names = ["undefended", "adv_learn", "crafter"]
    assert list(_shipped(experiments(GRID))) == names
    cases_first = dict(reversed(GRID["grid"].items()))
    assert list(_shipped(experiments({**GRID, "grid": cases_first}))) == names
    alone = {**TOY, "grid": {"defenses": [[], [GAME], [CRAFT]]}}
    assert list(_shipped(experiments(alone))) == names
    cases = [*GRID["grid"]["case"][:2], {"case": "other", "prior": {"name": "pretrained"}}]
    cases[2]["attack"] = cases[1]["attack"]
    own = {**GRID, "grid": {"defenses": [[CRAFT]], "case": cases}}
    shipped = _shipped(experiments(own))
    assert list(shipped) == ["crafter", "crafter, other"]
    assert shipped["crafter, other"].prior.name == "pretrained"


def test_a_split_model_is_shipped_without_what_only_attacks_need(config, tmp_path):
    """Public images too few for an embedder, and evaluators that cannot be built, do not matter."""
    changes = (
        "data.public_images=1",
        "evaluators.0.model=nothing",
        "embedder.model=nothing",
        "grid.defenses=[[]]",
        "attacker_prior={name='pretrained'}",
    )
    settings = [word for change in changes for word in ("--set", change)]
    done = call(
        "protect",
        config,
        "--store",
        tmp_path / "store",
        "--out",
        tmp_path / "split",
        "--only",
        "undefended",
        "--json",
        *settings,
    )
    assert done.exit_code == 0, done.stderr
    assert set(made(tmp_path / "store")) == {"split", "target", "release"}
    # What it does need it still asks for.
    for more, message in (
        ("target.cut=nowhere", "no layer named 'nowhere'"),
        ("judging.images=9", "images"),
        ("target.start=public", "needs at least 2 people"),
    ):
        done = call(
            "protect",
            config,
            "--store",
            tmp_path / "store",
            "--out",
            tmp_path / "other",
            "--only",
            "undefended",
            *settings,
            "--set",
            more,
        )
        assert done.exit_code == 2
        assert message in done.stderr
    assert (
        call(
            "run", config, "--store", tmp_path / "store", "--out", tmp_path / "run", *settings
        ).exit_code
        == 2
    )


def png(number: int) -> bytes:
    return png_bytes(torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(number)))


def test_one_experiment_alone_runs(tmp_path):
    exp = Experiment.parse(TOY | {"attack": {"name": "hybrid", "start": "noise", "steps": 2}})
    audit = run_audit(exp, Store(tmp_path))
    assert audit.reconstructions.images.shape == (3, 2, 3, 16, 16)
    assert Path(tmp_path / "attack").is_dir()


def test_without_a_prior_the_baseline_is_public_images(tmp_path):
    plain = {key: value for key, value in TOY.items() if key not in ("prior", "attack")}
    with pytest.raises(ConfigError, match="prior: latent needs one, got none"):
        Experiment.parse(plain | {"attack": {"name": "latent"}})
    exp = Experiment.parse(plain | {"attack": {"name": "decoder", "epochs": 1, "width": 4}})
    audit = run_audit(exp, Store(tmp_path))
    assert not (tmp_path / "prior").exists()
    baseline = audit.trial.baseline
    again = prior_only(None, range(3), 2, public=audit.split.public, seed=exp.seed)
    assert torch.equal(baseline.images[:], again.images)
    strangers = audit.split.public.floats()
    assert all((strangers == image).flatten(1).all(1).any() for image in again.images.flatten(0, 1))


def test_a_prior_of_another_size_serves(tmp_path):
    exp = Experiment.parse(
        TOY
        | {
            "prior": {"name": "pretrained", "weights": "faces32", "resize": True},
            "attack": {"name": "latent", "steps": 1, "start": "amortized"},
        }
    )
    audit = run_audit(exp, Store(tmp_path))
    assert audit.reconstructions.images.shape[2:] == (3, 16, 16)


def test_features_without_information_are_reported(tmp_path, monkeypatch):
    """The strongest possible protection must not make an audit fail."""
    monkeypatch.setattr(
        Device,
        "release",
        lambda self, batch, number=0: Released(
            torch.zeros(len(batch.images), 4, 8, 8), key="nothing"
        ),
    )
    exp = Experiment.parse(
        TOY
        | {
            "attack": {"name": "decoder", "epochs": 1, "width": 4},
            "judging": {"identities": 3, "images": 2, "positive_control": False},
        }
    )
    audit = run_audit(exp, Store(tmp_path))
    assert audit.facts["facts"]["lda"] is None
    assert audit.reconstructions.images[:].flatten(2).std(1).max() < 1e-6


def test_crafter_goes_with_weights_of_ones_own():
    values = TOY | {"target": {**TOY["target"], "weights": "mine.safetensors"}, "defenses": [CRAFT]}
    assert Experiment.parse(values).protection.name == "crafter"
