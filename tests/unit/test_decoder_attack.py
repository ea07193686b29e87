"""The decoder attack, and what all attacks that train a network share."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from feature_worlds import (
    FLAT,
    blobs,
    draws,
    mean_error,
    mixing,
    public_images,
    run,
    view_of,
)
from frostglass.attacks.features import _training
from frostglass.attacks.features._training import TrainingPairs, channel_statistics, flip
from frostglass.attacks.features.base import QueryLedger
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.mapper import Mapper
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.core.types import Halves
from frostglass.core.views import FeatureView
from worlds import MemoryWork, target

SHORT = {"epochs": 2, "batch": 8, "width": 4}


def ledger():
    return QueryLedger(MemoryWork(), view_of(nn.Flatten(), torch.zeros(1, *FLAT), []))


def test_an_invertible_linear_encoder_is_inverted():
    private = blobs(6, 1)
    view = view_of(mixing(), private, ["encode"])
    attack = Decoder(epochs=25, batch=16, width=12, lr=5e-3)
    result = run(attack, view, Assets(public_images(blobs(120, 2))))
    assert mean_error(result, private) < 0.04 * private.var(0).mean()
    assert result.images.shape == (6, 1, 3, 8, 8)
    assert result.latents.shape == (6, 1, 0)
    assert (result.confidence > 0.9).all()
    assert result.queries == view.queries == 2 * 120


def test_features_that_do_not_fit_into_memory_are_queried_in_each_epoch(monkeypatch):
    private, assets = blobs(3, 1), Assets(public_images(blobs(30, 2)))
    attack = Decoder(epochs=3, batch=8, width=4, validation=0.2)

    def result(attack, max_cache):
        monkeypatch.setattr(_training, "MAX_CACHE", max_cache)
        return run(attack, view_of(mixing(), private, ["encode"]), assets)

    cached, repeated = result(attack, 2**30), result(attack, 1)
    assert torch.allclose(cached.images, repeated.images, atol=1e-3)
    assert cached.queries == 2 * 30
    # For the statistics, for the first error on held-out images, and in each epoch.
    assert repeated.queries == 30 + 6 + 3 * 30
    unflipped = replace(attack, flips=False)
    assert result(unflipped, 1).queries == repeated.queries
    assert result(unflipped, 2**30).queries == 30


def test_small_features_do_not_hide_anything():
    """With standardised features, scaling them by a power of two changes no bit of the result."""
    private, assets = blobs(3, 1), Assets(public_images(blobs(30, 2)))
    loud, faint = mixing(), mixing()
    with torch.no_grad():
        faint.weight /= 2**14
        faint.bias /= 2**14
    attack = Decoder(**SHORT)
    for standardize in (True, False):
        one, other = (
            run(
                replace(attack, standardize=standardize),
                view_of(encoder, private, ["encode"]),
                assets,
            ).images
            for encoder in (loud, faint)
        )
        assert torch.equal(one, other) if standardize else not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5,), 0),
        ((5, 4, 4), (0, 2, 3)),
        ((4, 4, 5), (0, 1, 2)),
        ((6, 5), (0, 1)),
        ((3, 2, 4, 4), (0, 2, 3, 4)),
    ],
)
def test_channel_statistics_equal_those_of_numpy(shape, axes):
    features = draws(40, *shape) * 3 + 7
    expected = [
        torch.tensor(function(axes, keepdims=True)[0])
        for function in (features.numpy().mean, features.numpy().std)
    ]
    assert torch.allclose(channel_statistics(features), torch.stack(expected), atol=1e-5)


def test_a_constant_channel_is_not_amplified():
    features = draws(40, 3)
    features[:, 1] = 2.0
    deviation = channel_statistics(features)[1]
    assert deviation[1] == pytest.approx(1e-7 * deviation.max().item())
    assert (channel_statistics(torch.ones(4, 3))[1] > 0).all()


@pytest.mark.parametrize("inverting", [True, False])
def test_adaptation_learns_what_the_protection_does(inverting):
    """A device that releases features of negatives misleads whoever knows plain ones only."""
    private, encoder = blobs(5, 1), mixing()

    def protect(images, number):
        return encoder(1 - images) if inverting else encoder(images)

    view = FeatureView(
        Halves(encoder, nn.Identity(), (3, 8, 8), (3, 8, 8), "x"),
        protect(private, 0),
        ["encode", "protection"],
        protect=protect,
    )
    assets = Assets(public_images(blobs(80, 2)))
    plain, adapted = (
        mean_error(
            run(
                Decoder(epochs=6, batch=16, width=8, lr=5e-3, adapt=adapt, adapt_epochs=25),
                view,
                assets,
            ),
            private,
        )
        for adapt in (0, 60)
    )
    # Without a protection there is nothing to learn, and nothing must be lost.
    assert adapted < (0.1 if inverting else 1.2) * plain


def test_protected_images_are_requested_once_and_in_one_call():
    calls, encoder = [], mixing()

    def protect(images, number):
        calls.append((len(images), number))
        return encoder(images)

    view = view_of(encoder, blobs(2, 1), ["encode", "protection"], protect=protect)
    attack = Decoder(epochs=1, batch=8, width=4, adapt=10, adapt_epochs=4)
    assert attack.protected_images == 10
    result = run(attack, view, Assets(public_images(blobs(20, 2))), work=(work := MemoryWork()))
    assert calls == [(10, 0)]
    assert result.queries == 2 * 20 + 10
    assert work.kept["protected"][0]["value"].shape == (10, 3, 8, 8)


class Recorder:
    """A trainer that records its batches, and sets the weight of a network by a script."""

    def __init__(self, network=None, script=()):
        self.network, self.script, self.batches = network, list(script), []

    def step(self, features, targets):
        self.batches.append((features, targets))
        if self.script:
            self.network.weight.fill_(self.script.pop(0))
        return 0.0

    def tensors(self):
        return {}


@pytest.mark.parametrize(("validation", "kept"), [(0.25, 1.5), (0.0, 4.0)])
def test_the_epoch_with_the_least_error_on_held_out_images_is_kept(validation, kept):
    network = nn.Linear(1, 1, bias=False).requires_grad_(False)
    network.weight.fill_(9.0)
    trainer = Recorder(network, [5.0, 3.0, 1.5, 4.0])

    def ones(rows, _):
        return torch.ones(len(rows), 1)

    pairs = TrainingPairs(8, ones, ones, flips=False)
    attack = Decoder(validation=validation)
    attack._fit("x", trainer, network, pairs, 4, seed=0, ledger=ledger())
    assert network.weight.item() == kept


def test_held_out_images_are_not_trained_on():
    validated = set()

    class Network(nn.Module):
        def forward(self, features):
            validated.update(features[:, 0].tolist())
            return features

    def identity(rows, _):
        return rows[:, None].float()

    trainer, pairs = Recorder(), TrainingPairs(40, identity, identity, flips=False)
    attack = Decoder(validation=0.3)
    attack._fit("x", trainer, Network(), pairs, 3, seed=0, ledger=ledger())
    trained = {value for features, _ in trainer.batches for value in features[:, 0].tolist()}
    assert len(trained) == 28
    assert len(validated) == 12
    assert not trained & validated


def test_mirrored_images_are_paired_with_mirrored_features():
    images, trainer = blobs(12, 1), Recorder()
    attack = Decoder(flips=True, validation=0.0, epochs=8, batch=4, standardize=False)
    view, public = view_of(nn.Identity(), images, ["encode"]), public_images(images)

    def targets(rows, mirrored):
        return flip(public.floats(rows), mirrored)

    ledger = QueryLedger(MemoryWork(), view)
    attack.train_network(trainer, nn.Identity(), view, public, targets, seed=0, ledger=ledger)
    assert all(torch.equal(features, wanted) for features, wanted in trainer.batches)
    shown = torch.cat([wanted for _, wanted in trainer.batches])
    unflipped = sum((shown == image).flatten(1).all(1).sum().item() for image in public.floats())
    assert len(shown) == 96
    assert 30 < unflipped < 66


@pytest.mark.parametrize(
    "weights",
    [{"adversarial": 0.05}, {"perceptual": 1.0}, {"norm": "batch_norm"}, {"form": "crafter"}],
)
def test_every_part_of_the_loss_matters(weights):
    public = public_images(blobs(24, 2, (3, 16, 16)))
    assets = Assets(public, perceptual=replace(target(), taps=("0", "2")))
    view = view_of(mixing(), blobs(3, 1, (3, 16, 16)), ["encode"])
    plain, other = (run(Decoder(**SHORT, **more), view, assets) for more in ({}, weights))
    assert not torch.equal(plain.images, other.images)


def test_public_images_of_another_size_or_colour_are_converted():
    view = view_of(mixing(), blobs(3, 1), ["encode"])
    result = run(Decoder(**SHORT), view, Assets(public_images(blobs(24, 2, (1, 12, 12)))))
    assert result.images.shape == (3, 1, 3, 8, 8)
    assert (result.images.std(2).mean() < 0.1).all()  # it was trained on grey images


@pytest.mark.parametrize("max_cache", [0, 2**30])
def test_a_pretrained_attack_gives_the_same_result_and_query_count(max_cache, monkeypatch):
    monkeypatch.setattr(_training, "MAX_CACHE", max_cache)
    assets = Assets(public_images(blobs(24, 2)))
    attack = Decoder(epochs=3, batch=8, width=4, adapt=8, adapt_epochs=2, averaged=3)
    alone = run(attack, view_of(mixing(), blobs(3, 1), attack.access), assets, seed=4)
    blank = view_of(mixing(), torch.zeros(2, 3, 8, 8), attack.pretraining.access)
    run(attack.pretraining, blank, assets, seed=4, work=(before := MemoryWork()))
    work = MemoryWork()
    work.kept = {name: before.kept[name] for name in attack.pretrained_checkpoints}
    after = run(attack, view_of(mixing(), blobs(3, 1), attack.access), assets, seed=4, work=work)
    assert torch.equal(after.images, alone.images)
    assert after.queries == alone.queries


def test_protections_share_the_pretraining_and_its_budget_is_separate():
    attack = Decoder(epochs=7, flips=False)
    adaptive = replace(attack, adapt=10, adapt_epochs=5, averaged=2)
    assert adaptive.pretraining == attack.pretraining
    assert attack.pretraining.access == ("encode",)
    assert adaptive.access == ("encode", "protection")
    size = AuditSize(people=3, images_per_person=2, public=50)
    assert (attack.budget(size).evaluations, attack.budget(size).trained) == (6, 0)
    assert adaptive.budget(size).trained == 5 * 10
    pretraining = attack.pretraining.budget(size)
    assert (pretraining.evaluations, pretraining.trained) == (50 + 6, 7 * 50)
    assert attack.pretraining.brief().budget(size).trained == 50


def test_what_cannot_work_is_refused():
    view, few = view_of(mixing(), blobs(2, 1), ["encode"]), Assets(public_images(blobs(2, 2)))
    nine = Assets(public_images(blobs(9, 2)))
    tiny = view_of(nn.Flatten(), torch.zeros(2, *FLAT), ["encode"])
    for attack, seen, assets, problem in (
        (Decoder(), view, Assets(), "decoder needs at least 2 public images .*, got 0 public"),
        (Decoder(), view, few, "decoder needs at least 2 public images .*, got 2 public"),
        (Decoder(validation=0, adapt=9), view, few, r"decoder\.adapt must be at most 2"),
        (Decoder(adapt=2), view, few, r"decoder\.adapt must leave at least 2 images .*, got 2"),
        (Decoder(perceptual=1.0), view, nine, r"decoder needs assets\.perceptual, got none"),
        (
            Decoder(adversarial=1.0),
            tiny,
            Assets(public_images(torch.zeros(9, *FLAT))),
            r"decoder\.adversarial needs images of at least 8 pixels a side, got 4",
        ),
        (Mapper(), view, nine, r"mapper needs assets\.embedder, got none"),
    ):
        with pytest.raises(ConfigError, match=problem):
            run(attack, seen, assets)
    with pytest.raises(ConfigError, match="batch: expected at least 2"):
        Decoder(batch=1)


@pytest.mark.parametrize("attack", [Decoder(**SHORT, lr=1e30), Mapper(**SHORT, hidden=8, lr=1e30)])
def test_a_training_that_diverges_is_an_error(attack):
    view = view_of(mixing(), blobs(2, 1, (3, 16, 16)), ["encode"])
    assets = Assets(public_images(blobs(20, 2, (3, 16, 16))), embedder=target())
    with pytest.raises(RunError, match=r"(?i)lower"):
        run(replace(attack, epochs=3), view, assets)


def test_published_parameters():
    assert Decoder(**Decoder.variants["pixel"][1]).norm == "batch_norm"
    assert Decoder(**Decoder.variants["adaptive"][1]).adapt_epochs == 70
