"""AdvLearn: the terms of network and decoder, and that each is fixed while the other trains."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.defenses.base import Batch, TrainingProgress, TrainingSize, defenses
from frostglass.defenses.compose import losses, problems
from frostglass.defenses.training._simulated import settled
from frostglass.defenses.training.adv_learn import AdvLearn
from frostglass.defenses.training.label_smoothing import LabelSmoothing
from frostglass.networks.decoder import DecoderGame, standardised
from frostglass.networks.perceptual import perceptual_distance
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import KilledError, MemoryWork, NoWork, images, same_weights, split, target

CUT = "2"
TINY = {"decoder_width": 4, "head_start": 2, "public_batch": 8, "fresh_share": 0}
CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3, cut="stage2")
CRAFTER = AdvLearn.variants["crafter"][1] | {
    "decoder_width": 4,
    "public_batch": 8,
    "fresh_share": 0,
}
STRANGERS = images(40, 5, seed=9, names="stranger")


def victim():
    return replace(target(), cut=CUT)


def perceptual():
    return replace(target(seed=1), taps=("0", "2"))


def batch_of(model, labels=None):
    """What a training step sees of eight private images."""
    pixels = images(8, 4).floats()
    with seeded(5), capture(model.module, (CUT,)) as tapped:
        logits = model.module(pixels)
    return Batch(
        pixels,
        images(8, 4).labels if labels is None else labels,
        logits,
        dict(tapped),
        TrainingProgress(0, 4),
    )


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def unchanged(module, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_the_decoders_turn_follows_its_definition():
    """Steps on public images, with features in evaluation mode and seeds of their own."""
    model = victim()
    opponent = AdvLearn(decoder_steps=3, decoder_lr=2e-3, **TINY).opponent(
        model, STRANGERS, None, seed=7
    )
    with seeded(7, "simulated", "init", 0):
        reference = DecoderGame((8, 8, 8), model.image_shape, width=4, lr=2e-3)
    assert same_weights(opponent.game.decoder, reference.decoder)
    for number, steps in ((0, 5), (1, 3)):  # a head start of 2 at the very first
        opponent.turn(TrainingProgress(0, 4), number)
        model.module.eval()
        for step in range(steps):
            pixels = STRANGERS.floats(
                torch.randint(40, (8,), generator=generator_for(7, "simulated", 0, number, step))
            )
            with torch.no_grad():
                features = model.module[:3](pixels)
            reference.step(standardised(features), pixels)
        model.module.train()
        assert same_weights(opponent.game.decoder, reference.decoder)


def test_the_network_is_unchanged_while_the_decoder_trains():
    model = victim()
    model.module(images(8, 4).floats()).sum().backward()
    before, grads = (
        snapshot(model.module),
        [weight.grad.clone() for weight in model.module.parameters()],
    )
    model.module[1].eval()  # the caller's modes must stay
    state = torch.get_rng_state()
    opponent = AdvLearn(**TINY).opponent(model, STRANGERS, None, seed=0)
    decoder = snapshot(opponent.game.decoder)
    opponent.turn(TrainingProgress(0, 4), 0)
    assert unchanged(model.module, before)
    assert torch.equal(state, torch.get_rng_state())
    assert [part.training for part in model.module] == [True, False, True, True, True, True, True]
    assert all(
        torch.equal(weight.grad, grad) and weight.requires_grad
        for weight, grad in zip(model.module.parameters(), grads, strict=True)
    )
    assert not unchanged(opponent.game.decoder, decoder)


def test_the_networks_term():
    model = victim()
    opponent = AdvLearn(pixel=3.0, **TINY).opponent(model, STRANGERS, None, seed=0)
    opponent.turn(TrainingProgress(0, 4), 0)
    batch = batch_of(model)
    terms = opponent.losses(batch)
    decoded = opponent.game.decoder(standardised(batch.tapped[CUT]))
    assert list(terms) == ["reconstruction"]
    assert terms["reconstruction"].weight == -3.0
    torch.testing.assert_close(
        terms["reconstruction"].value, (decoded - batch.images).square().mean()
    )


def test_the_decoder_is_unchanged_while_the_network_trains():
    model = victim()
    opponent = AdvLearn(decoder_adversarial=0.1, **TINY).opponent(model, STRANGERS, None, seed=0)
    opponent.turn(TrainingProgress(0, 4), 0)
    before = {name: tensor.clone() for name, tensor in opponent.tensors().items()}
    (term,) = opponent.losses(batch_of(model)).values()
    term.value.backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in opponent.tensors().items())
    assert all(weight.grad is None for weight in opponent.game.decoder.parameters())
    assert model.module[0].weight.grad.abs().sum() > 0  # it reaches the encoder
    assert model.module[6].weight.grad is None  # and nothing after the cut


def test_a_step_along_the_term_makes_the_decoder_worse():
    model = victim()
    model.module.eval()  # so that the loss is a function of the weights alone
    opponent = AdvLearn(**TINY).opponent(model, STRANGERS, None, seed=0)
    for number in range(5):
        opponent.turn(TrainingProgress(0, 4), number)
    (term,) = opponent.losses(batch_of(model)).values()
    (term.weight * term.value).backward()
    with torch.no_grad():
        slope = model.module[0].weight.grad
        model.module[0].weight -= 1e-2 * slope / slope.norm()
    (after,) = opponent.losses(batch_of(model)).values()
    assert after.value > (1 + 1e-4) * term.value


def test_scaling_features_changes_nothing():
    model = victim()
    opponent = AdvLearn(**TINY).opponent(model, STRANGERS, None, seed=0)
    opponent.turn(TrainingProgress(0, 4), 0)
    batch = batch_of(model)
    grown = replace(batch, tapped={CUT: 100 * batch.tapped[CUT]})
    torch.testing.assert_close(
        opponent.losses(batch)["reconstruction"].value,
        opponent.losses(grown)["reconstruction"].value,
    )


def test_perceptual_terms_for_both():
    model, other = victim(), perceptual()
    before, modes = snapshot(other.module), [part.training for part in other.module]
    defense = AdvLearn(pixel=0.0, perceptual=2.0, decoder_perceptual=0.5, **TINY)
    assert defense.needs == {"perceptual"}
    opponent = defense.opponent(model, STRANGERS, other, seed=0)
    opponent.turn(TrainingProgress(0, 4), 0)
    batch = batch_of(model)
    terms = opponent.losses(batch)
    assert list(terms) == ["perceptual"]
    assert terms["perceptual"].weight == -2.0
    still = perceptual()
    still.module.eval()
    decoded = opponent.game.decoder(standardised(batch.tapped[CUT]))
    torch.testing.assert_close(
        terms["perceptual"].value, perceptual_distance(still, decoded, batch.images).mean()
    )
    terms["perceptual"].value.backward()
    assert unchanged(other.module, before)  # its batch norm too
    assert [part.training for part in other.module] == modes
    assert all(weight.grad is None and weight.requires_grad for weight in other.module.parameters())


def test_crafters_form():
    """(1 - λ) L_u - λ |whole batch| / (H W), the decoder's undivided."""
    model, defense = victim(), AdvLearn(**CRAFTER)
    opponent = defense.opponent(model, STRANGERS, None, seed=0)
    batch = batch_of(model)
    terms = losses([defense], batch, [(CUT,)], [opponent])
    assert {name: term.weight for name, term in terms.items()} == {
        "cross_entropy": 0.5,
        "reconstruction": -0.5,
    }
    assert torch.equal(terms["cross_entropy"].value, F.cross_entropy(batch.logits, batch.labels))
    decoded = opponent.game.decoder(standardised(batch.tapped[CUT]))
    torch.testing.assert_close(
        terms["reconstruction"].value, (decoded - batch.images).square().sum().sqrt() / 256
    )
    attributes = torch.tensor([[1.0, 0, 1, 0]] * 8)
    by_attribute = defense.losses(replace(batch, labels=attributes))["cross_entropy"]
    assert torch.equal(
        by_attribute.value, F.binary_cross_entropy_with_logits(batch.logits, attributes)
    )
    pixels = STRANGERS.floats(torch.arange(8))
    with torch.no_grad():
        features = standardised(model.module.eval()[:3](pixels))
        whole = (opponent.game.decoder.train()(features) - pixels).square().sum().sqrt()
    assert opponent.game.step(features, pixels) == pytest.approx(whole.item(), rel=1e-5)


