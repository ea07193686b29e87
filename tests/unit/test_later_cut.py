"""A later cut: the same network, features of a later layer, and what it refuses."""

from dataclasses import replace

import pytest
import torch
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
from frostglass.models.cut import check_later, check_moved, cut, halves
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


def cut_at(layer, **target):
    return Experiment.parse({**TOY, "target": {**TOY["target"], "cut": layer, **target}})


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


class Misnamed(nn.Module):
    """Its `head` is not the layer that returns the logits."""

    def __init__(self):
        super().__init__()
        self.head, self.last = nn.Linear(192, 4), nn.Linear(4, 2)

    def forward(self, images):
        return self.last(self.head(images.flatten(1)).relu())


def test_another_layer_of_that_name_is_not_taken_for_the_last_one():
    with pytest.raises(ModelError, match="stands for the last layer, here 'last', and Misnamed"):
        cut(Misnamed().eval(), "head", (3, 8, 8))
    assert cut(Misnamed().eval(), "last", (3, 8, 8)).feature_shape == (2,)


def test_the_share_that_the_device_computes():
    layers = [nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 2)]
    network = nn.Sequential(*layers).eval()

    def share(tap):
        return device_share(Target(network, ("a", "b"), (3, 8, 8), head="3", taps=(), cut=tap))

    assert [share(tap) for tap in "0123"] == [0, *[192 * 6 / (192 * 6 + 12)] * 2, 1]


def test_attention_counts_among_what_is_computed():
    tokens = nn.Sequential(nn.Flatten(2), nn.Linear(64, 8))
    layers = [tokens, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(24, 2)).eval()
    target = Target(network, ("a", "b"), (3, 8, 8), head="3", taps=(), cut="0")
    linear, projections, fed, last = 3 * 64 * 8, 3 * 8 * 8 * 4, 3 * 8 * 16 * 2, 48
    products = 2 * 3 * 3 * 8  # queries by keys, weights by values
    whole = linear + projections + products + fed + last
    assert device_share(target) == pytest.approx(linear / whole)
    assert torch.backends.mha.get_fastpath_enabled()


def test_layers_are_in_the_order_in_which_they_finish():
    network = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 6), nn.ReLU())).eval()

    def target(tap):
        return Target(network, tuple("abcdef"), (3, 8, 8), head="1.0", taps=(), cut=tap)

    check_moved(target("1"), "1.0")
    for given, moved in (("1", "1.0"), ("0", "0")):
        with pytest.raises(ModelError, match=f"after {given!r} .*got {moved!r}: name a later"):
            check_later(target(moved), given)
    with pytest.raises(ModelError, match="no layer named 'stem'"):
        check_later(target("1"), "stem")


def test_the_same_feature_under_another_name_is_no_later_one():
    network = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 6), nn.Linear(6, 6)))
    target = Target(network.eval(), tuple("abcdef"), (3, 8, 8), head="1.1", taps=(), cut="1")
    check_later(target, "1.1")
    with pytest.raises(ModelError, match=r"after '1.1' \(target.cut\), got '1': name a later"):
        check_moved(target, "1.1")


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
    assert all(line.startswith("target: ") for line in found)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(found)


@pytest.mark.parametrize("layer", ["layer2.0.conv1", "layer2.0.downsample"])
def test_a_check_finds_skip_connections_around_a_cut(layer):
    """Also of blocks that begin by doing nothing, as timm's residual ones do."""
    (line,) = problems([("toy", cut_at(layer, model="timm:resnet18", options={}))])
    assert line.startswith(f"target: a cut at '{layer}' splits a skip connection")


def test_the_next_of_such_blocks_is_later():
    network = {"model": "timm:resnet18", "options": {}, "cut": "layer1.0"}
    assert problems([("toy", later("layer1", **network))]) == []
    (line,) = problems([("toy", later("layer1", **{**network, "cut": "layer1.1"}))])
    assert "after 'layer1.1' (target.cut), got" in line


def test_a_grid_is_checked_although_another_network_of_it_is_cut_there():
    """An undefended row at the same layer has nothing to complain about, and is checked first."""
    rows = [("undefended", cut_at("stage3")), ("moved", later("stage3", cut="stage3"))]
    (line,) = problems(rows)
    assert line.startswith("target: features must leave")
    rows = [("undefended", cut_at("stage3")), ("moved", later("stage3"))]
    assert problems(rows) == []


def test_an_earlier_cut_is_refused_without_a_check_too(tmp_path):
    store, exp = Store(tmp_path), later("stage1", cut="stage3")
    with pytest.raises(ModelError, match=r"after 'stage3' .* got 'stage1': name a later"):
        audited_target(exp, store, split_of(exp, store))


def test_the_control_of_given_weights_is_checked_at_its_own_cut():
    exp = later("head", weights="given_models:split_in_two", cut="first")
    (line,) = problems([("toy", exp)])
    assert line.startswith("target: Sequential has no layer named 'first'")
    alone = replace(exp, judging=replace(exp.judging, positive_control=False))
    assert problems([("toy", alone)]) == []


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


def search(folder, names, budget, leak=lambda values: 0.5):
    chosen = candidates(names, Tunable("features", 4), [{"name": "later_cut", "layer": "pool"}])
    goal = FeatureGoal(0.5)
    with open_study(folder, chosen, {"utility": 0.5}, goal=goal, seed=0) as study:
        study.run(
            lambda _, values: Outcome(0.9, leak(values), 0.0, 1.0), SearchBudget.parse(budget)
        )
        return [described(trial.tables) for trial in study.trials()]


def test_a_search_tries_once_what_has_nothing_to_tune(tmp_path):
    made = search(tmp_path, ["later_cut"], "5 trials")
    assert made == ["later_cut (layer pool)"]


def test_a_search_ends_when_everything_was_tried(tmp_path):
    made = search(tmp_path, ["later_cut", "rounding"], "60 trials")
    alone = [text for text in made if "rounding" not in text]
    pairs = [text for text in made if "+" in text]
    assert (len(alone), len(set(pairs)), len(set(made))) == (1, 8, 17)  # eight numbers of bits


def test_a_search_that_repeats_itself_goes_on_until_everything_was_tried(tmp_path):
    """Where fewer bits are better, the sampler likes to come back to the fewest."""
    made = search(tmp_path, ["rounding"], "99 trials", lambda values: values["rounding.bits"] / 9)
    assert len(set(made)) == 8


def test_a_defense_is_described_with_its_defaults_where_nothing_is_set():
    assert described([{"name": "later_cut"}]) == "later_cut (layer head)"
