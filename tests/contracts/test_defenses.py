"""Every registered defense keeps the same promises, alone and in every pair."""

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

# Small enough for the four classes and few epochs of a test.
SMALL = {
    "calor": {"rank": 2, "switch": 0.5},
    "bido": {"per_identity": 2},
    "transfer": {"epochs": 2},
    "dpsgd": {"noise": 0.5},
    "adv_learn": {"decoder_width": 4, "head_start": 2, "public_batch": 8},
    "disco": {"decoder_width": 4, "pruner_width": 4, "head_start": 2, "public_batch": 8},
    "tiprdc": {"epochs": 2, "reader_width": 2},
}
CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3, cut="stage3")

# Which pairs go together; everything else is refused, and the reason names both.
REFUSED = {
    frozenset({"mid", "calor"}): "calor and mid both replace the head",
    frozenset(
        {"calor", "label_smoothing"}
    ): "calor and label_smoothing both replace the classification loss",
    **{
        frozenset(
            {name, "dpsgd"}
        ): f"{name} looks at several samples of a batch together, and dpsgd needs the gradient of each on its own"
        for name in ("bido", "adv_learn", "disco")
    },
    frozenset(
        {"tiprdc", "dpsgd"}
    ): "tiprdc trains its extractor on private pictures first, where dpsgd adds no noise",
    frozenset({"tiprdc", "transfer"}): "tiprdc and transfer both replace the starting weights",
    **{
        frozenset({one, other}): f"{one} and {other} both replace the training of the encoder"
        for one, other in (("adv_learn", "disco"), ("adv_learn", "tiprdc"), ("disco", "tiprdc"))
    },
}
TRAINED = [name for name in defenses.names() if not defenses.get(name).releases]
PAIRS = [tuple(sorted(pair)) for pair in combinations(TRAINED, 2)]


@pytest.fixture(params=TRAINED)
def defense(request):
    return defenses.get(request.param)


def small(name, **more):
    return defenses.get(name)(**SMALL.get(name, {}) | more)


def train(*chosen, work=None):
    return train_target(CONFIG, split(), chosen, seed=0, work=work or NoWork())


@pytest.fixture(scope="module")
def plain():
    return train()


def test_strength_zero_is_the_undefended_run_bit_for_bit(defense, plain):
    nothing = defense(**defense.off)
    off = train(nothing)
    assert same_weights(plain.module, off.module)
    assert plain.info == off.info
    assert nothing.replaces() == frozenset()
    assert nothing.stage() is None
    assert not nothing.couples_samples()
    assert not nothing.separates_samples()


def test_at_strength_it_trains_and_changes_the_result(defense, plain):
    made = train(small(defense.name))
    assert not same_weights(plain.module, made.module)
    assert all(value == value for row in made.info["history"] for value in row.values())  # no NaN


def test_a_killed_training_ends_with_the_same_weights(defense):
    work = MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        train(small(defense.name), work=work)
    work.left = None
    assert same_weights(
        train(small(defense.name), work=work).module, train(small(defense.name)).module
    )


def test_training_leaves_a_network_that_can_be_attacked(defense):
    made = train(small(defense.name))
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    view = made.view(["gradients"])
    view.logits(images).square().sum().backward()
    assert images.grad.isfinite().all()
    assert images.grad.abs().sum() > 0
    assert torch.equal(view.logits(images), view.logits(images))


def test_its_page_names_its_paper_and_its_parameters(defense):
    text = defense.__doc__
    assert "Paper:" in text
    assert "Differs:" in text
    for name in defense.__dataclass_fields__:
        assert f"{name}:" in text, f"{name} is not explained"


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_every_pair_trains_or_is_refused_by_name(pair):
    chosen = [small(name) for name in pair]
    reason = REFUSED.get(frozenset(pair))
    assert [line.split(":")[0] for line in conflicts(chosen)] == ([reason] if reason else [])
    if reason:
        with pytest.raises(ConfigError, match=reason):
            train(*chosen)
        return
    made = train(*chosen)
    terms = set(made.info["history"][-1])
    assert all(value == value for row in made.info["history"] for value in row.values())
    assert ("mid_kl" in terms) == ("mid" in pair)
    assert any(name.startswith("bido_") for name in terms) == ("bido" in pair)
    assert ("smoothed_cross_entropy" in terms) == ("label_smoothing" in pair)
    assert ("confidence_adaptation" in terms) == ("calor" in pair)
    assert ("epsilon" in made.info["facts"].get("dpsgd", {})) == ("dpsgd" in pair)
    assert ("transfer" in made.info["facts"]) == ("transfer" in pair)
    assert ("reconstruction" in terms) == bool({"adv_learn", "disco"} & set(pair))
    assert ("first_stage" in made.info) == bool({"tiprdc", "transfer"} & set(pair))


def test_what_a_setting_decides_about_a_pair():
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
    assert reason.startswith("calor warms up on private pictures, where dpsgd adds no noise")
    (reason,) = conflicts([small("dpsgd"), small("transfer", boundary="fisher")])
    assert reason.startswith(
        "transfer chooses its boundary by private pictures, where dpsgd adds no noise"
    )
    for pretrain in ("public", "start"):  # a warm-up on private pictures would be frozen in
        (both,) = conflicts([small("calor", warmup=2), small("transfer", pretrain=pretrain)])
        assert both.startswith("calor and transfer both replace the starting weights")
    with pytest.raises(
        ConfigError,
        match=r"dpsgd: delta must be below one over the 48 training pictures, .*got 0.1",
    ):
        train(small("dpsgd", delta=0.1))


def test_the_order_of_a_list_does_not_decide_what_is_frozen():
    pair = small("transfer", boundary="parameters", parameters=4000.0), small("mid")
    one, other = (train(*order).info["facts"]["transfer"] for order in (pair, pair[::-1]))
    assert one == other


def test_transfer_and_bido_tap_unfrozen_layers_only():
    made = train(small("transfer"), small("bido"))
    assert made.info["facts"]["bido"]["taps"] == [
        "stage3",
        "stage4",
    ]  # stage 3 is cut by the boundary, stage 1 is frozen
    assert train(small("bido")).info["facts"]["bido"]["taps"] == ["stage1", "stage3", "stage4"]


RELEASING = {
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
    encoder = halves(train()).encoder
    return encoder, method.release(
        encoder, split().test.floats()[:5], Assets(prior=prior()), seed=0, work=work or NoWork()
    )


def test_one_that_releases_leaves_training_alone(releasing, plain):
    made = train(releasing(**RELEASING[releasing.name]))
    assert same_weights(plain.module, made.module)
    assert plain.info == made.info


def test_a_release_changes_what_leaves_and_nothing_when_off(releasing):
    encoder, off = release(releasing(**releasing.off))
    with frozen(encoder), torch.no_grad():
        bare = encoder(split().test.floats()[:5])
    assert torch.equal(off.features, bare)
    _, made = release(releasing(**RELEASING[releasing.name]))
    assert made.features.shape == bare.shape
    assert made.features.isfinite().all()
    assert not torch.allclose(made.features, bare, atol=1e-4)
    assert all(value == value for row in made.facts for value in row.values())


def test_a_killed_release_ends_with_the_same_features(releasing):
    chosen = releasing(**RELEASING[releasing.name], checkpoint_every=1)
    work = MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        release(chosen, work)
    work.left = None
    assert torch.equal(release(chosen, work)[1].features, release(chosen)[1].features)
