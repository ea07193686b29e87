"""The published configs hold exactly the strengths, recipes and attacks of the papers' tables."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import shipped
from frostglass.attacks._search.descent import Descent
from frostglass.attacks.base import attacks
from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.core.types import Target
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, TrainingSize
from frostglass.models.base import models
from frostglass.training.build import untrained
from frostglass.training.settings import Training
from published_tables import (
    ATTACKS,
    CLASSES,
    GAUSSIANS,
    LOSSES,
    RECIPES,
    SCHEDULES,
    STRENGTHS,
    STYLED,
)

ROOT = shipped.CONFIGS
EVERY = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in shipped.PATHS}
EXPERIMENTS = {name: experiments(read_config(path)) for name, path in EVERY.items()}
# The configs of features have tests of their own.
PATHS = {name: path for name, path in EVERY.items() if EXPERIMENTS[name][0][1].surface == "model"}
OF_NO_PAPER = {name for name in PATHS if name.startswith("faces/")} | {
    "folder",
    "lfw/defenses",
    "mnist/gmi",
    "mnist/kedmi",
    "mnist/defenses",
}


def strength(defense: Defense) -> tuple:
    """Return a defense's name in the tables and its strength there."""
    d = SimpleNamespace(**vars(defense))
    if defense.name == "bido":
        return ({"hsic_nocco": "hsic", "coco_frobenius": "coco"}[d.measure], d.lambda_x, d.lambda_y)
    if defense.name == "calor":
        adapted = (d.a, d.b, d.activation, d.gain) == (1, 8, "tanh", 1)
        return ("calor", d.rank) if adapted else ("lor", d.rank, d.activation)
    if defense.name == "transfer":
        assert d.pretrain == "start"
        assert d.frozen_norm == "update"  # as published
        return ("tl", getattr(d, d.boundary))
    name, value = {
        "mid": ("mid", "weight"),
        "label_smoothing": ("ls", "alpha"),
        "dpsgd": ("dpsgd", "noise"),
    }[defense.name]
    return (name, getattr(d, value))


def read(name: str) -> list[Any]:
    return [experiment for _, experiment in EXPERIMENTS[name]]


def stylegan2_file(experiment: Any) -> str | None:
    """Return the file of a pretrained StyleGAN2, if the experiment uses one."""
    return getattr(experiment.prior, "weights", None)


@pytest.fixture(scope="module")
def known_models() -> set[str]:
    import timm
    from torchvision import models as zoo

    return {
        *models.names(),
        *(f"timm:{name}" for name in timm.list_models()),
        *(f"torchvision:{name}" for name in zoo.list_models(module=zoo)),
    }


@pytest.mark.parametrize("name", PATHS)
def test_every_config_can_be_read_and_names_known_models(name, known_models):
    chosen = read(name)
    labels = [label for label, _ in EXPERIMENTS[name]]
    assert len(set(labels)) == len(labels)
    named = {experiment.target.model for experiment in chosen}
    named |= {
        evaluator.model for evaluator in chosen[0].evaluators if isinstance(evaluator, Training)
    }
    named |= {
        student["model"]
        for experiment in chosen
        for student in getattr(experiment.prior, "students", ())
    }
    assert named <= known_models


def test_every_config_is_in_a_table_and_every_table_has_its_config():
    assert set(PATHS) - OF_NO_PAPER == set(STRENGTHS) == set(RECIPES) == set(ATTACKS)


@pytest.mark.parametrize("name", STRENGTHS)
def test_strengths_are_those_of_the_tables(name):
    strengths = [
        tuple(value for defense in experiment.defenses for value in strength(defense))
        for experiment in read(name)
    ]
    assert sorted(set(strengths) - {()}, key=str) == sorted(map(tuple, STRENGTHS[name]), key=str)
    has_undefended_model = () in strengths
    assert has_undefended_model == (name != "celeba/vgg16-tl-pretraining")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_those_of_the_tables(name):
    training = read(name)[0].target
    recipe = (training.optimizer, training.lr, training.weight_decay)
    assert (*recipe, training.batch, training.epochs) == RECIPES[name]
    if training.schedule == "milestones":
        assert (training.milestones, training.decay) == SCHEDULES[name]
    else:
        assert training.schedule == "constant"
        assert name not in SCHEDULES


@pytest.mark.parametrize("name", STRENGTHS)
def test_images_are_as_in_the_protocols(name):
    experiment = read(name)[0]
    size, training = experiment.data.size, experiment.target
    assert size == {"mnist": 32, "cifar10": 32}.get(
        name.split("/")[0], 224 if training.model.startswith(("timm:", "torchvision:")) else 64
    )
    normalised = size == 224 or training.model == "resnet34"  # others take images in [0, 1]
    assert training.mean == training.std == ((0.5,) * 3 if normalised else None)
    assert (training.crop, training.jitter) == (
        (0.85, (0.2, 0.2, 0.1, 0.1)) if size == 224 else (1.0, (0, 0, 0, 0))
    )
    assert training.cutout == (0.5 if training.model == "resnet34" else 0)
    assert training.shift == (4 if name.startswith("cifar10") else 0)