def test_a_new_decoder_begins_every_so_many_epochs():
    opponent = AdvLearn(restart_every=2, decoder_steps=1, **TINY | {"head_start": 0}).opponent(
        victim(), STRANGERS, None, seed=0
    )
    games = []
    for epoch in range(5):
        for number in range(2):
            opponent.turn(TrainingProgress(epoch, 5), number)
            games.append(opponent.game)
    assert [id(game) for game in games] == [id(games[0])] * 4 + [id(games[4])] * 4 + [
        id(games[8])
    ] * 2
    assert len({id(game) for game in games}) == 3
    assert not same_weights(games[0].decoder, games[4].decoder)
    kept = AdvLearn(decoder_steps=1, **TINY | {"head_start": 0}).opponent(
        victim(), STRANGERS, None, seed=0
    )
    first = kept.game
    kept.turn(TrainingProgress(4, 5), 0)
    assert kept.game is first


VARIETIES = [
    {},
    {"restart_every": 2, "decoder_adversarial": 0.1},
    {"restart_every": 3, "perceptual": 0.5, "decoder_perceptual": 0.2},
    {name: value for name, value in CRAFTER.items() if name not in TINY},
]


@pytest.mark.parametrize("more", VARIETIES)
def test_an_interrupted_training_resumes_to_the_same_bytes(more):
    def train(work):
        return train_target(
            CONFIG, split(), [AdvLearn(**TINY | more)], perceptual=perceptual(), seed=0, work=work
        )

    whole, work = train(NoWork()), MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        train(work)
    work.left = None
    resumed = train(work)
    assert same_weights(whole.module, resumed.module)
    assert whole.info == resumed.info


