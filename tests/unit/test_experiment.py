"""Experiments and grids: every problem at once, with its place and what to do."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import shipped
from frostglass.attacks.base import Attack
from frostglass.attacks.model.kedmi import Kedmi
from frostglass.auditing.config_file import read_config, read_with_generator
from frostglass.auditing.expand import assign, expand
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.defenses.training.calor import Calor
from frostglass.priors.kplus1 import Kplus1
from frostglass.priors.wgan import Wgan

BAD = {
    "name": "x",
    "sede": 1,
    "data": {"name": "faces", "size": 9, "identites": 3},
    "target": {"epochs": 0, "optimizer": "adamm"},
    "defenses": [{"name": "calor", "rank": -1}, {"name": "lable_smoothing"}],
    "evaluators": [{"model": "resnet", "lr": "fast"}],
    "attack": {"name": "gmi", "stepz": 3},
    "prior": {"name": "wgan", "width": 1},
}


def test_all_problems_at_once_with_their_places():
    with pytest.raises(ConfigError) as caught:
        Experiment.parse(BAD)
    text = "\n".join(caught.value.problems)
    for part in (
        "sede: no such section; did you mean 'seed'?",
        "data.size",
        "data.identites: no such parameter; did you mean 'identities'?",
        "target.epochs",
        "target.optimizer",
        "defenses[0].rank",
        "defenses[1].name: no defense named 'lable_smoothing': did you mean 'label_smoothing'?",
        "evaluators[0].lr",
        "attack.stepz: no such parameter; did you mean 'steps'?",
        "prior.width",
    ):
        assert part in text
    assert len(caught.value.problems) == 10


def test_conflicting_defenses_are_found_before_any_compute():
    with pytest.raises(
        ConfigError,
        match="defenses: calor and label_smoothing both replace the classification loss",
    ):
        Experiment.parse({"defenses": [{"name": "calor"}, {"name": "label_smoothing"}]})


def test_defaults_make_a_whole_experiment():
    made = Experiment.parse({})
    assert made.attack.name == "gmi"
    assert made.defenses == ()
    assert [type(config).__name__ for config in made.evaluators] == [
        "Training", "Training", "Embedder",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attack": "gmi"}, r"attack: expected a table with a name, one of brepmi, decoder, gmi"),
        ({"defenses": {"name": "calor"}}, "defenses: expected a list of tables"),
        ({"evaluators": []}, "evaluators: at least one is needed"),
        ({"evaluators": [{"kind": "judge"}]}, "kind: expected classifier or embedder, got 'judge'"),
        ({"evaluators": [{"kind": "embedder"}]}, "at least one classifier first, then embedders"),
        (
            {"evaluators": [{}, {"kind": "embedder"}, {"kind": "embedder", "source": "dlib"}]},
            "expected the embedder without source last",
        ),
        (
            {"evaluators": [{}, {"kind": "embedder", "source": "dlip"}]},
            r"evaluators\[1\].source: expected public, faces32, dlib, onnx:FILE",
        ),
        (
            {"evaluators": [{}, {"kind": "embedder", "source": "timm:resnet18"}]},
            r"evaluators\[1\].weights: required with timm:resnet18: an untrained network",
        ),
        (
            {"evaluators": [{}, {"kind": "embedder", "weights": "a.safetensors"}]},
            r"evaluators\[1\].weights: name a network of yours as source, or leave it out",
        ),
        ({"seed": "one"}, "seed: expected a int"),
        ({"split": {"test": 0.6, "validation": 0.5}}, "must sum to less than 1"),
        ({"target": 3}, "target: expected a table"),
        ({"grid": {"seed": 3}}, "grid: expected a table of non-empty lists"),
    ],
)
def test_wrong_shapes(values, message):
    with pytest.raises(ConfigError, match=message):
        experiments(values)


def test_grid_is_every_combination_with_labels():
    made = expand(
        {
            "attack": {"name": "gmi"},
            "grid": {"defenses": [[], [{"name": "calor"}]], "attack.loss": ["ce", "margin"]},
        }
    )
    assert [label for label, _ in made] == [
        "undefended, attack.loss=ce",
        "undefended, attack.loss=margin",
        "calor, attack.loss=ce",
        "calor, attack.loss=margin",
    ]
    assert made[3][1] == {
        "attack": {"name": "gmi", "loss": "margin"},
        "defenses": [{"name": "calor"}],
    }


def test_dotted_names_in_a_grid_may_be_nested():
    nested, quoted = (
        expand({"grid": {"attack": {"loss": ["ce"]}}}),
        expand({"grid": {"attack.loss": ["ce"]}}),
    )
    assert nested == quoted == [("attack.loss=ce", {"attack": {"loss": "ce"}})]


def test_labels_tell_the_choices_of_a_grid_apart():
    made = expand(
        {
            "grid": {
                "defenses": [
                    [],
                    [{"name": "calor", "rank": 5}],
                    [{"name": "calor", "rank": 9}],
                    [{"name": "label_smoothing", "alpha": -0.1}],
                ]
            }
        }
    )
    assert [label for label, _ in made] == [
        "undefended",
        "calor(rank=5)",
        "calor(rank=9)",
        "label_smoothing",
    ]


@pytest.mark.parametrize(
    "defenses", [["calor"], [["calor"]], [[{"nam": "calor"}]], [{"name": "calor"}]]
)
def test_a_grid_of_malformed_defenses_is_a_config_error(defenses):
    with pytest.raises(ConfigError, match="defenses"):
        experiments({"grid": {"defenses": defenses}})


def test_a_defense_that_acts_on_training_does_not_go_with_loaded_weights():
    with pytest.raises(
        ConfigError,
        match=r"label_smoothing acts on training, and target\.weights are loaded without training",
    ):
        Experiment.parse(
            {"target": {"weights": "w.safetensors"}, "defenses": [{"name": "label_smoothing"}]}
        )


def test_one_run_has_one_set_of_evaluators():
    with pytest.raises(ConfigError, match="evaluators must be the same"):
        experiments({"grid": {"evaluators": [[{"model": "lenet"}], [{"model": "resnet"}]]}})


def test_settings_are_laid_over_the_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('seed = 1\n[attack]\nname = "gmi"\n[[evaluators]]\nmodel = "cnn"\n')
    config = read_config(path, ["attack.steps=7", "name=quick", "evaluators.0.epochs=3"])
    assert config["attack"]["steps"] == 7
    assert config["name"] == "quick"
    assert config["evaluators"][0]["epochs"] == 3


@pytest.mark.parametrize("setting", ["attack.steps", "=3", "evaluators.5.epochs=1", "seed.x=1"])
def test_bad_settings(tmp_path, setting):
    path = tmp_path / "c.toml"
    path.write_text('seed = 1\n[[evaluators]]\nmodel = "cnn"\n')
    with pytest.raises(ConfigError):
        read_config(path, [setting])


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = [1,")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_config(tmp_path / "bad.toml")


def test_assign_makes_tables_on_the_way():
    config: dict = {}
    assign(config, "a.b.c", 1)
    assert config == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    "path",
    shipped.PATHS + sorted(Path(__file__).parents[2].glob("src/frostglass/auditing/*.toml")),
    ids=lambda p: p.name,
)
def test_every_shipped_config_loads(path):
    assert experiments(read_config(path))


def test_defenses_alone_and_in_a_grid_are_refused():
    with pytest.raises(ConfigError, match=r"defenses: set both alone and in \[grid\]"):
        expand({"defenses": [{"name": "calor"}], "grid": {"defenses": [[]]}})


def test_one_experiment_has_no_grid():
    with pytest.raises(ConfigError, match=r"grid: one experiment has none"):
        Experiment.parse({"grid": {"seed": [0, 1]}})


# Variants


def test_a_variant_sets_defaults_that_explicit_values_override():
    made = Experiment.parse({"attack": {"name": "kedmi", "variant": "tl-dmi"}}).attack
    assert made == Kedmi(log_variance=0.0, clamp="forward", steps=3000, patience=0)
    own = Experiment.parse(
        {"attack": {"name": "kedmi", "steps": 7, "variant": "tl-dmi", "clamp": "off"}}
    ).attack
    assert own == Kedmi(log_variance=0.0, clamp="off", steps=7, patience=0)
    assert "variant" not in asdict(made)  # what is recorded is what was run


def test_a_variant_is_one_value_of_a_grid():
    made = experiments(
        {"attack": {"name": "gmi", "steps": 3}, "grid": {"attack.variant": ["margin", "noise"]}}
    )
    assert [
        (label, exp.attack.loss, exp.attack.samples, exp.attack.steps) for label, exp in made
    ] == [
        ("attack.variant=margin", "margin", 1, 3),
        ("attack.variant=noise", "ce", 8, 3),
    ]


@pytest.mark.parametrize(
    ("attack", "problem"),
    [
        (
            {"name": "kedmi", "variant": "tldmi"},
            "attack.variant: kedmi has no variant 'tldmi'; did you mean 'tl-dmi'? known: aimed, ",
        ),
        ({"name": "gmi", "variant": 3}, "attack.variant: gmi has no variant 3; known: aimed, "),
        ({"name": "gmi", "variant": ["margin"]}, "attack.variant: gmi has no variant ['margin']; "),
        ({"name": "brepmi", "variant": "margin"}, "attack.variant: brepmi has no variant 'margin'"),
        (
            {"name": "modes", "base": {"name": "gmi"}, "variant": "margin"},
            "attack.variant: no such parameter; ",
        ),
        (
            {"name": "gmi", "variant": "margin", "stepz": 3},
            "attack.stepz: no such parameter; did you mean 'steps'?",
        ),
    ],
)
def test_a_wrong_variant_is_one_problem(attack, problem):
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"attack": attack})
    (line,) = caught.value.problems
    assert line.startswith(problem)
    assert "\n" not in line


def test_what_has_no_variants_is_given_none():
    with pytest.raises(ConfigError, match=r"prior\.variant: no such parameter"):
        Experiment.parse({"prior": {"name": "wgan", "variant": "margin"}})
    with pytest.raises(ConfigError, match=r"defenses\[0\]\.variant: no such parameter"):
        Experiment.parse({"defenses": [{"name": "calor", "variant": "margin"}]})


# Cases: what belongs together in a grid

CASES = [
    {"case": "GMI", "attack": {"name": "gmi", "steps": 5}},
    {
        "case": "KED-MI",
        "prior": {"name": "kplus1", "steps": 3},
        "attack": {"name": "kedmi", "variant": "bido"},
    },
]


def test_a_case_sets_prior_and_attack_together():
    made = experiments({"prior": {"name": "wgan", "steps": 9}, "grid": {"case": CASES}})
    assert [label for label, _ in made] == ["GMI", "KED-MI"]
    (_, gmi), (_, ked) = made
    assert [exp.case for exp in (gmi, ked)] == ["GMI", "KED-MI"]
    assert (gmi.prior, gmi.attack.name) == (Wgan(steps=9), "gmi")
    assert (ked.prior, ked.attack) == (
        Kplus1(steps=3),
        Kedmi(log_variance=0.0, clamp="log", steps=5000, patience=0),
    )


def test_cases_are_crossed_with_defenses():
    made = experiments({"grid": {"defenses": [[], [{"name": "calor"}]], "case": CASES}})
    assert [label for label, _ in made] == [
        "undefended, GMI",
        "undefended, KED-MI",
        "calor, GMI",
        "calor, KED-MI",
    ]
    assert [(len(exp.defenses), exp.attack.name, exp.prior.name) for _, exp in made] == [
        (0, "gmi", "wgan"), (0, "kedmi", "kplus1"), (1, "gmi", "wgan"), (1, "kedmi", "kplus1"),
    ]  # fmt: skip


def test_a_section_with_a_name_replaces_and_one_without_is_joined():
    base = {
        "attack": {"name": "gmi", "steps": 5, "lr": 0.1},
        "target": {"epochs": 3, "options": {"width": 4}},
    }
    cases = [
        {"case": "more", "attack": {"steps": 9}, "target": {"options": {"width": 8}}},
        {"case": "other", "attack": {"name": "gmi", "steps": 9}},
    ]
    (_, more), (_, other) = expand(base | {"grid": {"case": cases}})
    assert more == {
        "case": "more",
        "attack": {"name": "gmi", "steps": 9, "lr": 0.1},
        "target": {"epochs": 3, "options": {"width": 8}},
    }
    assert other == {
        "case": "other",
        "attack": {"name": "gmi", "steps": 9},
        "target": {"epochs": 3, "options": {"width": 4}},
    }
    assert base["attack"] == {
        "name": "gmi",
        "steps": 5,
        "lr": 0.1,
    }  # nothing of what was given changes
    assert cases[0]["target"] == {"options": {"width": 8}}


@pytest.mark.parametrize("order", [("case", "attack.steps"), ("attack.steps", "case")])
def test_what_else_is_in_the_grid_is_laid_over_the_case(order):
    """TOML lists other grid values before cases; no case may overwrite them."""
    grid = {"case": [{"case": "a", "attack": {"name": "gmi", "steps": 9}}], "attack.steps": [1, 2]}
    made = expand({"grid": {name: grid[name] for name in order}})
    assert [config["attack"] for _, config in made] == [
        {"name": "gmi", "steps": 1},
        {"name": "gmi", "steps": 2},
    ]
    assert [set(label.split(", ")) for label, _ in made] == [
        {"a", "attack.steps=1"},
        {"a", "attack.steps=2"},
    ]


def test_a_section_that_every_case_replaces_is_refused():
    with pytest.raises(
        ConfigError, match="attack: set alone, and every case of the grid sets its own"
    ):
        expand({"attack": {"name": "gmi"}, "grid": {"case": CASES}})


@pytest.mark.parametrize(
    "case", [{"attack": {"name": "gmi"}}, {"case": 3}, "KED-MI", {"case": ["a"]}]
)
def test_a_case_without_a_name_is_refused(case):
    with pytest.raises(
        ConfigError,
        match=r'grid\.case: expected tables with a name, such as \{ case = "KED-MI", prior = ',
    ):
        experiments({"grid": {"case": [case]}})


def test_a_mistake_in_a_case_is_found_before_any_compute():
    with pytest.raises(ConfigError, match=r"atack: no such section; did you mean 'attack'\?"):
        experiments({"grid": {"case": [{"case": "typo", "atack": {"name": "gmi"}}]}})
    with pytest.raises(ConfigError, match="grid: expected a table of non-empty lists"):
        experiments({"grid": {"case": {"case": "KED-MI"}}})
    with pytest.raises(ConfigError, match="evaluators must be the same"):
        experiments(
            {"grid": {"case": [{"case": "a"}, {"case": "b", "evaluators": [{"model": "lenet"}]}]}}
        )


def test_two_cases_of_one_name_and_values_given_twice_are_refused():
    case = {"case": "A", "attack": {"name": "gmi"}}
    with pytest.raises(ConfigError, match=r"grid\.case: two cases are named 'A'"):
        expand({"grid": {"case": [case, case]}})
    with pytest.raises(ConfigError, match=r"seed: set both in \[grid\] and in a case"):
        expand({"grid": {"seed": [0, 1], "case": [case | {"seed": 3}]}})


def test_a_generator_of_ones_own_does_not_hide_a_cases_prior(tmp_path):
    config = tmp_path / "grid.toml"
    config.write_text(
        '[[grid.case]]\ncase = "A"\n[[grid.case]]\ncase = "B"\n[grid.case.prior]\nname = "wgan"\n'
    )
    with pytest.raises(
        ConfigError, match="replaces the prior of the whole config, and its case 'B' sets its own"
    ):
        read_with_generator(config, (), "onnx:gen.onnx", "normal:8", None, resize=False)
    assert "prior" not in read_with_generator(config, (), None, None, None, resize=False)


# Objects and methods from outside


@parameters
class Outside(Attack):
    """An attack that no package registers."""

    iterations: int = 3
    surface = "model"
    access = ("labels",)
    kept = 1

    def run(self, view, assets, people, *, seed, work):
        raise NotImplementedError


def test_an_object_is_taken_as_it_is():
    made = Experiment.parse({"attack": Kedmi(steps=3), "defenses": [Calor(rank=3)]})
    assert made.attack == Kedmi(steps=3)
    assert made.defenses == (Calor(rank=3),)
    grid = experiments({"grid": {"defenses": [[], [Calor(rank=3)]]}})
    assert [label for label, _ in grid] == ["undefended", "calor"]


def test_a_class_is_named_by_its_path():
    path = f"{__name__}:Outside"
    sys.modules.setdefault(__name__, sys.modules[Outside.__module__])
    made = Experiment.parse({"attack": {"name": path, "iterations": 7}})
    assert (made.attack.iterations, made.attack.name) == (7, path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such.module:Attack", "cannot be imported"),
        ("frostglass.attacks.base:Missing", "cannot be imported"),
        ("frostglass.store.store:Store", "expected a subclass of frostglass.attacks.base.Attack"),
        ("frostglass.attacks.base:Attack", "lacks access, kept, run: define each of them"),
    ],
)
def test_a_path_that_is_no_attack_is_one_problem(name, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        Experiment.parse({"attack": {"name": name}})
    assert len(caught.value.problems) == 1


def test_an_object_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"attack: .*expected a subclass"):
        Experiment.parse({"attack": Calor()})


# Surfaces

CUT = {"cut": "stage1", "attributes": ["all"]}


def test_the_surface_follows_from_the_cut():
    model, features = Experiment.parse({}), Experiment.parse({"target": CUT})
    assert (model.surface, model.attack.name, model.prior.name) == ("model", "gmi", "wgan")
    assert (features.surface, features.attack.name, features.prior) == ("features", "decoder", None)
    assert [metric.name for metric in features.metrics] == [
        "verification", "top1", "face", "likeness", "manifold",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"attack": {"name": "decoder"}}, "attack: decoder attacks features, and this config exp"),
        ({"target": CUT, "attack": {"name": "gmi"}}, "attack: gmi attacks model, and this config"),
        ({"target": CUT, "metrics": [{"name": "outcome"}]}, "metrics: outcome cannot be"),
        (
            {"attack": {"name": "gmi", "keep": 1}, "metrics": [{"name": "prdc"}]},
            "metrics: prdc with 3 neighbours needs at least 4 reconstructions of each person, got",
        ),
        ({"metrics": [{"name": "manifold"}]}, "metrics: accuracy is required"),
        ({"target": {"cut": "stage1"}}, r"target\.attributes: required with target\.cut"),
        ({"target": CUT | {"cut": "none"}}, r"target\.cut: 'none' names no layer"),
        ({"defenses": [{"name": "crafter"}]}, "defenses: crafter acts on features that leave"),
        ({"target": CUT, "defenses": [{"name": "calor"}]}, "calor defends a classifier of people"),
        ({"target": CUT, "embedder": {"cut": "stage1"}}, "embedder: classifies people and is not"),
        ({"target": CUT, "prior": {"name": "kplus1"}}, "prior: kplus1 is fitted to a classifier"),
        ({"target": CUT, "attack": {"name": "latent"}}, "prior: latent needs one, got none"),
        ({"attacker_prior": {"name": "wgan"}}, "attacker_prior: used by audits of features only"),
        (
            {"target": CUT, "defenses": [{"name": "crafter"}, {"name": "crafter_z"}]},
            "crafter and crafter_z both release features",
        ),
    ],
)
def test_what_does_not_fit_the_surface_is_refused(values, problem):
    with pytest.raises(ConfigError, match=problem):
        Experiment.parse(values)


def test_a_model_audit_can_ask_for_face_similarity():
    exp = Experiment.parse(
        {"metrics": [{"name": name} for name in ("verification", "accuracy", "face")]}
    )
    assert exp.needs("embedder")
    assert not Experiment.parse({}).needs("embedder")
