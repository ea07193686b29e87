"""Every attack breaks an undefended model: evaluators recognise its images, not prior draws."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from frostglass.attacks import Gmi, attacks, invert, prior_only
from frostglass.auditing.private_facts import attribute_of_people
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.data._splits import make_split, public_people
from frostglass.data.faces import Faces
from frostglass.metrics.accuracy import Accuracy
from frostglass.metrics.base import Evidence, measure
from frostglass.priors.base import check_unseen
from frostglass.priors.experts import Experts
from frostglass.priors.kplus1 import Kplus1
from frostglass.priors.pretrained import Pretrained
from frostglass.priors.students import Students
from frostglass.priors.surrogates import Surrogates
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork

LEAST = 0.25  # attack minus prior-only accuracy, under each evaluator
SURE = 0.7  # the target's own confidence: below, the search did not converge
STUDENT = ({"model": "cnn", "options": {"width": 8}},)

# Small budgets, chosen by the target's confidence alone; other attacks run with their defaults.
POINTS = {
    "optimizer": "adam",
    "lr": 0.05,
    "weight": 1.0,
    "critic_weight": 0.05,
    "coupling": 1,
    "clamp": 0.0,
    "candidates": 3,
    "keep": 3,
}
GAUSSIANS = {
    "lr": 0.05,
    "weight": 1.0,
    "critic_weight": 0.05,
    "coupling": 1,
    "log_variance": -2.0,
    "draws": 3,
    "keep": 3,
}
FLOWS = {
    "depth": 2,
    "levels": 2,
    "hidden": 16,
    "optimizer": "adam",
    "lr": 0.01,
    "points": 4,
    "draws": 3,
    "keep": 3,
}
SEARCH = {name: value for name, value in POINTS.items() if name not in ("candidates", "keep")}
BASE = {"name": "gmi", **SEARCH, "loss": "margin", "pool": 256, "steps": 40}
CASES = {
    "gmi": {**POINTS, "loss": "margin", "pool": 256, "steps": 40},
    "kedmi": {**GAUSSIANS, "loss": "margin", "steps": 80},
    "lomma": {**POINTS, "steps": 40},
    "plgmi": {"shown": 1, "steps": 60, "candidates": 3, "keep": 3},
    "vmi": {**FLOWS, "loss": "margin", "steps": 60},
    "brepmi": {"max_queries": 700},
    "ppa": {"pool": 256, "steps": 40, "trials": 5, "candidates": 3, "keep": 3},
    "ifgmi": {"pool": 256, "steps": 30, "block_steps": (5, 5), "candidates": 3, "keep": 3},
    "mirror": {"pool": 256, "steps": 40, "candidates": 3, "keep": 3},
    "mirror_genetic": {"pool": 256, "population": 64, "generations": 30},
    "modes": {"base": BASE, "candidates": 6, "keep": 1},
    "members": {"base": BASE, "candidates": 3, "keep": 3},
    "known": {"base": BASE, "attribute": "glasses", "candidates": 3, "keep": 1},
    "ppdgmi": {
        "base": BASE,
        "features": "pixels",
        "searches": 3,
        "points": 2,
        "keep": 1,
        "inversion": 20,
        "tuning": 10,
        "reselect": False,
    },
    "lokt": {"shown": 1, "steps": 60, "candidates": 3, "keep": 3},
    "smile": {"steps": 20, "max_queries": 60},
    # Their first guess: without decoys there is nobody else to find.
    "repel": {"base": BASE, "rounds": 2, "searches": 2, "keep": 1},
    "unlearn": {
        "base": BASE,
        "rounds": 2,
        "searches": 2,
        "keep": 1,
        "tuning": 5,
        "references": 16,
    },
}

LOKT_GAN = {
    "network": "dcgan",
    "start": "faces32",
    "latent": 100,
    "width": 48,
    "critic_width": 40,
    "batch": 32,
    "critic_steps": 1,
    "lr": 1e-3,
    "average": 0.98,
    "steps": 500,
    "warmup": 10,
}
# A prior that is trained; a generator, and a copy of the target, that are tuned for each person;
# several seconds each, where others show the same engine in less.
SLOW = (
    *("lokt", "ppdgmi", "unlearn"),
    *("ifgmi", "mirror", "mirror_genetic", "modes", "repel", "smile"),
)
STYLED = ("ppa", "ifgmi", "mirror", "mirror_genetic", "smile")  # attacks on a StyleGAN


@pytest.fixture(scope="module")
def world():
    """Eight people, a target, two evaluators of other architectures, and the shipped priors."""
    split = make_split(
        Faces(identities=8, images=80, public_identities=60, public_images=4), seed=0
    )
    recipes = (
        Training(model="cnn", options={"width": 16}, epochs=9, batch=32, lr=3e-3),
        Training(model="resnet", options={"width": 8, "depth": 1}, epochs=16, batch=32, lr=3e-3),
        Training(
            model="convmixer", options={"width": 32, "depth": 3}, epochs=16, batch=32, lr=5e-3
        ),
    )
    target, *evaluators = (
        train_target(recipe, split, seed=seed, work=NoWork()) for seed, recipe in enumerate(recipes)
    )
    prior = Pretrained(weights="faces32").train(split.public)
    styles = Pretrained(weights="styles32").train(split.public)
    for known in (prior, styles):
        check_unseen(known, split.classes)
    strangers = public_people(split.public, seed=0)
    learned = Training(model="cnn", options={"width": 8}, epochs=5, batch=32, lr=3e-3)
    embedder, glasses = (
        train_target(recipe, strangers, seed=9, work=NoWork())
        for recipe in (learned, replace(learned, attributes=("glasses",)))
    )
    present = attribute_of_people(split.test, "glasses")
    assets = Assets(
        public=split.public,
        embedder=embedder,
        attribute=KnownAttribute("glasses", present, glasses),
    )
    return SimpleNamespace(
        split=split, target=target, evaluators=evaluators, prior=prior, styles=styles, assets=assets
    )


def lift(world, attack, prior):
    """Attack minus prior-only accuracy under each evaluator, and the target's confidence."""
    assets = replace(world.assets, prior=prior)
    found = invert(attack, world.target.view(attack.access), assets)
    draws = prior_only(prior, range(8), 8, seed=0)
    seen, drawn = (
        measure([Accuracy()], Evidence(some, world.target, world.evaluators, world.split))
        for some in (found, draws)
    )
    lifts = [seen.score(name).value - drawn.score(name).value for name in ("top1_1", "top1_2")]
    return lifts, seen.score("target_confidence").value


