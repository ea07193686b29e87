"""A later cut: the same network, features of a later layer, and what it refuses."""

import pytest
from torch import nn

from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.feature_facts import device_share
from frostglass.auditing.pipeline import audited_target, expose, split_of
from frostglass.auditing.victims import victims_of
from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.types import Target
from frostglass.defenses.base import Defense, defenses
from frostglass.hardening.budget import SearchBudget
from frostglass.hardening.goal import FeatureGoal
from frostglass.hardening.space import Tunable, candidates, described
from frostglass.hardening.study import Outcome, open_study
from frostglass.models.cut import check_later, cut, halves
from frostglass.plan.problems import problems
from frostglass.store.store import Store

TOY = {
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 10,
        "public_identities": 8,
        "public_images": 4,
    },
    "split": {"test": 0.3, "validation": 0.1},
    "target": {
        "model": "cnn",
        "options": {"width": 4},
        "epochs": 1,
        "batch": 16,
        "attributes": ["all"],
        "cut": "stage1",
    },
    "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8, "latent": 6},
    "attack": {"name": "decoder", "epochs": 1, "width": 4},
    "judging": {"identities": 3, "images": 2},
}
ROUNDED = {"name": "rounding", "bits": 1}


def later(layer, *more, **target):
    """Return an audit of features that leave behind a later layer."""
    values = {**TOY, "target": {**TOY["target"], **target}}
    return Experiment.parse({**values, "defenses": [{"name": "later_cut", "layer": layer}, *more]})


def cut_at(layer):
    return Experiment.parse({**TOY, "target": {**TOY["target"], "cut": layer}})


def test_only_the_cut_of_the_audited_network_moves():
    exp = later("stage3", {"name": "adv_learn"})
    assert (exp.target.cut, exp.audited.cut) == ("stage1", "stage3")
    assert [defense.name for defense in exp.training_defenses] == ["adv_learn"]
    assert later("").audited == later("").target
    assert later("", ROUNDED).protection.name == "rounding"


def test_it_is_the_network_that_is_cut_there_and_trained_once(tmp_path):
    store = Store(tmp_path)
    moved, given = later("pool"), cut_at("pool")
    split = split_of(moved, store)
    targets = [audited_target(exp, store, split) for exp in (moved, given, cut_at("stage1"))]
    assert targets[0].key == targets[1].key != targets[2].key
    trained = [folder for folder in (tmp_path / "target").iterdir() if folder.is_dir()]
    assert len(trained) == 3  # the whole network, and two cuts of it
    one, other = (expose(exp, store, split, victims_of(exp, split)) for exp in (moved, given))
    assert one.released.features.equal(other.released.features)


def test_rounding_can_follow(tmp_path):
    store = Store(tmp_path)
    exp = later("head", ROUNDED)
    split = split_of(exp, store)
    exposure = expose(exp, store, split, victims_of(exp, split))
    assert exposure.released.features.shape[1:] == (17,)
    assert exposure.released.features.unique().tolist() == [-4.0, 4.0]


def test_head_names_the_last_layer_of_any_network():
    layers = [nn.Flatten(), nn.Linear(3 * 8 * 8, 6), nn.ReLU(), nn.Linear(6, 2)]
    network = nn.Sequential(*layers).eval()
    assert cut(network, "head", (3, 8, 8)).tap == "3"
    target = Target(network, ("a", "b"), (3, 8, 8), head="3", taps=(), cut="3")
    assert halves(target).feature_shape == (2,)


def test_the_share_that_the_device_computes():
    layers = [nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 2)]
    network = nn.Sequential(*layers).eval()

    def share(tap):
        return device_share(Target(network, ("a", "b"), (3, 8, 8), head="3", taps=(), cut=tap))

    assert [share(tap) for tap in "0123"] == [0, *[192 * 6 / (192 * 6 + 12)] * 2, 1]


def test_layers_are_in_the_order_in_which_they_finish():
    network = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 6), nn.ReLU())).eval()

    def target(tap):
        return Target(network, tuple("abcdef"), (3, 8, 8), head="1.0", taps=(), cut=tap)

    check_later(target("1.0"), target("1"))
    for given, moved in (("1", "1.0"), ("0", "0")):
        with pytest.raises(ModelError, match=f"after {given!r} .*got {moved!r}: name a later"):
            check_later(target(given), target(moved))


@pytest.mark.parametrize(
    ("layer", "target", "message"),
    [
        ("stage1", {"cut": "stage3"}, r"after 'stage3' \(target.cut\), got 'stage1': name a later"),
        ("stage1", {}, r"after 'stage1' \(target.cut\), got 'stage1': name a later"),
        ("stem9", {}, "has no layer named 'stem9'"),
    ],
)
def test_cuts_that_cannot_be_moved_there(layer, target, message):
    found = problems([("toy", later(layer, **target))])
    assert any(line.startswith("target: ") for line in found)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(found)


def test_it_needs_a_cut_and_is_the_only_one():
    values = {key: TOY[key] for key in ("data", "prior")}
    with pytest.raises(ConfigError, match="later_cut acts on features that leave a device"):
        Experiment.parse({**values, "defenses": [{"name": "later_cut"}]})
    with pytest.raises(ConfigError, match="later_cut and later_cut both replace the cut"):
        later("pool", {"name": "later_cut", "layer": "head"})
    later("pool", {"name": "later_cut", "layer": ""})


def test_given_weights_can_be_cut_later_too():
    assert later("head", weights="mine.safetensors").audited.cut == "head"


def test_a_grid_compares_it_with_the_config_s_cut():
    moved = {"name": "later_cut", "layer": "pool"}
    chosen = experiments({**TOY, "grid": {"defenses": [[], [moved], [moved, ROUNDED]]}})
    assert [exp.audited.cut for _, exp in chosen] == ["stage1", "pool", "pool"]
    assert {exp.target.cut for _, exp in chosen} == {"stage1"}


def test_a_defense_leaves_the_cut_alone_by_default():
    others = [defenses.get(name) for name in defenses.names() if name != "later_cut"]
    assert all(method.cut is Defense.cut and not method.moves_cut for method in others)


def search(folder, names, budget):
    chosen = candidates(names, Tunable("features", 4), [{"name": "later_cut", "layer": "pool"}])
    goal = FeatureGoal(0.5)
    with open_study(folder, chosen, {"utility": 0.5}, goal=goal, seed=0) as study:
        study.run(lambda *_: Outcome(0.9, 0.5, 0.4, 0.6), SearchBudget.parse(budget))
        return [described(trial.tables) for trial in study.trials()]


def test_a_search_tries_once_what_has_nothing_to_tune(tmp_path):
    made = search(tmp_path, ["later_cut"], "5 trials")
    assert made == ["later_cut (layer pool)"]


def test_a_search_ends_when_everything_was_tried(tmp_path):
    made = search(tmp_path, ["later_cut", "rounding"], "60 trials")
    alone = [text for text in made if "rounding" not in text]
    pairs = [text for text in made if "+" in text]
    assert (len(alone), len(pairs), len(made)) == (1, 8, 17)  # rounding has eight numbers of bits