def attack_entry(experiment: Experiment) -> tuple:
    """Return an experiment's entry in `ATTACKS`."""
    attack: Any = experiment.attack
    prior: Any = experiment.prior
    base = prior.base_method or prior
    length = f"{base.weights} {base.crop}" if getattr(base, "weights", None) else base.steps
    trained = f"{base.name} {length}" if prior is base else f"{prior.name} on {base.name} {length}"
    steps = attack.max_queries if attack.name == "brepmi" else attack.steps
    if attack.name == "ifgmi":
        steps = (steps, *attack.block_steps)
    people = experiment.judging.identities
    return (experiment.case or attack.name, trained, steps, people, attack.keep)


@pytest.mark.parametrize("name", STRENGTHS)
def test_attacks_are_those_of_the_tables(name):
    chosen, published = read(name), list(ATTACKS[name])
    assert list(dict.fromkeys(map(attack_entry, chosen))) == published
    targets = {repr((each.seed, each.target, each.defenses)) for each in chosen}
    assert len(chosen) == len(targets) * len(published)  # every attack on every model


@pytest.mark.parametrize("name", ["vgg16-tl", "ir152-tl", "facenet64-tl", "resnet34-tl"])
def test_error_bars_are_three_trainings(name):
    """TL-DMI's Table 13 repeats experiments of the other tables."""
    once, thrice = read(f"celeba/{name}"), read(f"celeba/{name}-seeds")
    again = [replace(each, name=once[0].name, seed=0) for each in thrice]
    assert all(each in once for each in again)
    seeds = [each.seed for each in thrice]
    assert sorted(seeds) == sorted([0, 1, 2] * (len(thrice) // 3))


def styled_entry(attack: Any) -> tuple:
    """Return an attack's entry in `STYLED`."""
    smallest_crop = None if attack.name == "mirror" else attack.area[0]
    trials = getattr(attack, "trials", None)
    return (attack.pool, attack.candidates, attack.lr, smallest_crop, trials)


def test_attacks_on_a_stylegan_have_their_published_settings():
    entries = {
        (name, experiment.attack.name): styled_entry(experiment.attack)
        for name in ATTACKS
        for experiment in read(name)
        if stylegan2_file(experiment)
    }
    assert entries == STYLED


def test_attacks_on_a_stylegan_have_small_batches_at_224_pixels():
    """Gradients of larger batches through the largest targets would not fit 16 GiB."""
    experiments_224 = [
        experiment for name in ATTACKS for experiment in read(name) if experiment.data.size == 224
    ]
    assert {experiment.attack.batch for experiment in experiments_224} == {16}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_in_their_published_form(name):
    paper = "bido"
    if name.endswith("calor"):
        paper = "calor"
    elif name.endswith(("-tl", "-tl-seeds", "-sensitivity")):
        paper = "tl-dmi"
    for experiment in read(name):
        attack, prior = experiment.attack, experiment.prior
        assert getattr(attack, "loss", None) == LOSSES[attack.name]
        if attack.name != "ppa":  # the papers average over all candidates
            assert attack.keep == attack.candidates * attack.reads
        if attack.name == "vmi":
            assert (attack.layered, attack.identity_layers) == (True, None)
            assert (attack.lr, attack.points) == (1e-4, 32)
        if attack.name == "mirror":  # MIBench's weight, and the published one
            assert attack.weight == (1 if name == "facescrub/ir152-calor" else 10)
        if attack.name == "kedmi":
            assert (attack.log_variance, attack.clamp == "forward") == GAUSSIANS[paper]
            trials = (5, 5) if experiment.data.size == 32 else (1, 60)  # five of five classes
            assert (attack.candidates, attack.coupling) == trials
        if experiment.case == "LOMMA on KED-MI":
            form = ("kedmi", GAUSSIANS[paper][0], 1)
            assert (attack.on, attack.log_variance, attack.clamp) == form
        if attack.name == "lomma":
            assert attack.on == ("kedmi" if prior.base["name"] == "kplus1" else "gmi")
            assert (prior.epochs, prior.lr, prior.batch) == (20, 0.01, 64)
            for size, student in zip(range(3), prior.students, strict=True):
                assert student["model"] == f"torchvision:efficientnet_b{size}"
                assert student["start"].startswith(f"weights/efficientnet_b{size}")


@pytest.mark.parametrize("name", STRENGTHS)
def test_evaluators_and_priors_fit_the_target(name):
    for experiment in read(name):
        evaluators = {evaluator.model for evaluator in experiment.evaluators}
        assert len(evaluators | {experiment.target.model}) == 3  # no shared architecture
        prior, pretrained = experiment.prior, bool(stylegan2_file(experiment))
        assert pretrained or experiment.data.size < 224  # no trained prior generates 224 px
        assert not pretrained or (prior.name, prior.resize) == ("stylegan2", True)


@pytest.mark.parametrize(
    "name", ["celeba/resnet34-vmi", "celeba/resnet34-tl", "celeba/resnet34-tl-seeds"]
)
def test_the_stylegan_of_vmi_is_that_of_its_code(name):
    prior = read(name)[0].prior
    assert (prior.latent, prior.style, prior.layers) == (512, 512, 2)
    assert (prior.channel_base, prior.channel_max) == (16384, 512)
    thousand_images = round(prior.steps * prior.batch / 1000)
    assert (thousand_images, prior.lr, prior.r1) == (2298, 2.5e-3, 0.0128)


def header(name: str) -> list[str]:
    text = PATHS[name].read_text(encoding="utf-8")
    return text[: text.index("\nname = ")].splitlines()


@pytest.mark.parametrize("name", sorted({name for name, _ in STYLED}))
def test_header_says_how_the_weights_are_converted(name):
    text = " ".join(line.removeprefix("# ") for line in header(name))
    for weights in {stylegan2_file(experiment) for experiment in read(name)} - {None}:
        pickle = {"ffhq256.safetensors": "ffhq-res256-mirror-paper256-noaug.pkl"}.get(
            weights, weights.replace(".safetensors", ".pkl")
        )
        assert f"`frostglass convert stylegan2 {pickle} {weights}`" in text


@pytest.mark.parametrize("name", STRENGTHS)
def test_batches_are_balanced_on_celeba_vgg16_only_as_in_the_code(name):
    for experiment in read(name):
        for defense in experiment.defenses:
            if defense.name == "bido":
                assert defense.per_identity == (4 if name.startswith("celeba/vgg16") else 0)


@pytest.mark.parametrize("name", sorted(set(PATHS) - OF_NO_PAPER))
def test_header_names_paper_and_images(name):
    lines = header(name)
    assert all(line.startswith("# ") for line in lines)
    assert any(line.startswith("# Paper: ") for line in lines)
    assert any(line.startswith("# Images: ") for line in lines)


@pytest.mark.parametrize("path", EVERY.values(), ids=EVERY)
def test_no_line_of_a_config_is_too_long(path):
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 100


def test_readme_lists_every_config():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in EVERY if f"[{name}]({name}.toml)" not in text] == []


def trainable(target: Target) -> int:
    return sum(weight.numel() for weight in target.module.parameters() if weight.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRENGTHS)
def test_every_target_can_be_built_with_its_defenses(name):
    classes = tuple(map(str, range(CLASSES[name.split("/")[0]])))
    for experiment in read(name):
        config, defenses = experiment.target, experiment.defenses
        target = untrained(config, classes, experiment.data.image_shape, defenses, seed=0)
        size = TrainingSize(27018, config.batch, config.epochs)
        assert compose.problems(defenses, target, size) == []
        for defense in defenses:
            if defense.name == "transfer" and defense.boundary == "parameters":
                assert trainable(target) == pytest.approx(defense.parameters, abs=0.06e6)


# Published counts are for heads of 1,000 classes, also where the data has fewer.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("facescrub/resnet18-tl", 8.91e6),
        ("facescrub/maxvit-tl", 18.31e6),
        ("dogs/resnest101-tl", 27.94e6),
    ],
)
def test_named_boundaries_have_the_published_counts(name, published):
    defended = read(name)[1]
    classes, shape = tuple(map(str, range(1000))), defended.data.image_shape
    target = untrained(defended.target, classes, shape, defended.defenses, seed=0)
    assert trainable(target) == pytest.approx(published, abs=0.006e6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "celeba/vgg16-bido",
        "facescrub/resnet18-tl",
        "facescrub/ir152-calor",
        "mnist/mcnn-bido",
        "cifar10/vgg16-bido",
    ],
)
def test_every_evaluator_can_be_built(name):
    experiment = read(name)[0]
    for evaluator in experiment.evaluators:
        shape = experiment.data.image_shape
        assert untrained(evaluator, ("a", "b", "c"), shape, (), seed=0).head


@pytest.mark.parametrize("name", sorted(set(PATHS) - OF_NO_PAPER))
def test_searches_of_published_configs_take_all_their_steps(name):
    """Searches end early by default, so that a config has to say so."""
    searches = [each.attack for each in read(name) if isinstance(each.attack, Descent)]
    assert all(attack.patience == 0 for attack in searches)


SEARCHES = [cls for name in attacks.names() if issubclass(cls := attacks.get(name), Descent)]


@pytest.mark.parametrize("cls", SEARCHES, ids=lambda cls: cls.name)
def test_searches_end_early_except_in_published_variants(cls):
    assert cls().patience is None
    assert cls(steps=60).flat_steps == 20
    assert cls(steps=1500).flat_steps == 250
    assert cls.variant("published").patience == 0
    claims = ("as the ", "as published", "ablation")
    claimed = [name for name, (why, _) in cls.variants.items() if any(c in why for c in claims)]
    assert {"published"} <= set(claimed)
    assert {cls.variant(name).patience for name in claimed} == {0}
