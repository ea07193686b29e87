"""Audits of split models on a toy scale: what is shared, what is refused, what a restart leaves, and the commands around them."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from frostglass.audit import feature_pipeline
from frostglass.audit.config import Experiment
from frostglass.audit.feature_controls import judge_features
from frostglass.audit.feature_grid import feature_summary, run_all_features, write_feature_run
from frostglass.audit.feature_pipeline import Pictures, run_features, victims_of
from frostglass.audit.features import FeatureExperiment, feature_experiments, is_about_features
from frostglass.cli.main import app
from frostglass.core.errors import ConfigError, DataError
from frostglass.data._splits import make_split
from frostglass.data.faces import Faces, photograph
from frostglass.deploy.client import Client, Server
from frostglass.metrics.base import Rows
from frostglass.plan.feature_cost import feature_problems
from frostglass.report.charts import toml
from frostglass.store.files import sheet_of
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
    "judging": {"identities": 3, "pictures": 2},
}
GRID = {key: value for key, value in TOY.items() if key != "attack"} | {
    "grid": {
        "defenses": [[], [{"name": "adv_learn", "pixel": 1.0}], [CRAFT]],
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
    return folder, run_all_features(GRID, Store(folder))


def made(folder):
    return {
        name.name: len([f for f in name.iterdir() if f.is_dir()])
        for name in folder.iterdir()
        if name.is_dir()
    }


def test_steps_are_shared_between_experiments(finished):
    folder, _ = finished
    # Targets: undefended, AdvLearn's, two evaluators, the embedder. Lessons: decoder and mapper for two encoders; Crafter's is the undefended one. Released: the victims'
    # features by two encoders and by Crafter, once more by Crafter (averaged), and public pictures by each (adapted). Blind draws are as many as an attack makes, and others to
    # compare them with; they are scored beside each target.
    assert made(folder) == {
        "split": 1, "target": 5, "prior": 1, "lesson": 4, "release": 3 + 1 + 3, "intercept": 9, "blind": 2 * 2, "feature_scores": 9 + 2 * 2,
    }  # fmt: skip


def test_a_second_run_computes_nothing_and_says_the_same(finished):
    folder, first = finished
    events = []
    again = run_all_features(GRID, Store(folder, listener=events.append))
    assert {event.kind for event in events} == {"cached"}
    assert json.dumps(feature_summary(first)) == json.dumps(feature_summary(again))


def test_shapes_and_labels(finished):
    _, result = finished
    assert result.labels[:3] == ("undefended, decoder", "undefended, latent", "undefended, mapper")
    by = dict(zip(result.labels, result.audits, strict=True))
    assert by["undefended, latent"].found.images.shape == (
        3,
        4,
        3,
        16,
        16,
    )  # two pictures of each of three people, two tries
    assert by["undefended, decoder"].found.images.shape == (3, 2, 3, 16, 16)
    plain, crafted = by["undefended, latent"], by["crafter, latent"]
    assert plain.target.key == crafted.target.key != by["adv_learn, latent"].target.key
    assert plain.facts["deviation"] == 0
    assert crafted.facts["deviation"] > 0
    assert crafted.released.facts
    for audit in result.audits:
        assert math.isfinite(audit.utility["mean_mcc"])
        assert audit.rows.columns["similarity"].shape == audit.found.images.shape[:2]


def test_the_mapper_is_judged_by_its_embeddings(finished):
    audit = dict(zip(finished[1].labels, finished[1].audits, strict=True))["undefended, mapper"]
    assert not torch.equal(audit.rows.columns["similarity"], audit.rows.columns["face_similarity"])
    assert torch.equal(
        audit.prior_rows.columns["similarity"], audit.prior_rows.columns["face_similarity"]
    )


def test_the_run_folder_holds_every_number(finished, tmp_path):
    folder = write_feature_run(finished[1], tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    assert facts["kind"] == "features"
    lines = list(csv.DictReader((folder / "rows.csv").open()))
    for audit in facts["audits"]:
        mine = [float(line["similarity"]) for line in lines if line["audit"] == audit["label"]]
        assert sum(mine) / len(mine) == pytest.approx(
            audit["scores"]["similarity"]["value"], abs=1e-5
        )
    with safe_open(folder / "pictures.safetensors", framework="pt") as file:
        assert file.get_tensor("victims").shape == (3, 2, 3, 16, 16)
        assert set(file.keys()) == {"victims", *(f"audit.{number}" for number in range(9))}


class PrivateError(Exception):
    pass


class Guarded(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise PrivateError(f"somebody touched private pictures: {function}")


def test_an_attack_never_touches_private_pictures(finished):
    """The pictures on the device raise when touched; what was released before is all an attack gets."""
    folder, result = finished
    audit = result.audits[1]
    store = Store(folder)
    exp = audit.experiment
    device = feature_pipeline.device_of_experiment(exp, store, audit.split)
    pictures = Pictures.of(audit.victims.floats())
    hidden = replace(pictures, images=torch.zeros(1).as_subclass(Guarded))
    line = feature_pipeline.Line(device, hidden, audit.released.key)
    with pytest.raises(PrivateError):
        hidden.images + 1
    prior = feature_pipeline.attackers_prior(exp, store, audit.split)
    found = feature_pipeline._intercept(
        exp.attack,
        line,
        audit.split.public,
        prior,
        None,
        None,
        None,
        [0, 1, 2],
        seed=0,
        work=feature_pipeline.Work.scratch(),
    )
    assert torch.equal(found.images, audit.found.images)


def test_victims_are_the_first_held_out_pictures_of_each_person():
    split = make_split(
        Faces(size=16, identities=4, images=10, public_identities=4, public_images=1),
        test_fraction=0.3,
        validation_fraction=0.1,
        seed=0,
    )
    people, victims = victims_of(split, 3, 2)
    assert people == [0, 1, 2]
    assert victims.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert set(victims.sources) <= set(split.test.sources)
    with pytest.raises(ConfigError, match="9 held-out pictures of each person are wanted"):
        victims_of(split, 3, 9)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target": {**TOY["target"], "cut": None}}, "target.cut: required, and not given"),
        (
            {"target": {**SMALL, "model": "cnn", "cut": "stage1"}},
            "target.attributes: required, and not given",
        ),
        (
            {"defenses": [CRAFT, {"name": "crafter_z", "beta": 1.0}]},
            "crafter and crafter_z both decide what leaves the device",
        ),
        (
            {"defenses": [{"name": "bido"}]},
            "bido defends a classifier of people, and a split model tells attributes",
        ),
        ({"prior": {"name": "kplus1"}}, "kplus1 is fitted to a classifier of the attacked people"),
        ({"attack": {"name": "gmi"}}, "no feature attack named 'gmi'"),
        (
            {"defenses": [{**CRAFT, "beta": -1.0}]},
            r"defenses\[0\].beta: expected at least 0, got -1.0",
        ),
        (
            {"defenses": [{"name": "adv_learn", "pixel": -1.0}]},
            r"defenses\[0\].pixel: expected at least 0",
        ),
        ({"metrics": []}, "metrics: no such section"),
        ({"prior": None}, "prior: expected a table with a name"),
        (
            {"embedder": {**SMALL, "attributes": ["all"]}},
            "embedder: tells people apart, and is not cut: leave attributes out",
        ),
        (
            {"evaluators": [{**SMALL, "cut": "stage1"}]},
            r"evaluators\[0\]: tells people apart, and is not cut: leave cut out",
        ),
    ],
)
def test_configs_that_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        FeatureExperiment.parse(TOY | change)


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
        (
            {"judging": {"pictures": 9}},
            "judging: pictures is 9, and about 3 of each person's are held out",
        ),
        ({"data": {**TOY["data"], "public_images": 1}}, "data: "),
        (
            {"prior": {"name": "pretrained", "weights": "faces32"}},
            "faces32 makes pictures of 32×32 pixels, the data has 16×16",
        ),
    ],
)
def test_problems_are_told_before_anything_is_computed(change, match):
    with pytest.raises(ConfigError, match=match):
        raise ConfigError(feature_problems(feature_experiments(TOY | change)))


def photographs(root):
    """Three private people with five pictures each and three public ones, as files; of the private ones the lines of a table whose second column never varies."""
    lines = []
    for side, first in (("private", 0), ("public", 50)):
        for person in range(first, first + 3):
            pixels, _ = photograph(0, torch.full((5,), person), torch.arange(5), 16)
            (root / side / f"person {person}").mkdir(parents=True)
            for number, image in enumerate(pixels):
                name = f"person {person}/{number}.png"
                (root / side / name).write_bytes(sheet_of(image[None] / 255))
                lines += [f"{name},{number % 2},1"] if side == "private" else []
    return lines


def test_attributes_that_never_vary_are_told_before_anything_is_computed(tmp_path):
    lines = photographs(tmp_path)
    (tmp_path / "table.csv").write_text("\n".join(["picture,own,same", *lines]))
    data = {
        "name": "folder",
        "private": tmp_path / "private",
        "public": tmp_path / "public",
        "size": 16,
        "attributes": tmp_path / "table.csv",
    }

    def told(*attributes):
        return feature_problems(
            feature_experiments(
                TOY
                | {
                    "data": data,
                    "judging": {"pictures": 1},
                    "target": {**TOY["target"], "attributes": attributes},
                }
            )
        )

    assert told("all") == told("own") == []
    assert told("same") == [
        "target: attributes: all private pictures have the same same, so nothing can be learned or measured: name one that varies, or mend the table in data.attributes"
    ]
    (tmp_path / "table.csv").write_text("\n".join(["picture,own,same", *lines[1:]]))
    assert told("all")[0].startswith(
        f"data: {tmp_path / 'table.csv'} says nothing of 1 of 15 private pictures: person 0/0.png"
    )


def test_victims_who_are_all_alike_are_told_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(
        feature_pipeline, "attributes_in", lambda images, names: torch.ones(len(images), len(names))
    )
    with pytest.raises(
        DataError,
        match=r"each of 17 attributes has the same answer for all 6 pictures: .* take more people or pictures \(judging\.identities",
    ):
        run_features(FeatureExperiment.parse(TOY), Store(tmp_path))
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
        feature_experiments(grid)
    label = "seed=0, crafter(beta=-1.0, steps=2, inner_steps=2, terms=2, critic_steps=1, index_steps=2, first_steps=2, batch=4), target.epochs=1"
    assert caught.value.problems == (
        f"defenses[0].beta: expected at least 0, got -1.0; the default is 2.0 (in the grid's {label!r} and 1 more)",
    )
    with pytest.raises(ConfigError) as caught:
        feature_experiments(grid | {"split": {"test": 2.0}})
    assert (
        "split.test: expected less than 1, got 2.0; the default is 0.2" in caught.value.problems
    )  # which is everywhere


def test_no_cut_cannot_be_said_by_a_word(config):
    done = call("check", config, "--set", "target.cut=none")
    assert done.exit_code == 2
    message = "target.cut: 'none' names no layer; name one, such as \"stage1\", or audit the whole model: with a config that has no target.cut"
    assert message in done.stderr


def test_experiments_of_one_run_share_their_scale():
    with pytest.raises(ConfigError, match="grid: judging must be the same"):
        feature_experiments(TOY | {"grid": {"judging.pictures": [1, 2]}})


def test_which_configs_are_about_features():
    assert is_about_features(TOY)
    assert is_about_features({"grid": {"target": {"cut": ["stage1", "stage2"]}}})
    assert is_about_features({"grid": {"target.cut": ["stage1"]}})
    assert is_about_features({"grid": {"case": [{"case": "a", "target": {"cut": "stage1"}}]}})
    assert not is_about_features({"target": {"model": "cnn"}, "grid": {"defenses": [[]]}})


def rows(similarity, hits=0.0):
    table = torch.tensor(similarity).reshape(-1, 1)
    return Rows(
        labels=torch.arange(len(table)),
        columns={"similarity": table, "top1_1": torch.full_like(table, hits)},
    )


def test_controls():
    scale = {"same_person": 0.8, "different_people": 0.0}
    blind, strong, weak = rows([0.0, 0.1] * 10), rows([0.7, 0.8] * 10), rows([0.1, 0.2] * 10)
    given = {"margin": 0.2, "evaluators": [SimpleNamespace(info={"accuracy": {"test": 0.95}})]}
    sound = judge_features(weak, blind, (strong, blind), scale, **given)
    assert sound.vacuous == ""
    assert sound.lift[0].value == pytest.approx(0.1)
    assert (
        "does not rebuild people from unprotected features"
        in judge_features(weak, blind, (weak, blind), scale, **given).vacuous
    )
    assert "no positive control" in judge_features(weak, blind, None, scale, **given).vacuous
    assert (
        "search broke off for 11 of 20 people"
        in judge_features(weak, blind, (strong, blind), scale, partial=11, **given).vacuous
    )
    assert (
        "partial: the search broke off for 1 of 20"
        in judge_features(
            weak, blind, (strong, blind), scale, partial=1, broken=3, **given
        ).warnings[0]
    )
    near = scale | {"different_people": 0.55}
    assert (
        "hardly more like the victims"
        in judge_features(weak, blind, (strong, blind), near, **given).vacuous
    )
    assert (
        "whom the prior was trained on is not known"
        in judge_features(weak, blind, (strong, blind), scale, strangers=False, **given).warnings[0]
    )
    assert (
        "hardly tells people apart"
        in judge_features(
            weak, blind, (strong, blind), scale | {"same_person": 0.1}, **given
        ).vacuous
    )


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
    assert "crafter for 6 pictures" in checked.output
    several = call("protect", config, "--store", store, "--out", tmp_path / "split")
    assert several.exit_code == 2
    assert "name it with --only" in several.stderr
    protected = call(
        "protect",
        config,
        "--store",
        store,
        "--out",
        tmp_path / "split",
        "--only",
        "crafter, latent",
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
            "crafter, latent",
        ).exit_code
        == 2
    )

    album = tmp_path / "album"
    album.mkdir()
    for number in range(3):
        (album / f"{number}.png").write_bytes(feature_pipeline_png(number))
    released = call("release", told["client"], album, "--out", tmp_path / "features.safetensors")
    assert released.exit_code == 0, released.output
    with safe_open(tmp_path / "features.safetensors", framework="pt") as file:
        features = file.get_tensor("features")
        assert json.loads(file.metadata()["values"])["pictures"] == ["0.png", "1.png", "2.png"]
    assert server.answer(features).shape == (3, 17)
    assert not list(tmp_path.glob(".*.partial"))
    assert (
        call("release", told["client"], album, "--out", tmp_path / "features.safetensors").exit_code
        == 2
    )
    assert call("release", tmp_path, album, "--out", tmp_path / "other.safetensors").exit_code == 2


def test_a_split_model_is_shipped_without_what_only_attacks_need(config, tmp_path):
    """Too few public pictures for an embedder, evaluators that cannot be, another experiment of the grid with a cut that is none."""
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
        "undefended, decoder",
        "--json",
        *settings,
    )
    assert done.exit_code == 0, done.stderr
    assert set(made(tmp_path / "store")) == {"split", "target", "release"}
    # What it does need it still asks for.
    for more, message in (
        ("target.cut=nowhere", "no layer named 'nowhere'"),
        ("judging.pictures=9", "pictures is 9"),
        ("target.start=public", "needs at least 2 of them"),
    ):
        done = call(
            "protect",
            config,
            "--store",
            tmp_path / "store",
            "--out",
            tmp_path / "other",
            "--only",
            "undefended, decoder",
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


def feature_pipeline_png(number: int) -> bytes:
    return sheet_of(torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(number)))


def test_one_experiment_alone_runs(tmp_path):
    exp = FeatureExperiment.parse(
        TOY | {"attack": {"name": "hybrid", "start": "noise", "steps": 2}}
    )
    audit = run_features(exp, Store(tmp_path))
    assert audit.found.images.shape == (3, 2, 3, 16, 16)
    assert Path(tmp_path / "intercept").is_dir()


def test_without_a_prior_blind_draws_are_public_pictures(tmp_path):
    plain = {key: value for key, value in TOY.items() if key not in ("prior", "attack")}
    with pytest.raises(ConfigError, match="prior: latent needs one, and none is given"):
        FeatureExperiment.parse(plain | {"attack": {"name": "latent"}})
    exp = FeatureExperiment.parse(plain | {"attack": {"name": "decoder", "epochs": 1, "width": 4}})
    store = Store(tmp_path)
    audit = run_features(exp, store)
    assert not (tmp_path / "prior").exists()
    blind = store.step(
        feature_pipeline.BLIND, 2, None, audit.split.public, [0, 1, 2], seed=exp.seed
    )
    strangers = audit.split.public.floats()
    assert all(
        (strangers == picture).flatten(1).all(1).any() for picture in blind.images.flatten(0, 1)
    )


def test_a_prior_of_another_size_serves(tmp_path):
    exp = FeatureExperiment.parse(
        TOY
        | {
            "prior": {"name": "pretrained", "weights": "faces32", "resize": True},
            "attack": {"name": "latent", "steps": 1, "start": "amortized"},
        }
    )
    audit = run_features(exp, Store(tmp_path))
    assert audit.found.images.shape[2:] == (3, 16, 16)


def test_features_that_tell_nothing_are_reported(tmp_path, monkeypatch):
    """The strongest protection there is must not make an audit fail."""
    monkeypatch.setattr(
        feature_pipeline.Device,
        "release",
        lambda self, pictures, number=0: feature_pipeline.Released(
            torch.zeros(len(pictures.images), 4, 8, 8), key="nothing"
        ),
    )
    exp = FeatureExperiment.parse(
        TOY
        | {
            "attack": {"name": "decoder", "epochs": 1, "width": 4},
            "judging": {"identities": 3, "pictures": 2, "positive_control": False},
        }
    )
    audit = run_features(exp, Store(tmp_path))
    assert audit.facts["lda"] is None
    assert audit.found.images.flatten(2).std(1).max() < 1e-6


def test_a_release_time_defense_needs_a_cut():
    with pytest.raises(
        ConfigError,
        match="crafter acts on features that leave a device, and this target has no cut",
    ):
        Experiment.parse({"defenses": [CRAFT]})


def test_crafter_goes_with_weights_of_ones_own():
    values = TOY | {"target": {**TOY["target"], "weights": "mine.safetensors"}, "defenses": [CRAFT]}
    assert FeatureExperiment.parse(values).protection.name == "crafter"