def test_target_and_evaluators_know_their_people(world):
    for model in (world.target, *world.evaluators):
        assert model.info["accuracy"]["test"] > 0.85


def test_prior_only_draws_are_recognised_no_more_than_by_chance(world):
    for prior in (world.prior, world.styles):
        rows = measure(
            [Accuracy()],
            Evidence(
                prior_only(prior, range(8), 16, seed=0), world.target, world.evaluators, world.split
            ),
        )
        for name in ("top1_1", "top1_2"):
            assert rows.score(name).value < 0.3


def with_students(world, **settings):
    """Return the embedded prior with a student of the target."""
    students = Students(students=STUDENT, epochs=2, batch=32, lr=0.05, **settings)
    view = world.target.view(["gradients"])
    return students.train(world.split.public, view, base=world.prior, work=NoWork())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in attacks.names()
        if attacks.get(name).surface == "model"
    ],
)
def test_an_attack_breaks_an_undefended_model(world, name):
    attack, prior = (
        attacks.get(name)(**CASES.get(name, {})),
        world.styles if name in STYLED else world.prior,
    )
    if name == "lomma":
        prior = with_students(world, statistics=200)
    if name == "lokt":
        base = {"name": "tacgan", **LOKT_GAN}
        taught = Surrogates(base=base, students=STUDENT, epochs=4, batch=32, lr=0.05, per_class=60)
        prior = taught.train(world.split.public, world.target.view(["labels"]), work=NoWork())
    if name == "smile":
        taught = Experts(students=STUDENT, draws=200, epochs=6, batch=32)
        view = world.target.view(["scores"])
        prior = taught.train(world.split.public, view, base=prior, work=NoWork())
    lifts, sure = lift(world, attack, prior)
    assert sure > SURE
    assert min(lifts) >= LEAST


def test_an_attack_on_erased_images_breaks_it(world):
    lifts, sure = lift(world, Gmi(**CASES["gmi"], erase=0.4), world.prior)
    assert sure > SURE
    assert min(lifts) >= LEAST


@pytest.mark.slow
def test_students_alone_break_it(world):
    """The search never asks the target, which is therefore less sure of its images."""
    prior = with_students(world, statistics=0, draws=2000)
    attack = Gmi(**CASES["gmi"], students=True, alone=True)
    lifts, sure = lift(world, attack, prior)
    assert sure > 0.5
    assert min(lifts) >= LEAST


def test_ked_mi_breaks_it_with_a_prior_that_the_target_taught(world):
    method = Kplus1(
        start="faces32",
        width=48,
        critic_width=8,
        batch=16,
        kernels=4,
        kernel_size=4,
        critic_steps=1,
        steps=20,
        average=0.9,
    )
    prior = method.train(world.split.public, world.target.view(["gradients"]), work=NoWork())
    lifts, sure = lift(world, attacks.get("kedmi")(**CASES["kedmi"]), prior)
    assert sure > SURE
    assert min(lifts) >= LEAST
