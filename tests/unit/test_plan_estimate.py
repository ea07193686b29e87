"""The estimate of a config: its steps, seconds and memory, by a dry run that computes nothing."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Annotated, ClassVar

import pytest
import torch
from pydantic import Field
from torch import nn

from frostglass.attacks.base import Attack
from frostglass.attacks.model.gmi import Gmi
from frostglass.auditing.experiment import experiments
from frostglass.auditing.run import run_all
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.networks.decoder import build_decoder
from frostglass.plan import memory
from frostglass.plan.brief import Call
from frostglass.plan.estimate import dry_run, estimate
from frostglass.plan.ledger import MIB
from frostglass.plan.time import Machine
from frostglass.runtime.memory import resident
from frostglass.store.store import Store

STUDENT = {"model": "cnn", "options": {"width": 4}}
SMALL = STUDENT | {"epochs": 1}
WGAN = {"name": "wgan", "width": 4, "latent": 8, "steps": 2, "batch": 8}
TINY = {
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 6,
        "public_identities": 20,
        "public_images": 4,
    },
    "target": SMALL,
    "evaluators": [SMALL],
    "judging": {"positive_control": False},
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
SPLIT_MODEL = {
    "data": {**TINY["data"], "images": 10, "public_identities": 8},
    "split": {"test": 0.3, "validation": 0.1},
    "target": {**SMALL, "batch": 16, "attributes": ["all"], "cut": "stage1"},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "embedder": {**SMALL, "model": "resnet"},
    "perceptual": SMALL,
    "prior": {**WGAN, "critic_steps": 1, "latent": 6},
    "amortizer": {"steps": 2, "batch": 4, "width": 4},
    "judging": {"identities": 3, "images": 2},
}
LEARNED = {"name": "decoder", "epochs": 1, "width": 4, "adapt": 6, "adapt_epochs": 1, "averaged": 2}
AMORTIZED = {"name": "latent", "steps": 2, "tries": 2, "start": "amortized"}
GRID = SPLIT_MODEL | {
    "grid": {
        "defenses": [[], [CRAFT]],
        "case": [
            {"case": "decoder", "attack": LEARNED},
            {"case": "latent", "attack": AMORTIZED},
        ],
    }
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Use fixed constants: tests of seconds must not depend on the machine."""
    fixed = Machine(calls=5e-6, conv=1e-11, matmul=1e-11, moved=1e-10)
    monkeypatch.setattr("frostglass.plan.estimate.this_machine", lambda root: fixed)


def costs_of(tmp_path, **changes):
    return estimate(experiments(TINY | changes), Store(tmp_path / "store"))


def seconds_of(costs, step):
    return sum(row["seconds"] for row in costs["steps"] if row["step"] == step)


# --- memory ---------------------------------------------------------------------------------------


def test_the_step_that_needs_most_memory_is_named(tmp_path):
    wide = costs_of(tmp_path, target=SMALL | {"options": {"width": 128}, "epochs": 2})
    assert wide["memory_step"] == "target cnn"
    large = costs_of(tmp_path, prior=WGAN | {"batch": 1024, "width": 32})
    assert large["memory_step"] == "prior wgan"
    many = costs_of(tmp_path, attack=TINY["attack"] | {"batch": 512, "candidates": 512})
    assert many["memory_step"] == "attack gmi"


def test_nothing_large_is_allocated(tmp_path, monkeypatch):
    """A critic's first layer has 16,384 × 64 × 32 × 32 outputs: 4 GiB, for two sets of images."""
    monkeypatch.setattr("frostglass.plan.estimate.machine_memory", lambda device: None)
    costs_of(tmp_path)  # imports
    before = resident()
    huge = costs_of(
        tmp_path, data=TINY["data"] | {"size": 64}, prior={"name": "wgan", "batch": 16384}
    )
    assert (huge["memory_step"], huge["memory_unknown"]) == ("prior wgan", "")
    assert huge["memory_mib"] > 8 * 1024
    assert resident() - before < 512 * MIB


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"prior": {"name": "wgan", "batch": 4096}}, "prior.batch, which is 4096"),
        ({"evaluators": [SMALL | {"batch": 4096}]}, "evaluators[0].batch, which is 4096"),
    ],
)
def test_more_memory_than_there_is_is_a_problem(tmp_path, monkeypatch, changes, setting):
    there = resident() + 400 * MIB
    monkeypatch.setattr("frostglass.plan.estimate.machine_memory", lambda device: there)
    data = {**TINY["data"], "size": 64, "images": 2000}
    with pytest.raises(ConfigError) as error:
        costs_of(tmp_path, data=data, **changes)
    (problem,) = error.value.problems
    assert problem.startswith("memory: ")
    assert problem.endswith(f"Lower {setting}.")


