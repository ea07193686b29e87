"""The whole pipeline at toy scale: who may see what, what is shared, what a restart leaves."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from frostglass.attacks.model.gmi import Gmi
from frostglass.auditing import steps
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.pipeline import audit as run_audit
from frostglass.auditing.products import ModelExposure
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import summary, write_run
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.pixels import as_bytes
from frostglass.core.types import Images
from frostglass.data._splits import make_split
from frostglass.data.faces import Faces
from frostglass.plan.estimate import estimate
from frostglass.plan.problems import problems
from frostglass.priors._files import read_prior
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store
from frostglass.workers import processes
from killing import run_until_done, tree
from worlds import KilledError, NoWork, same_weights

TOY = {
    "name": "toy",
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 8,
        "public_identities": 30,
        "public_images": 1,
    },
    "target": {"epochs": 2, "batch": 16, "options": {"width": 4}},
    "evaluators": [
        {"model": "resnet", "epochs": 1, "options": {"width": 4, "depth": 1}},
        {"model": "lenet", "epochs": 1},
    ],
    "prior": {
        "name": "wgan",
        "steps": 4,
        "critic_steps": 1,
        "width": 4,
        "batch": 8,
        "checkpoint_every": 1,
    },
    "attack": {"name": "gmi", "steps": 3, "candidates": 2, "keep": 2, "batch": 4},
}
WORK = {"seed": 0, "work": NoWork(), "device": torch.device("cpu")}
GRID = TOY | {"grid": {"defenses": [[], [{"name": "calor", "rank": 2, "switch": 0.5}]]}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return folder, run_all(GRID, Store(folder))


def test_steps_are_shared_between_experiments(finished):
    folder, _ = finished
    made = {
        name.name: len([f for f in name.iterdir() if f.is_dir()])
        for name in folder.iterdir()
        if name.is_dir()
    }
    # Two targets and two evaluators; scores of two attacks and, for each target, of one baseline.
    assert made == {
        "split": 1, "target": 4, "verifier": 2, "prior": 1, "attack": 2, "prior_only": 1,
        "scores": 4, "agreement": 2,
    }  # fmt: skip


def test_a_second_run_computes_nothing(finished):
    folder, first = finished
    events = []
    again = run_all(GRID, Store(folder, listener=events.append))
    assert {event.kind for event in events} == {"cached"}
    assert json.dumps(summary(first)) == json.dumps(summary(again))


def test_two_workers_end_with_the_same_bytes(finished, tmp_path, monkeypatch):
    folder, first = finished
    monkeypatch.setattr(processes, "START", "fork")  # starts at once
    store = Store(tmp_path)
    again = run_all(GRID, store, workers=2)
    assert tree(tmp_path) == tree(folder)
    assert summary(again)["audits"][1]["scores"] == summary(first)["audits"][1]["scores"]
    assert store.mixed_conditions() == ""


class PrivateError(Exception):
    pass


def untouchable(images: Images) -> Images:
    class Raising(Images):
        def floats(self, index=slice(None)):
            raise PrivateError("private images were touched")

    guarded = Raising(images.pixels, images.labels, images.names, images.sources, key=images.key)
    object.__setattr__(guarded, "pixels", None)
    return guarded


def guarded_split(split):
    parts = ("train", "validation", "test")
    return replace(split, **{part: untouchable(getattr(split, part)) for part in parts})


def test_prior_and_attack_never_touch_private_images(finished):
    """With a trained target, all of an attacker's steps run while private images raise."""
    _, done = finished
    audit, exp = done.audits[0], done.audits[0].experiment
    guarded = guarded_split(audit.split)
    with pytest.raises(PrivateError):
        guarded.train.floats()
    public = guarded.public
    prior = steps.PRIOR.make(exp.prior, public=public, view=None, files="", base=None, **WORK)
    result = steps.ATTACK.make(
        exp.attack,
        exposure=ModelExposure(audit.target),
        assets=Assets(public, prior),
        people=range(4),
        pretrained=None,
        **WORK,
    )
    baseline = steps.PRIOR_ONLY.make(2, prior=prior, public=None, people=range(4), **WORK)
    assert result.images.shape == baseline.images.shape == (4, 2, 3, 16, 16)
    assert torch.equal(as_bytes(result.images).pixels, audit.reconstructions.images.pixels)


