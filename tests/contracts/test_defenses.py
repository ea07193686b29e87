"""The contract of every registered defense, alone and in every pair."""

from dataclasses import fields, replace
from functools import cache
from itertools import combinations

import pytest
import torch

from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.defenses.base import defenses
from frostglass.defenses.compose import conflicts
from frostglass.models.cut import halves
from frostglass.runtime.freezing import frozen
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import KilledError, MemoryWork, NoWork, prior, same_weights, split

DECODER = {"decoder_width": 4, "head_start": 2, "public_batch": 8, "fresh_share": 0.1}
# Small enough for the four classes and few epochs of a test.
SMALL = {
    "calor": {"rank": 2, "switch": 0.5},
    "bido": {"per_identity": 2},
    "transfer": {"epochs": 2},
    "dpsgd": {"noise": 0.5},
    "adv_learn": {**DECODER},
    "disco": {**DECODER, "pruner_width": 4},
    "tiprdc": {"epochs": 2, "reader_width": 2},
    "decoys": {"people": 2, "quiet": 0.1},
}
CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3, cut="stage3")
RESIDUAL = replace(CONFIG, model="resnet", options={"width": 4, "depth": 1}, cut="stage2")

# Which pairs go together; everything else is refused, and the reason names both.
REFUSED = {
    frozenset({"mid", "calor"}): "calor and mid both replace the head",
    frozenset({"calor", "label_smoothing"}): (
        "calor and label_smoothing both replace the classification loss"
    ),
    **{
        frozenset({name, "dpsgd"}): (
            f"{name} looks at several samples of a batch together, and dpsgd needs the gradient "
            "of each on its own"
        )
        for name in ("bido", "adv_learn", "disco", "trap_mid")
    },
    frozenset({"tiprdc", "dpsgd"}): (
        "tiprdc trains its extractor on private images first, where dpsgd adds no noise"
    ),
    frozenset({"ssd", "dpsgd"}): (
        "ssd keeps mean scores of validation images, where dpsgd adds no noise"
    ),
    frozenset({"calor", "decoys"}): "calor and decoys both replace the head",
    frozenset({"decoys", "mid"}): "decoys and mid both replace the head",
    frozenset({"decoys", "dpsgd"}): (
        "decoys adds images of other people, and dpsgd counts on private ones alone"
    ),
    frozenset({"tiprdc", "transfer"}): "tiprdc and transfer both replace the starting weights",
    **{
        frozenset({one, other}): f"{one} and {other} both replace the training of the encoder"
        for one, other in (("adv_learn", "disco"), ("adv_learn", "tiprdc"), ("disco", "tiprdc"))
    },
}
TRAINED = [name for name in defenses.names() if defenses.get(name).trains()]
PAIRS = [tuple(sorted(pair)) for pair in combinations(TRAINED, 2)]
# These change images, shortcuts or answers, which no other defense reads: their pairs can wait.
APART = {"midre", "rolss", "ssd"}


def cases():
    for pair in PAIRS:
        waits = APART & set(pair) and frozenset(pair) not in REFUSED
        marks = [pytest.mark.slow] if waits else []
        yield pytest.param(pair, marks=marks, id=" and ".join(pair))


@pytest.fixture(params=TRAINED)
def defense(request):
    return defenses.get(request.param)


def small(name, **more):
    return defenses.get(name)(**SMALL.get(name, {}) | more)


def config_for(*names):
    """Return the training of a network that all these defenses can change."""
    return RESIDUAL if "rolss" in names else CONFIG


def train(*chosen, work=None, config=CONFIG):
    return train_target(config, split(), chosen, seed=0, work=work or NoWork())


@cache
def trained_with(*names, residual=False):
    """Return the target trained with these small defenses, computed once; leave it unchanged."""
    config = RESIDUAL if residual else config_for(*names)
    return train(*map(small, names), config=config)


@pytest.fixture
def config(defense):
    return config_for(defense.name)


@pytest.fixture
def plain(config):
    return trained_with(residual=config is RESIDUAL)