def test_this_machine_has_memory():
    assert memory.machine_memory(torch.device("cpu")) > MIB
    assert memory.machine_memory(torch.device("meta")) is None


def test_networks_of_all_seeds_are_kept(tmp_path):
    once, thrice = costs_of(tmp_path), costs_of(tmp_path, grid={"seed": [0, 1, 2]})
    exp = experiments(TINY)[0][1]
    prior = exp.prior.untrained((3, 16, 16), 4)
    target = dry_run([("", exp)], Store(tmp_path / "store"))[0]
    weights = sum(
        tensor.nbytes for module in prior.modules for tensor in module.state_dict().values()
    )
    growth = (thrice["memory_mib"] - once["memory_mib"]) * MIB
    assert target
    assert growth >= 2 * weights - MIB


METHODS = {
    "kedmi": {
        "prior": {"name": "kplus1", "width": 4, "target_mode": "train"},
        "attack": {"name": "kedmi"},
    },
    "plgmi": {
        "prior": {"name": "conditional", "width": 4, "least": 0.5, "top": 5},
        "attack": {"name": "plgmi"},
    },
    "context": {"prior": {"name": "context", "width": 8, "diversity": 0.5}},
    "lomma": {
        "prior": {"name": "students", "base": WGAN, "students": [STUDENT]},
        "attack": {"name": "lomma"},
    },
    "brepmi": {"attack": {"name": "brepmi", "points": 8, "batch": 32}},
    "ppa": {"prior": {"name": "stylegan2"}, "attack": {"name": "ppa"}},
    "bido": {"defenses": [{"name": "bido"}]},
    "calor": {"target": SMALL | {"epochs": 4}, "defenses": [{"name": "calor", "rank": 2}]},
    "transfer": {"defenses": [{"name": "transfer"}]},
    "dpsgd": {"defenses": [{"name": "dpsgd"}]},
    "public start": {"target": SMALL | {"start": "public"}},
}


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_methods_are_dry_run_by_their_own_code(tmp_path, changes):
    costs = costs_of(tmp_path, **changes)
    assert costs["memory_unknown"] == ""
    assert costs["memory_mib"] * MIB > resident() // 2
    assert seconds_of(costs, "attack") > 0
    assert not (tmp_path / "store").exists()


ATTACKS = [
    {"name": "decoder", "variant": "gan", "perceptual": 1.0, "adapt": 8},
    {"name": "mapper", "averaged": 2, "flips": False},
    {"name": "latent", "start": "amortized", "adapt": 8},
    {"name": "hybrid", "starter": {"epochs": 500}},
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack["name"])
def test_attacks_on_features_are_dry_run(tmp_path, attack):
    defenses = [{**CRAFT, "steps": 100, "amortized": True}]
    values = SPLIT_MODEL | {"defenses": defenses, "attack": attack}
    costs = estimate(experiments(values), Store(tmp_path / "store"))
    assert costs["memory_unknown"] == ""
    assert seconds_of(costs, "release") > 0


def test_simulated_attackers_need_memory_too(tmp_path):
    def needed(width):
        defenses = [{"name": "adv_learn", "decoder_width": width}]
        values = SPLIT_MODEL | {"defenses": defenses, "attack": {"name": "latent", "steps": 2}}
        costs = estimate(experiments(values), Store(tmp_path / "store"))
        assert costs["memory_unknown"] == ""
        return costs["memory_mib"] * MIB

    few, many = needed(8), needed(128)
    with torch.device("meta"):
        decoder = build_decoder((4, 8, 8), (3, 16, 16), width=128)
    weights = sum(weight.nbytes for weight in decoder.parameters())
    assert many - few > 4 * weights  # with gradients and two moments of Adam