def test_an_audit_that_proves_nothing_says_so(finished):
    _, done = finished
    assert len(done.vacuous) == 2  # two epochs teach a target nothing
    assert "there is nothing in it to leak" in done.vacuous[0]


def test_keys_follow_what_made_a_result(finished):
    folder, done = finished
    base = done.audits[0]
    other = run_audit(Experiment.parse(TOY | {"seed": 1}), Store(folder))
    assert other.target.key != base.target.key
    slower = run_audit(
        Experiment.parse(TOY | {"attack": TOY["attack"] | {"steps": 4}}), Store(folder)
    )
    assert slower.reconstructions.key != base.reconstructions.key
    assert slower.target.key == base.target.key
    assert slower.trial.prior.key == base.trial.prior.key


def test_cost_is_known_beforehand_and_falls_to_nothing_when_done(finished, tmp_path):
    folder, _ = finished
    fresh = estimate(experiments(GRID), Store(tmp_path / "empty"))
    assert [row["step"] for row in fresh["steps"]].count("target") == 4
    assert fresh["seconds"] > 0
    assert fresh["memory_mib"] > 50
    assert not (tmp_path / "empty").exists()
    done = estimate(experiments(GRID), Store(folder))
    assert all(row["done"] for row in done["steps"])
    assert done["seconds"] == 0


