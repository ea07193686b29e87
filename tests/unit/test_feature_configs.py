"""Configs of split models have the strengths and cuts of their papers."""

from dataclasses import replace

import pytest

import shipped
from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import experiments
from frostglass.models.cut import cut
from frostglass.training.build import untrained

ROOT = shipped.CONFIGS
PATHS = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path
    for path in shipped.PATHS
    if any(exp.surface == "features" for _, exp in experiments(read_config(path)))
}


def made(name):
    return [experiment for _, experiment in experiments(read_config(PATHS[name]))]


def strengths(name, defense, parameter):
    return list(
        dict.fromkeys(
            getattr(d, parameter) for exp in made(name) for d in exp.defenses if d.name == defense
        )
    )


def test_which_there_are():
    assert set(PATHS) == {
        "folder-features",
        "faces/features",
        "faces/protections",
        "faces/deeper-cuts",
        "faces/later-cuts",
        "faces/harder-features",
        "faces/predictions",
        "faces/crafter-z",
        "faces/trained-protections",
        "faces/feature-layers",
        "faces/feature-perceptual",
        "faces/server-training",
        "faces/harden-features",
        "faces/analysis-features",
        "celeba/resnet50-adv-learn",
        "celeba/resnet50-adv-learn-public",
        "celeba/resnet50-adv-learn-both",
        "celeba/resnet50-adv-learn-smiling",
        "celeba/resnet18-crafter",
        "celeba/resnet18-crafter-z",
        "celeba/resnet18-crafter-training",
        "lfw/resnet18-crafter",
    }


@pytest.mark.parametrize("name", sorted(PATHS))
def test_every_config_has_an_undefended_model_and_is_listed(name):
    if name != "faces/harden-features":  # whose defenses are those to tune
        assert any(not exp.defenses for exp in made(name))
    assert f"({name}.toml)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_betas_are_those_of_the_appendix():
    assert strengths("celeba/resnet18-crafter", "crafter", "beta") == [0.5, 1, 2, 10]
    assert strengths("lfw/resnet18-crafter", "crafter", "beta") == [3.5, 4, 4.5, 6, 7]
    assert strengths("celeba/resnet18-crafter", "crafter_z", "beta") == [20 / 16, 50 / 16]
    assert strengths("lfw/resnet18-crafter", "crafter_z", "beta") == [5 / 4, 10 / 4, 20 / 4]
    assert [made(f"{data}/resnet18-crafter")[0].prior.latent for data in ("celeba", "lfw")] == [
        500,
        3000,
    ]


def test_the_step_sizes_of_crafter_z_are_those_of_its_table():
    name = "celeba/resnet18-crafter-z"
    assert strengths(name, "crafter_z", "lr") == [1e-4, 5e-4, 1e-3]
    assert strengths(name, "crafter_z", "beta") == [20 / 16, 50 / 16]
    assert len({exp.defenses for exp in made(name)}) == 1 + 6
    assert strengths("faces/crafter-z", "crafter_z", "lr") == [1e-4, 5e-4, 1e-3]


def test_the_configs_of_crafter_share_images_and_the_training_of_the_prior():
    scenarios = [f"celeba/resnet18-crafter{end}" for end in ("", "-z", "-training")]
    inference, *others = (made(name)[0] for name in [*scenarios, "lfw/resnet18-crafter"])
    assert all(exp.data == inference.data for exp in others[:-1])
    for exp in (inference, *others):
        assert (exp.prior.lr, exp.prior.steps) == (4e-4, 100_000)


def test_the_training_scenario_has_the_settings_of_the_appendix():
    first = made("celeba/resnet18-crafter-training")[0]
    assert (first.prior.latent, first.prior.first_size) == (700, 8)
    assert (first.attack.steps, first.attack.lr) == (1000, 0.03)


def test_lambdas_are_those_of_the_tables():
    for name in ("faces/feature-perceptual", "celeba/resnet50-adv-learn"):
        assert strengths(name, "adv_learn", "perceptual") == [0, 1, 2, 3, 4, 5, 10]
        assert strengths(name, "adv_learn", "pixel") == [4]  # 1 for images in [-1, 1]


@pytest.mark.parametrize(
    ("extra", "private", "public", "attributes", "case"),
    [
        ("public", "celeba/private", "celeba/public-extended", ("all",), "mu1 = 0"),
        ("both", "celeba/private-extended", "celeba/public-extended", ("all",), "mu1 = 0"),
        ("smiling", None, None, ("Smiling",), "mu1 > 0"),
    ],
)
def test_the_extras_of_the_first_table_differ_from_its_other_rows(
    extra, private, public, attributes, case
):
    """AdvLearn's Table 1: rows 5 and 6, 7 and 8, 9 and 10."""
    rows, others = made(f"celeba/resnet50-adv-learn-{extra}"), made("celeba/resnet50-adv-learn")
    attacks = {each.case: each.attack for each in others}
    assert len(rows) == 4  # undefended and lambda 1, each with two attacks
    for row in rows:
        if private is None:
            assert row.data == others[0].data
        else:
            assert (str(row.data.private), str(row.data.public)) == (private, public)
        assert row.target.attributes == attributes
        assert replace(row.target, attributes=("all",)) == others[0].target
        assert row.attack == attacks[row.case]
        assert row.defenses in {each.defenses for each in others[:8]}
    assert {row.case for row in rows} == {case, "feature-level"}


def test_the_layer_study_has_six_cuts_that_can_be_made():
    study = made("faces/feature-layers")
    cuts = list(dict.fromkeys(exp.target.cut for exp in study))
    assert len(cuts) == 6
    shape = study[0].data.image_shape
    module = untrained(study[0].target, tuple("abc"), shape, (), seed=0).module
    sizes = [cut(module, tap, shape).feature_shape for tap in cuts]
    assert sizes == [(16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8), (64, 1, 1), (3,)]


@pytest.mark.parametrize(("size", "shape"), [(64, (64, 16, 16)), (128, (64, 32, 32))])
def test_the_published_encoder_has_its_published_features(size, shape):
    (first, *_) = made("celeba/resnet18-crafter" if size == 64 else "lfw/resnet18-crafter")
    assert first.data.size == size
    target = untrained(first.target, tuple("abc"), (3, size, size), (), seed=0)
    assert cut(target.module, target.cut, (3, size, size)).feature_shape == shape
