"""Configs: every problem at once, with its place and what to do."""

from pathlib import Path

import pytest

from frostglass.errors import ConfigError
from frostglass.experiments.config import Experiment, assign, expand, experiments, read_config

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
        "data.size", "data.identites: no such parameter; did you mean 'identities'?",
        "target.epochs", "target.optimizer",
        "defenses[0].rank", "defenses[1].name: no defense named 'lable_smoothing': did you mean 'label_smoothing'?",
        "evaluators[0].lr", "attack.stepz: no such parameter; did you mean 'steps'?", "prior.width",
    ):  # fmt: skip
        assert part in text
    assert len(caught.value.problems) == 10


def test_conflicting_defenses_are_found_before_any_compute():
    with pytest.raises(ConfigError, match="defenses: calor and label_smoothing both replace the classification loss"):
        Experiment.parse({"defenses": [{"name": "calor"}, {"name": "label_smoothing"}]})


def test_defaults_make_a_whole_experiment():
    made = Experiment.parse({})
    assert made.attack.name == "gmi"
    assert made.defenses == ()
    assert len(made.evaluators) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attack": "gmi"}, r"attack: expected a table with a name, one of brepmi, gmi"),
        ({"defenses": {"name": "calor"}}, "defenses: expected a list of tables"),
        ({"evaluators": []}, "evaluators: at least one is needed"),
        ({"seed": "one"}, "seed: expected a int"),
        ({"split": {"test": 0.6, "validation": 0.5}}, "leave nothing to train on"),
        ({"target": 3}, "target: expected a table"),
        ({"grid": {"seed": 3}}, "grid: expected a table of non-empty lists"),
    ],
)
def test_wrong_shapes(values, message):
    with pytest.raises(ConfigError, match=message):
        experiments(values)


def test_grid_is_every_combination_with_labels():
    made = expand({"attack": {"name": "gmi"}, "grid": {"defenses": [[], [{"name": "calor"}]], "attack.loss": ["ce", "margin"]}})
    assert [label for label, _ in made] == [
        "undefended, attack.loss=ce",
        "undefended, attack.loss=margin",
        "calor, attack.loss=ce",
        "calor, attack.loss=margin",
    ]
    assert made[3][1] == {"attack": {"name": "gmi", "loss": "margin"}, "defenses": [{"name": "calor"}]}


def test_dotted_names_in_a_grid_may_be_nested():
    nested, quoted = expand({"grid": {"attack": {"loss": ["ce"]}}}), expand({"grid": {"attack.loss": ["ce"]}})
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
    assert [label for label, _ in made] == ["undefended", "calor(rank=5)", "calor(rank=9)", "label_smoothing"]


@pytest.mark.parametrize("defenses", [["calor"], [["calor"]], [[{"nam": "calor"}]], [{"name": "calor"}]])
def test_a_grid_of_malformed_defenses_is_a_config_error(defenses):
    with pytest.raises(ConfigError, match="defenses"):
        experiments({"grid": {"defenses": defenses}})


def test_a_defense_that_acts_on_training_does_not_go_with_loaded_weights():
    with pytest.raises(ConfigError, match=r"label_smoothing acts on training, and target\.weights are loaded without any"):
        Experiment.parse({"target": {"weights": "w.safetensors"}, "defenses": [{"name": "label_smoothing"}]})


def test_one_run_has_one_set_of_judges():
    with pytest.raises(ConfigError, match="metrics and evaluators must be the same"):
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
    sorted(Path(__file__).parents[2].glob("configs/**/*.toml")) + sorted(Path(__file__).parents[2].glob("src/**/*.toml")),
    ids=lambda p: p.name,
)
def test_every_shipped_config_loads(path):
    assert experiments(read_config(path))


def test_defenses_alone_and_in_a_grid_are_refused():
    with pytest.raises(ConfigError, match=r"defenses: given alone and in \[grid\], and only one can count"):
        expand({"defenses": [{"name": "calor"}], "grid": {"defenses": [[]]}})


def test_one_experiment_has_no_grid():
    with pytest.raises(ConfigError, match=r"grid: one experiment has none"):
        Experiment.parse({"grid": {"seed": [0, 1]}})