def test_disabled_parameters_are_the_undefended_run_bit_for_bit(defense, plain, config):
    nothing = defense(**defense.disabled)
    disabled = train(nothing, config=config)
    assert same_weights(plain.module, disabled.module)
    assert plain.info == disabled.info
    assert nothing.replaces() == frozenset()
    assert nothing.stage() is None
    assert not nothing.couples_samples()
    assert not nothing.separates_samples()


def test_an_enabled_defense_trains_and_changes_the_result(defense, plain):
    trained = trained_with(defense.name)
    assert not same_weights(plain.module, trained.module)
    assert all(
        value == value for row in trained.info["history"] for value in row.values()
    )  # no NaN


def test_an_interrupted_training_resumes_to_the_same_weights(defense, config):
    work = MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        train(small(defense.name), work=work, config=config)
    work.left = None
    resumed = train(small(defense.name), work=work, config=config)
    assert same_weights(resumed.module, trained_with(defense.name).module)


def test_training_leaves_a_network_that_can_be_attacked(defense):
    trained = trained_with(defense.name)
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    view = trained.view(["gradients"])
    view.logits(images).square().sum().backward()
    assert images.grad.isfinite().all()
    assert images.grad.abs().sum() > 0
    assert torch.equal(view.logits(images), view.logits(images))


def test_it_has_a_title_and_disabled_parameters():
    methods = [defenses.get(name) for name in defenses.names()]
    assert all(method.disabled for method in methods)
    assert all(method.title for method in methods)
    assert len({method.title for method in methods}) == len(methods)


def test_its_docstring_names_its_paper_and_parameters(defense):
    text = defense.__doc__
    assert "Paper:" in text
    assert "Differs:" in text
    for field in fields(defense):
        assert f"{field.name}:" in text, f"{field.name} is not explained"


def test_a_brief_copy_trains_in_one_epoch_at_full_strength(defense, config):
    trained = train_target(
        config.brief(), split(), [small(defense.name).brief()], seed=0, work=NoWork()
    )
    assert len(trained.info["history"]) == 1
    assert trained.info["selected_epoch"] == 0
    assert trained.info.get("first_stage", {}).get("epochs", 1) == 1


@pytest.mark.parametrize("pair", list(cases()))
def test_every_pair_trains_or_is_refused_by_name(pair):
    chosen = [small(name) for name in pair]
    reason = REFUSED.get(frozenset(pair))
    assert [line.split(":")[0] for line in conflicts(chosen)] == ([reason] if reason else [])
    if reason:
        with pytest.raises(ConfigError, match=reason):
            train(*chosen)
        return
    trained = train(*chosen, config=replace(config_for(*pair), epochs=2))
    terms = set(trained.info["history"][-1])
    assert all(value == value for row in trained.info["history"] for value in row.values())
    assert ("mid_kl" in terms) == ("mid" in pair)
    assert any(name.startswith("bido_") for name in terms) == ("bido" in pair)
    assert ("smoothed_cross_entropy" in terms) == ("label_smoothing" in pair)
    assert ("confidence_adaptation" in terms) == ("calor" in pair)
    assert ("epsilon" in trained.info["facts"].get("dpsgd", {})) == ("dpsgd" in pair)
    assert ("transfer" in trained.info["facts"]) == ("transfer" in pair)
    assert ("quiet" in terms) == ("margin_gap" in trained.info["facts"].get("decoys", {}))
    assert ("quiet" in terms) == ("decoys" in pair)
    assert ("reconstruction" in terms) == bool({"adv_learn", "disco"} & set(pair))
    assert ("trapdoor" in terms) == ("trap_mid" in pair)
    assert ("rolss" in trained.info["facts"]) == ("rolss" in pair)
    assert ("first_stage" in trained.info) == bool({"tiprdc", "transfer"} & set(pair))