def test_run_folder_holds_every_number(finished, tmp_path):
    _, done = finished
    folder = write_run(done, tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    assert [audit["label"] for audit in facts["audits"]] == ["undefended", "calor"]
    lines = (folder / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4 * 2
    mean = (
        sum(float(line.split(",")[lines[0].split(",").index("top1_1")]) for line in lines[1:9]) / 8
    )
    assert mean == pytest.approx(facts["audits"][0]["scores"]["top1_1"]["value"])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(finished, tmp_path, seed):
    folder, _ = finished
    rng = random.Random(seed)
    kills = run_until_done(
        lambda: run_all(GRID, Store(tmp_path / "killed")),
        [rng.uniform(0.0, 0.04 + 0.01 * k) for k in range(40)],
    )
    assert kills >= 5
    whole, killed = tree(folder), tree(tmp_path / "killed")
    ours = {
        name: data
        for name, data in whole.items()
        if not name.endswith("timing.json") and name in killed
    }
    assert {name for name in killed if not name.endswith("timing.json")} <= set(whole)
    assert all(killed[name] == data for name, data in ours.items())
    assert len(ours) > 20


def test_changed_files_make_a_new_split(tmp_path):
    from PIL import Image

    split = make_split(
        Faces(size=16, identities=3, images=4, public_identities=3, public_images=2),
        test_fraction=0.3,
        validation_fraction=0.2,
        seed=0,
    )
    for side, images in (("private", split.train), ("public", split.public)):
        for row, label in enumerate(images.labels.tolist()):
            folder = tmp_path / side / images.names[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images.pixels[row].permute(1, 2, 0).numpy()).save(folder / f"{row}.png")
    data = experiments(
        {
            "data": {
                "name": "folder",
                "private": str(tmp_path / "private"),
                "public": str(tmp_path / "public"),
                "size": 16,
            }
        }
    )[0][1].data
    before = fingerprint(data)
    assert before == fingerprint(data)
    one = next((tmp_path / "public").rglob("*.png"))
    Image.new("RGB", (16, 16), "red").save(one)
    assert fingerprint(data) != before


STAGED = TOY | {
    "data": TOY["data"] | {"public_images": 4},
    "grid": {"defenses": [[{"name": "transfer", "ratio": ratio}] for ratio in (0.3, 0.6)]},
}


def test_a_first_stage_is_shared_and_its_facts_are_in_the_manifest(tmp_path):
    assert estimate(experiments(STAGED), Store(tmp_path))["seconds"] > 0
    done = run_all(STAGED, Store(tmp_path))
    assert (
        len(list((tmp_path / "target").iterdir())) == 6
    )  # two evaluators, the undefended model, one first stage, two boundaries
    for audit, told in zip(done.audits, summary(done)["audits"], strict=True):
        manifest = json.loads(
            (tmp_path / "target" / audit.target.key / "manifest.json").read_text()
        )
        assert manifest["facts"]["transfer"]["frozen"] > 0
        training = told["training"]
        assert training["facts"] == manifest["facts"]
        assert training["first_stage"]["classes"] == 30
        assert training["first_stage_seconds"] > 0
        assert training["times_undefended"] == pytest.approx(
            training["seconds"] / audit.control.target.info["seconds"]
        )
        assert training["recipe"]["epochs"] == 2
    frozen = [audit["training"]["facts"]["transfer"]["frozen"] for audit in summary(done)["audits"]]
    assert frozen[0] < frozen[1]
    assert {event["done"] for event in estimate(experiments(STAGED), Store(tmp_path))["steps"]} == {
        True
    }


def test_a_training_on_public_people_never_touches_private_images():
    split = make_split(
        Faces(size=16, identities=4, images=8, public_identities=6, public_images=4), seed=0
    )
    guarded = guarded_split(split)
    config = experiments(STAGED)[0][1].target

    def train(data):
        return steps.TARGET.make(
            config,
            split=guarded,
            defenses=(),
            data=data,
            files="",
            start=None,
            perceptual=None,
            **WORK,
        )

    assert train("public").classes == split.public.names
    with pytest.raises((PrivateError, AttributeError)):  # the images of `guarded` are gone
        train("private")


def test_what_a_run_would_refuse_is_found_beforehand():
    few = STAGED | {"data": STAGED["data"] | {"public_images": 2}}
    (problem,) = problems(experiments(few))
    assert problem.startswith("data: training on public people needs at least 2 people with 3")
    loose = TOY | {"defenses": [{"name": "dpsgd", "delta": 0.5}]}
    (problem,) = problems(experiments(loose))
    assert problem.startswith("target: dpsgd: delta must be below")


def test_a_failure_names_the_model_of_the_grid_and_leaves_the_others(tmp_path):
    wild = [{"name": "mid", "weight": 1e38}]
    done = run_all(TOY | {"grid": {"defenses": [wild, []]}}, Store(tmp_path))
    assert done.labels == ("undefended",)
    assert len(done.failed) == 1
    assert done.failed[0].startswith("mid: cnn: the loss is not finite")
    assert summary(done)["failed"] == list(done.failed)
    with pytest.raises(RunError, match=r"^mid, seed=1: cnn: the loss is not finite"):
        run_all(TOY | {"grid": {"defenses": [wild], "seed": [1, 2]}}, Store(tmp_path))


# Priors that are fitted to a target, and what else an attack brings along

TIED = {
    "name": "conditional",
    "latent": 5,
    "width": 4,
    "top": 4,
    "steps": 2,
    "critic_steps": 1,
    "batch": 8,
}
TAUGHT = {
    "name": "students",
    "students": [{"model": "cnn", "options": {"width": 4}}],
    "epochs": 1,
    "statistics": 8,
}
PLG = {"name": "plgmi", "steps": 2, "candidates": 2, "keep": 2, "batch": 4}
LOMMA = {"name": "lomma", "steps": 2, "candidates": 2, "keep": 2, "batch": 4}


def stored_priors(folder):
    """Return the priors of a store: name, and the target each was fitted to."""
    found = []
    for path in (folder / "prior").glob("*/prior.safetensors"):
        prior = read_prior(path)
        found.append((prior.info["method"]["name"], prior.tied_to))
    return found


def test_a_prior_that_is_fitted_to_a_target_is_made_for_each_and_never_reused(tmp_path):
    done = run_all(GRID | {"prior": TIED, "attack": PLG}, Store(tmp_path))
    plain, defended = done.audits
    assert plain.trial.prior.key != defended.trial.prior.key
    assert sorted(stored_priors(tmp_path)) == sorted(
        ("conditional", audit.target.key) for audit in done.audits
    )
    assert [audit.trial.prior.tied_to for audit in done.audits] == [
        audit.target.key for audit in done.audits
    ]
    # The positive control of the second is attacked with the prior of the first.
    assert plain.target.key == defended.control.target.key
    with pytest.raises(
        ConfigError, match="the prior was fitted to another target: train it for this one"
    ):
        steps.ATTACK.make(
            plain.experiment.attack,
            exposure=ModelExposure(plain.target),
            assets=Assets(prior=defended.trial.prior),
            people=range(4),
            pretrained=None,
            **WORK,
        )


def test_students_of_each_target_share_the_prior_they_are_added_to(tmp_path):
    config = GRID | {"prior": TAUGHT | {"base": TOY["prior"]}, "attack": LOMMA}
    done = run_all(config, Store(tmp_path))
    assert sorted(stored_priors(tmp_path), key=str) == sorted(
        [("wgan", None), *(("students", audit.target.key) for audit in done.audits)], key=str
    )
    first, second = (audit.trial.prior for audit in done.audits)
    assert first.key != second.key
    assert same_weights(first.generator, second.generator)
    assert not same_weights(first.students[0], second.students[0])
    rows = estimate(experiments(config), Store(tmp_path))["steps"]
    assert [row["done"] for row in rows if row["step"] == "prior"] == [True] * 3


@pytest.mark.slow
def test_students_of_a_prior_that_is_fitted_share_nothing(tmp_path):
    config = GRID | {"prior": TAUGHT | {"base": TIED}, "attack": LOMMA | {"critic_weight": 0.0}}
    planned = estimate(experiments(config), Store(tmp_path))["steps"]
    done = run_all(config, Store(tmp_path))
    expected = [
        (name, audit.target.key) for name in ("conditional", "students") for audit in done.audits
    ]
    assert sorted(stored_priors(tmp_path)) == sorted(expected)
    assert [row["step"] for row in planned].count("prior") == 4


@pytest.mark.parametrize("diversity", [0.0, 0.5])
def test_a_prior_that_completes_hints_gets_one_held_out_image_of_each_person(tmp_path, diversity):
    hinted = {
        "name": "context",
        "diversity": diversity,
        "latent": 5,
        "width": 4,
        "steps": 2,
        "critic_steps": 1,
        "batch": 8,
    }
    done = run_all(GRID | {"prior": hinted}, Store(tmp_path))
    assert len(stored_priors(tmp_path)) == (2 if diversity else 1)
    for audit in done.audits:
        test, known = audit.split.test, audit.trial.prior.hints[0, 3] == 1
        assert audit.trial.prior.hints.shape == (4, 4, 16, 16)
        assert 0 < known.sum() < known.numel()
        for person in range(4):
            image = test.floats(torch.tensor([test.labels.tolist().index(person)]))[0]
            assert torch.equal(audit.trial.prior.hints[person, :3, known], image[:, known])
            for result in audit.reconstructions.images[person]:
                assert torch.equal(result[:, known], image[:, known])
                assert not torch.allclose(result, image, atol=0.02)
    folder = write_run(done, tmp_path / "run")
    assert (
        json.loads((folder / "run.json").read_text())["audits"][0]["prior"]["method"]["name"]
        == "context"
    )


# Searches that stop early


def spoil(monkeypatch, *labels, by=math.nan):
    """Make the loss of these people NaN; return whose images are searched."""
    identity, searched = Gmi.class_loss, set()

    def spoiled(self, view, prior, images, whose, rng):
        searched.update(whose.tolist())
        value, sure = identity(self, view, prior, images, whose, rng)
        return torch.where(torch.isin(whose, torch.tensor(labels)), by, value), sure

    monkeypatch.setattr(Gmi, "class_loss", spoiled)
    return searched


def test_people_whose_search_stopped_are_named(tmp_path, monkeypatch):
    spoil(monkeypatch, 1, 3)
    done = run_all(TOY, Store(tmp_path / "store"))
    (audit,) = json.loads((write_run(done, tmp_path / "run") / "run.json").read_text())["audits"]
    assert audit["partial"] == [done.audits[0].split.classes[label] for label in (1, 3)]
    warned = [text for text in audit["controls"]["warnings"] if text.startswith("partial")]
    assert warned == [
        "partial: the search stopped early for 2 of 4 people and 4 of 8 images (the loss was not "
        "finite, or no start was found); their scores say little"
    ]
    assert done.audits[0].reconstructions.images[:].isfinite().all()
    monkeypatch.undo()
    again = run_all(TOY, Store(tmp_path / "store"))  # as it is read back
    assert summary(again)["audits"][0]["partial"] == audit["partial"]


def test_a_whole_run_names_nobody(finished):
    for audit in summary(finished[1])["audits"]:
        assert audit["partial"] == []
        assert not any("partial" in text for text in audit["controls"]["warnings"])


@pytest.mark.parametrize("by", [math.nan, math.inf])
def test_a_search_that_stopped_for_everybody_is_an_error(tmp_path, monkeypatch, by):
    searched = spoil(monkeypatch, 0, 1, 2, 3, by=by)
    expected = r"^gmi: no search finished for any of 4 people, .*Lower attack\.lr, .*$"
    with pytest.raises(RunError, match=expected) as caught:
        run_all(TOY, Store(tmp_path))
    assert "\n" not in str(caught.value)
    assert searched == {0, 1, 2, 3}
    searched.clear()
    with pytest.raises(RunError, match=expected):
        run_all(TOY, Store(tmp_path))
    assert searched == set()  # finished shards are kept


def test_what_was_searched_before_a_power_cut_is_not_searched_again(
    finished, tmp_path, monkeypatch
):
    identity = Gmi.class_loss

    def cut(self, view, prior, images, whose, rng):
        if 3 in whose:
            raise KilledError
        return identity(self, view, prior, images, whose, rng)

    monkeypatch.setattr(Gmi, "class_loss", cut)
    with pytest.raises(KilledError):
        run_all(TOY, Store(tmp_path))
    monkeypatch.setattr(Gmi, "class_loss", identity)
    searched = spoil(monkeypatch)
    done = run_all(TOY, Store(tmp_path))
    assert searched == {2, 3}  # two people make a shard
    assert torch.equal(
        done.audits[0].reconstructions.latents, finished[1].audits[0].reconstructions.latents
    )
    assert done.audits[0].reconstructions.queries == finished[1].audits[0].reconstructions.queries


def test_a_model_audit_measures_face_similarity_with_an_embedder_of_public_people(tmp_path):
    config = TOY | {
        "data": TOY["data"] | {"public_identities": 8, "public_images": 4},
        "embedder": {"model": "resnet", "epochs": 1, "options": {"width": 4, "depth": 1}},
        "metrics": [{"name": "verification"}, {"name": "accuracy"}, {"name": "face"}],
    }
    assert problems(experiments(config)) == []
    done = run_all(config, Store(tmp_path))
    (audit,) = done.audits
    assert audit.embedder.classes == audit.split.public.names
    assert audit.rows.columns["similarity"].shape == audit.reconstructions.images.shape[:2]
    assert [score.name for score in audit.controls.headline] == [audit.controls.deciding]
    assert "face_similarity" in summary(done)["audits"][0]["scores"]