def test_a_training_logs_its_terms_and_the_cut():
    model = train_target(CONFIG, split(), [AdvLearn(pixel=2.0, **TINY)], seed=0, work=NoWork())
    assert model.info["facts"] == {"adv_learn": {"cut": "stage2"}}
    assert all(
        -2 <= row["reconstruction"] < 0 for row in model.info["history"]
    )  # bounded: images are in [0, 1]
    assert model.info["selected_epoch"] >= 2


def test_only_the_second_half_may_be_selected():
    defense = AdvLearn()
    assert [defense.at_full_strength(TrainingProgress(epoch, 5)) for epoch in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert defense.at_full_strength(TrainingProgress(0, 1))
    assert AdvLearn(**AdvLearn.disabled).at_full_strength(TrainingProgress(0, 5))


def test_disabled_parameters_do_nothing():
    disabled = AdvLearn(**AdvLearn.disabled, decoder_perceptual=1.0)
    assert disabled.opponent(target(), STRANGERS, None, seed=0) is None
    assert disabled.problems(target(), TrainingSize(48, 16, 4)) == []
    assert disabled.needs == frozenset()
    assert disabled.taps(victim()) == ()
    assert disabled.facts(victim(), TrainingSize(48, 16, 4)) == {}


def test_it_needs_trained_weights_before_the_cut():
    assert problems([AdvLearn()], target(), TrainingSize(48, 16, 4)) == [
        "adv_learn: needs to know where the network is cut: set target.cut"
    ]
    with pytest.raises(
        ConfigError, match=r"adv_learn: needs to know where the network is cut: set target\.cut"
    ):
        train_target(replace(CONFIG, cut=None), split(), [AdvLearn()], seed=0, work=NoWork())
    model = victim()
    model.module[:3].requires_grad_(False)
    (problem,) = AdvLearn().problems(model, TrainingSize(48, 16, 4))
    assert (
        problem == "no weight before 2 is trained, so the released features cannot change: "
        "freeze fewer layers, or cut after a later one"
    )


def test_a_feature_that_the_next_layer_overwrites_is_refused():
    model = victim()
    assert AdvLearn().problems(model, TrainingSize(48, 16, 4)) == []
    model.module[2] = nn.ReLU(inplace=True)
    assert AdvLearn().problems(model, TrainingSize(48, 16, 4)) == []  # its own output stays
    (problem,) = AdvLearn().problems(replace(model, cut="1"), TrainingSize(48, 16, 4))
    assert (
        problem == "the layer after 1 works in place and overwrites the released features: "
        "cut after that layer"
    )


def test_missing_assets_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"compares images by a perceptual network, got none: pass perceptual=\.\.\., or set",
    ):
        AdvLearn(perceptual=1.0).opponent(victim(), STRANGERS, None, seed=0)
    with pytest.raises(
        ConfigError,
        match="needs at least 2 public images, got 0: use data with public people",
    ):
        AdvLearn().opponent(victim(), STRANGERS.at(torch.arange(0)), None, seed=0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pixel": -1.0}, "pixel"),
        ({"perceptual": float("nan")}, "perceptual"),
        ({"decoder_steps": 0}, "decoder_steps"),
        ({"public_batch": 1}, "public_batch"),
        (
            {"weighting": "share"},
            r'weighting = "share" gives the task the weight 1 - pixel: set pixel below 1, got 1\.0',
        ),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        AdvLearn(**bad)


def test_variants_are_parameters_and_what_it_replaces():
    for _, settings in AdvLearn.variants.values():
        assert AdvLearn(**settings).active
    assert AdvLearn().replaces() == {"training of the encoder"}
    shared = AdvLearn(**CRAFTER)
    assert shared.replaces() == {"training of the encoder", "classification loss"}
    with pytest.raises(
        ConfigError, match="adv_learn and label_smoothing both replace the classification loss"
    ):
        train_target(CONFIG, split(), [shared, LabelSmoothing(alpha=-0.1)], seed=0, work=NoWork())
    assert defenses.get("adv_learn") is AdvLearn


def test_a_decoder_settles_when_its_loss_falls_no_more():
    falling = [1.0 / (step + 1) for step in range(40)]
    assert not settled(falling)
    assert not settled([1.0] * 39)  # compared every 20 steps, from 40 on
    assert settled([1.0] * 40)
    assert not settled([1.0] * 20 + [0.98] * 20)


def test_an_epochs_turn_trains_the_decoder_more_and_ends_by_itself(monkeypatch):
    counts = []
    for most in (False, True):
        steps = []
        monkeypatch.setattr(DecoderGame, "step", lambda *_, seen=steps: seen.append(1) or 1.0)
        defense = AdvLearn(**TINY | {"head_start": 0, "epoch_turn": most, "public_batch": 2})
        opponent = defense.opponent(victim(), STRANGERS, None, seed=0)
        for number in range(3):
            opponent.turn(TrainingProgress(0, 4), number)
        counts.append(len(steps))
    assert counts == [3 * 2, 3 * 2 + 20]  # 40 public images in batches of 2
    large = AdvLearn(**TINY | {"head_start": 0, "epoch_turn": True, "public_batch": 2})
    steps = []
    monkeypatch.setattr(DecoderGame, "step", lambda *_: steps.append(1) or 1.0)
    many = images(400, 5, seed=9, names="stranger")
    large.opponent(victim(), many, None, seed=0).turn(TrainingProgress(0, 4), 0)
    assert len(steps) == 2 + 40  # of 200: a constant loss has settled


def test_a_first_stage_trains_the_network_without_the_decoder():
    defense = AdvLearn(pretrain=3, **TINY)
    assert defense.stage().data == "private"
    assert "starting weights" in defense.replaces()
    assert AdvLearn(**AdvLearn.disabled, pretrain=3).stage() is None
    model = train_target(CONFIG, split(), [defense], seed=0, work=NoWork())
    assert model.info["first_stage"]["epochs"] == 3


def test_the_opponent_is_compared_with_a_fresh_decoder(caplog):
    """As many steps on a network that has changed since reach a smaller error, which is said."""
    model = victim()
    defense = AdvLearn(decoder_lr=1e-2, decoder_steps=60, **TINY | {"fresh_share": 1.0})
    opponent = defense.opponent(model, STRANGERS, None, seed=0)
    assert opponent.facts() == {}  # it took no step
    opponent.turn(TrainingProgress(0, 4), 0)
    facts = opponent.facts()
    assert facts["converged"]
    assert not caplog.messages
    with torch.no_grad():
        model.module[0].weight.neg_()  # features in which the opponent has never read
    facts = opponent.facts()
    assert facts["opponent_error"] > 1.25 * facts["fresh_error"]
    assert not facts["converged"]
    (message,) = caplog.messages
    assert "where a fresh one reaches" in message
    assert "in 62 steps: the game has not converged" in message