class Reading(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(768, classes)

    def forward(self, images):
        assert images.detach().numpy() is not None
        return self.layer(images.flatten(1))


def reading(classes, image_shape):
    return Reading(classes)


def test_what_cannot_be_dry_run_is_named_and_no_state_changes(tmp_path):
    before = torch.get_rng_state()
    costs = costs_of(tmp_path, target={"model": f"{__name__}:reading"})
    assert costs["memory_unknown"].startswith("target ")
    assert "reading cannot be dry-run: " in costs["memory_unknown"]
    assert torch.equal(torch.get_rng_state(), before)
    assert not (tmp_path / "store").exists()


CHILD = """
import json, sys
from frostglass.auditing.experiment import experiments
from frostglass.auditing.run import run_all
from frostglass.plan.estimate import estimate
from frostglass.runtime.memory import most_resident
from frostglass.store.store import Store
settings = json.loads(sys.argv[1])
store = Store(sys.argv[2])
costs = estimate(experiments(settings), store)
run_all(settings, store)
sys.stdout.write(json.dumps([costs["memory_mib"] * 2**20, most_resident()]))
"""


@pytest.mark.slow
def test_a_run_needs_the_estimated_memory(tmp_path):
    wide = TINY | {
        "target": SMALL | {"options": {"width": 32}},
        "prior": WGAN | {"width": 16, "batch": 64},
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(wide), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    estimated, needed = json.loads(done.stdout)
    assert 0.75 < estimated / needed < 1.25


# --- seconds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "step", "factor"),
    [
        ({"attack": {"name": "gmi", "steps": 200, "candidates": 2, "keep": 1}}, "attack", 100),
        ({"prior": WGAN | {"steps": 200}}, "prior", 100),
    ],
)
def test_seconds_grow_with_the_iterations(tmp_path, changes, step, factor):
    short, long = (seconds_of(costs_of(tmp_path, **more), step) for more in ({}, changes))
    assert long / short == pytest.approx(factor, rel=0.35)


def test_epochs_are_scaled_and_the_final_evaluation_is_not(tmp_path):
    """Accuracy on all images is computed once, whatever the number of epochs."""
    few, more, most = (
        seconds_of(costs_of(tmp_path, target=SMALL | {"epochs": epochs}), "target")
        for epochs in (10, 110, 210)
    )
    assert most - more == pytest.approx(more - few, rel=0.01)
    assert more / few < 11


def test_all_steps_of_a_simulated_decoder_count(tmp_path):
    def seconds(**options):
        defenses = [{"name": "adv_learn", "decoder_width": 8, **options}]
        values = SPLIT_MODEL | {"defenses": defenses, "attack": {"name": "latent", "steps": 2}}
        return seconds_of(estimate(experiments(values), Store(tmp_path / "store")), "target")

    few, more, most = (seconds(decoder_steps=steps, fresh_share=0.0) for steps in (1, 9, 17))
    assert most - more == pytest.approx(more - few, rel=0.05)
    assert more > 2 * few
    # A fresh decoder in the end, and longer turns.
    assert seconds(decoder_steps=9) == pytest.approx(most + (more - few) / 8, rel=0.05)
    assert seconds(decoder_steps=1, fresh_share=0.0, epoch_turn=True) > 1.1 * few


def test_a_network_is_planned_once_for_all_its_cuts(tmp_path):
    values = SPLIT_MODEL | {"grid": {"target": {"cut": ["stage1", "stage2"]}}}
    values |= {"attack": {"name": "decoder", "epochs": 1, "width": 4}}
    rows = estimate(experiments(values), Store(tmp_path / "store"))["steps"]
    works = [row["work"] for row in rows if row["step"] == "target"]
    assert [work for work in works if work.startswith("cut")] == [
        "cut after stage1",
        "cut after stage2",
    ]
    assert len(works) == 2 + 3  # the target, the evaluator and the embedder


def test_a_pool_is_not_scaled_with_the_steps(tmp_path):
    """Scoring a pool is done once; more steps must not make it longer."""

    def seconds(steps, pool):
        attack = {"name": "gmi", "steps": steps, "candidates": 2, "keep": 1, "pool": pool}
        return seconds_of(costs_of(tmp_path, attack=attack), "attack")

    assert seconds(100, 4000) - seconds(100, 2000) == pytest.approx(
        seconds(10, 4000) - seconds(10, 2000), rel=0.1
    )


@parameters
class Iterated(Attack):
    """An attack from outside whose number of steps has a name that the package does not know."""

    iterations: Annotated[int, Field(ge=1)] = 300
    samples_each: Annotated[int, Field(ge=1)] = 4

    surface: ClassVar = "model"

    @property
    def _gmi(self):
        return Gmi(steps=self.iterations, candidates=self.samples_each, keep=1)

    access = property(lambda self: self._gmi.access)
    needs = property(lambda self: self._gmi.needs)
    kept = property(lambda self: 1)

    def budget(self, size):
        return self._gmi.budget(size)

    def brief(self):
        return replace(self, iterations=min(2, self.iterations))

    def run(self, view, assets, people, *, seed, work):
        return self._gmi.run(view, assets, people, seed=seed, work=work)


def test_an_attack_from_outside_is_estimated_like_a_built_in_one(tmp_path):
    known = {"name": "gmi", "steps": 300, "candidates": 4, "keep": 1}
    outside = {"name": f"{__name__}:Iterated", "iterations": 300, "samples_each": 4}
    calls, seconds, memories = [], [], []
    for attack in (known, outside):
        values = TINY | {"attack": attack}
        steps, unknown = dry_run(experiments(values), Store(tmp_path / "store"))
        assert unknown == ""
        calls.append([step.cost.calls for *_, step in steps if step.task.step.name == "attack"])
        costs = estimate(experiments(values), Store(tmp_path / "store"))
        seconds.append(seconds_of(costs, "attack"))
        memories.append(costs["memory_mib"])
    assert seconds[1] == pytest.approx(seconds[0], rel=0.03)
    assert calls[1] == pytest.approx(calls[0], rel=0.03)
    assert memories[1] == pytest.approx(memories[0], rel=0.03)


# --- steps ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    run_all(GRID, Store(folder))
    return folder


def test_the_planned_steps_are_those_of_the_run(finished, tmp_path):
    costs = estimate(experiments(GRID), Store(tmp_path / "nothing"))
    planned = Counter(row["step"] for row in costs["steps"])
    folders = {kind.name: kind for kind in finished.iterdir() if kind.is_dir()}
    made = {name: sum(step.is_dir() for step in kind.iterdir()) for name, kind in folders.items()}
    assert planned == Counter(made) + Counter(controls=1)
    assert not any(row["done"] for row in costs["steps"])
    assert not (tmp_path / "nothing").exists()


def test_finished_steps_are_found_by_their_keys(finished):
    costs = estimate(experiments(GRID), Store(finished))
    *steps, controls = costs["steps"]
    assert all(row["done"] for row in costs["steps"])
    assert all((finished / row["step"] / row["key"]).is_dir() for row in steps)
    assert costs["seconds"] == controls["seconds"] == 0


def test_a_store_remembers_the_dry_run_of_an_unchanged_config(tmp_path, monkeypatch):
    made = []
    whole = Gmi.run
    monkeypatch.setattr(Gmi, "run", lambda self, *a, **k: made.append(1) or whole(self, *a, **k))
    store = Store(tmp_path / "store")
    store.create()
    first, second = costs_of(tmp_path), costs_of(tmp_path)
    once = len(made)
    assert once > 0
    assert first["steps"] == second["steps"]
    costs_of(tmp_path, attack=TINY["attack"] | {"steps": 3})
    assert len(made) == 2 * once
    Store(store.root)  # still a store


def test_nothing_is_written_to_a_folder_that_is_no_store_yet(tmp_path):
    (tmp_path / "store").mkdir()
    costs_of(tmp_path)
    assert not list((tmp_path / "store").iterdir())


def test_only_missing_steps_count(finished):
    other = GRID | {"grid": GRID["grid"] | {"defenses": [[], [{**CRAFT, "beta": 7.0}]]}}
    costs = estimate(experiments(other), Store(finished))
    missing = Counter(row["step"] for row in costs["steps"] if not row["done"])
    # Two releases for the victims, one for public images; an attack and its scores in each case.
    assert missing == {"release": 3, "attack": 2, "scores": 2, "controls": 1}


def test_experiments_of_the_same_structure_are_dry_run_once(tmp_path, monkeypatch):
    made = []
    whole = Gmi.run
    monkeypatch.setattr(Gmi, "run", lambda self, *a, **k: made.append(1) or whole(self, *a, **k))
    costs_of(tmp_path)
    once = len(made)
    costs_of(tmp_path, grid={"seed": [0, 1, 2], "defenses": [[], [{"name": "label_smoothing"}]]})
    assert len(made) == 2 * once


PUBLIC = {"public_identities": 300, "public_images": 5}
WIDE = {"model": "cnn", "options": {"width": 32}}  # its work counts for more than its calls
STYLES = {"name": "pretrained", "weights": "styles32"}
TAUGHT = {"name": "students", "base": WGAN, "students": [WIDE], "statistics": 0}


@pytest.mark.parametrize(
    ("values", "step"),
    [
        (
            SPLIT_MODEL | {"attack": {"name": "decoder", "epochs": 8, "width": 32}},
            "pretrain",
        ),
        (TINY | {"prior": {**TAUGHT, "epochs": 8}}, "prior"),
        (
            TINY
            | {
                "target": {**TINY["target"], "model": "resnet34", "options": {}},
                "prior": {**TAUGHT, "students": [{"model": "cnn"}], "epochs": 8},
            },
            "prior",
        ),
        (
            TINY
            | {
                "data": {**TINY["data"], "size": 32},
                "prior": {"name": "experts", "base": STYLES, "students": [WIDE], "epochs": 8},
                "attack": {"name": "smile"},
            },
            "prior",
        ),
    ],
    ids=["decoder", "students", "deep target", "draws of a StyleGAN2"],
)
def test_what_is_asked_once_is_not_scaled_with_the_epochs(tmp_path, monkeypatch, values, step):
    """Images are drawn and shown to the network once, and learned from in each epoch."""
    values = values | {"data": {**values["data"], **PUBLIC}}
    estimated = seconds_of(estimate(experiments(values), Store(tmp_path / "store")), step)
    monkeypatch.setattr(Call, "brief", lambda self, times=1: self)  # nothing is left out
    whole = seconds_of(estimate(experiments(values), Store(tmp_path / "whole")), step)
    assert estimated == pytest.approx(whole, rel=0.1)


def test_a_prior_that_asks_and_trains_no_network_is_estimated(tmp_path):
    statistics = {"name": "students", "base": WGAN, "students": []}
    values = TINY | {"prior": statistics, "attack": {"name": "gmi", "regulariser": "mean"}}
    costs = estimate(experiments(values), Store(tmp_path))
    assert not costs["memory_unknown"]
    assert seconds_of(costs, "attack") > 0


def test_padding_of_a_few_searches_is_not_scaled_with_the_people(tmp_path):
    """A dry run with two people would pad each of their queries to 16 images."""
    experts = {"name": "experts", "base": STYLES, "students": [WIDE], "epochs": 1}
    smile = {"name": "smile", "steps": 2}
    many = TINY | {"data": {**TINY["data"], "identities": 16, "size": 32}, "prior": experts}
    once, repeated = (
        seconds_of(
            estimate(
                experiments(many | {"attack": {**smile, "samples": samples}}),
                Store(tmp_path / str(samples)),
            ),
            "attack",
        )
        for samples in (1, 8)
    )
    assert repeated < 3 * once