def test_parameters_decide_whether_a_pair_conflicts():
    assert (
        conflicts([small("calor", a=0.0), small("label_smoothing")]) == []
    )  # the low-rank head alone goes with smoothing
    assert (
        conflicts([small("calor", rank=0), small("mid")]) == []
    )  # and confidence adaptation alone with another head
    for order in (
        ("dpsgd", "calor"),
        ("calor", "dpsgd"),
    ):  # its batch norm becomes a group norm too, of 32 groups of one value here
        with pytest.raises(
            ConfigError, match=r"dpsgd: the norms head.norm see one value at a time"
        ):
            train(
                *(small(name, **({"pre_norm": True} if name == "calor" else {})) for name in order)
            )
    (reason,) = conflicts([small("calor", warmup=2), small("dpsgd")])
    assert reason.startswith("calor warms up on private images, where dpsgd adds no noise")
    (reason,) = conflicts([small("dpsgd"), small("transfer", boundary="fisher")])
    assert reason.startswith(
        "transfer chooses its boundary by private images, where dpsgd adds no noise"
    )
    for pretrain in ("public", "start"):  # a warm-up on private images would be frozen in
        (both,) = conflicts([small("calor", warmup=2), small("transfer", pretrain=pretrain)])
        assert both.startswith("calor and transfer both replace the starting weights")
    with pytest.raises(
        ConfigError,
        match=r"dpsgd: delta must be below one over the 48 training images, .*got 0.1",
    ):
        train(small("dpsgd", delta=0.1))


def test_the_list_order_does_not_change_what_is_frozen():
    pair = small("transfer", boundary="parameters", parameters=4000.0), small("mid")
    one, other = (train(*order).info["facts"]["transfer"] for order in (pair, pair[::-1]))
    assert one == other


def test_transfer_and_bido_tap_unfrozen_layers_only():
    trained = train(small("transfer"), small("bido"))
    assert trained.info["facts"]["bido"]["taps"] == [
        "stage3",
        "stage4",
    ]  # stage 3 is cut by the boundary, stage 1 is frozen
    assert trained_with("bido").info["facts"]["bido"]["taps"] == ["stage1", "stage3", "stage4"]


CRAFTING = {
    name: {
        "steps": 3,
        "critic_steps": 1,
        "critic_batch": 4,
        "critic_width": 4,
        "index_steps": 1,
        "first_steps": 3,
        "pool": 2,
    }
    for name in ("crafter", "crafter_z")
}


@pytest.fixture(params=[name for name in defenses.names() if defenses.get(name).releases])
def releasing(request):
    return defenses.get(request.param)


def release(method, work=None):
    encoder = halves(trained_with()).encoder
    return encoder, method.release(
        encoder, split().test.floats()[:5], Assets(prior=prior()), seed=0, work=work or NoWork()
    )


def test_a_releasing_defense_does_not_change_training(releasing):
    plain, trained = trained_with(), train(releasing(**CRAFTING.get(releasing.name, {})))
    assert same_weights(plain.module, trained.module)
    assert plain.info == trained.info


def test_a_release_changes_features_unless_disabled(releasing):
    encoder, disabled = release(releasing(**releasing.disabled))
    with frozen(encoder), torch.no_grad():
        bare = encoder(split().test.floats()[:5])
    assert torch.equal(disabled.features, bare)
    _, trained = release(releasing(**CRAFTING.get(releasing.name, {})))
    assert trained.features.shape == bare.shape
    assert trained.features.isfinite().all()
    assert not torch.allclose(trained.features, bare, atol=1e-4)
    assert all(value == value for row in trained.facts for value in row.values())


def test_a_release_is_the_same_for_the_same_seed(releasing):
    method = releasing(**CRAFTING.get(releasing.name, {}))
    assert torch.equal(release(method)[1].features, release(method)[1].features)


@pytest.mark.parametrize("name", CRAFTING)
def test_an_interrupted_release_resumes_to_the_same_features(name):
    chosen = defenses.get(name)(**CRAFTING[name], checkpoint_every=1)
    work = MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        release(chosen, work)
    work.left = None
    assert torch.equal(release(chosen, work)[1].features, release(chosen)[1].features)
