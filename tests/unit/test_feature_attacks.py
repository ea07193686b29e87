"""What all attacks on features share: averaging, order, confidence, errors and checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from feature_worlds import (
    FLAT,
    Constant,
    affine_prior,
    blobs,
    draws,
    mean_error,
    mixing,
    public_images,
    run,
    view_of,
)
from frostglass.attacks._search import search
from frostglass.attacks.base import invert
from frostglass.attacks.features.base import FeatureAttack, RawReconstructions, spread_evenly
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.hybrid import Hybrid
from frostglass.attacks.features.latent import Latent
from frostglass.attacks.features.mapper import Mapper
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.core.parameters import parameters
from frostglass.core.types import Halves
from frostglass.core.views import FeatureView
from frostglass.store.files import Work
from worlds import prior, target

RECEIVED: list[torch.Tensor] = []


@parameters
class Grey(FeatureAttack):
    """Returns images of one brightness, and records the features it gets."""

    brightness: float = 0.5

    name = "grey"

    def reconstruct(self, view, features, assets, *, seed, ledger):
        RECEIVED.append(features)
        shape = (len(features), 1, *view.image_shape)
        return RawReconstructions(torch.full(shape, self.brightness))


def noisy(count, deviation=1.0, size=4000):
    """Return a view of a device that adds new noise at each release, and the plain features."""
    plain = draws(count, size, seed=9)

    def release(number):
        return plain + deviation * draws(count, size, seed=100 + number)

    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, size))
    halves = Halves(encoder, nn.Identity(), FLAT, (size,), "x")
    return FeatureView(halves, release(0), ["encode", "protection"], again=release), plain


@pytest.mark.parametrize("times", [1, 2, 4, 16])
def test_averaging_removes_random_noise(times):
    RECEIVED.clear()
    view, plain = noisy(3)
    result = run(Grey(averaged=times), view)
    deviation = (RECEIVED[0] - plain).square().mean().sqrt().item()
    assert deviation == pytest.approx(1 / times**0.5, rel=0.03)
    assert result.queries == (times - 1) * 3


def test_averaging_equal_releases_changes_nothing():
    RECEIVED.clear()
    view, plain = noisy(3, deviation=0.0)
    run(Grey(averaged=3), view)
    assert torch.equal(RECEIVED[0], plain)


def test_averaging_needs_access_to_the_protection():
    view = view_of(nn.Flatten(), torch.zeros(2, *FLAT), ["encode"])
    with pytest.raises(ConfigError, match="grey needs access to protection, got encode"):
        run(Grey(averaged=2), view)
    with pytest.raises(ConfigError, match="averaged: expected at least 1, got 0"):
        Grey(averaged=0)


@pytest.mark.parametrize(
    "attack",
    [
        Decoder(epochs=10, batch=16, width=4, lr=1e-2),
        Mapper(epochs=10, batch=16, width=4, hidden=16),
        Latent(steps=20, tries=2),
        Hybrid(starter={"epochs": 10, "batch": 16, "width": 4, "lr": 1e-2}, steps=20),
        Hybrid(start="noise", steps=20),
    ],
    ids=lambda attack: f"{attack.name} {getattr(attack, 'start', '')}",
)
def test_constant_features_reveal_nothing(attack):
    """No attack beats the mean public image, beyond the error of training to predict that mean."""
    private, public = blobs(8, 1, (3, 16, 16)), blobs(60, 2, (3, 16, 16))
    assets = Assets(public_images(public), prior(), embedder=target())
    result = run(attack, view_of(Constant(), private, attack.access), assets)
    assert mean_error(result, private) > 0.97 * (private - public.mean(0)).square().mean().item()
    assert (result.confidence == 0).all()
    first = result.images[:1].expand_as(result.images)
    assert torch.allclose(result.images, first, atol=1e-5) or attack.name in ("latent", "hybrid")


@pytest.mark.parametrize(
    "attack",
    [
        Decoder(epochs=3, batch=8, width=4, adapt=8, adapt_epochs=2),
        Latent(steps=4, tries=2, pool=9),
    ],
)
def test_finished_parts_are_read_back_from_a_folder(attack, tmp_path):
    assets = Assets(public_images(blobs(24, 2, (3, 16, 16))), prior())
    view = view_of(mixing(), blobs(3, 1, (3, 16, 16)), attack.access)
    first = run(attack, view, assets, work=Work(tmp_path))
    view.module.forward = lambda images: pytest.fail("queried again")
    # Confidence is not kept, but computed again.
    view.encode_uncounted = lambda images: torch.zeros(len(images), 3, 16, 16)
    second = run(attack, view, assets, work=Work(tmp_path))
    assert torch.equal(second.images, first.images)
    assert torch.equal(second.latents, first.latents)
    assert second.queries == first.queries


def test_candidates_are_ordered_image_by_image():
    images = torch.linspace(0, 1, 6).reshape(6, 1, 1, 1).expand(6, *FLAT)
    view = view_of(nn.Flatten(), images, ["encoder"])
    result = run(Latent(steps=150, tries=2), view, Assets(prior=affine_prior()), people=3)
    assert result.images.shape == (3, 4, *FLAT)
    assert result.labels.tolist() == [0, 1, 2]
    brightness = result.images.flatten(2).mean(2)
    assert torch.allclose(brightness[:, 0], brightness[:, 1], atol=1e-3)
    assert (brightness.flatten()[2:] - brightness.flatten()[:-2] > -1e-3).all()


def test_every_person_must_have_equally_many_images():
    view = view_of(nn.Flatten(), torch.zeros(5, *FLAT), ["encode"])
    with pytest.raises(ConfigError, match=r"equally many images per person, got 5 .* for 2 people"):
        run(Grey(), view, people=2)
    with pytest.raises(ConfigError, match="no person to attack"):
        invert(Grey(), view, Assets(), people=[])


def test_confidence_is_the_explained_share_of_the_feature():
    images = torch.rand(4, *FLAT, generator=torch.Generator().manual_seed(0))
    result = run(Grey(), view_of(nn.Flatten(), images, ["encode"]))
    released = images.flatten(1)
    spreads = ((released - released.mean(0)) ** 2).sum(1).tolist()
    errors = ((0.5 - released) ** 2).sum(1).tolist()
    slow = [1 - error / spread for error, spread in zip(errors, spreads, strict=True)]
    assert result.confidence[:, 0].tolist() == pytest.approx(slow, rel=1e-4)
    single = run(Grey(), view_of(nn.Flatten(), images[:1], ["encode"]))
    assert single.confidence.tolist() == [[0.0]]


def test_images_that_are_not_finite_are_an_error():
    view = view_of(nn.Flatten(), torch.zeros(2, *FLAT), ["encode"])
    with pytest.raises(RunError, match="grey returned images that are not finite"):
        run(replace(Grey(), brightness=torch.nan), view)


@pytest.mark.parametrize(
    "attack",
    [
        Latent(steps=3, tries=2),
        Latent(steps=2, tries=7, batch=16),
        Latent(steps=2, tries=1, adapt=8, adapt_rounds=3, adapt_epochs=5),
        Hybrid(start="noise", steps=3),
        Hybrid(start="latent", steps=2, starter={"steps": 3}),
    ],
)
def test_the_budget_counts_every_image_that_is_differentiated(attack, monkeypatch):
    monkeypatch.setattr(search, "_rounds_alike", lambda *_: False)  # no trial, but padding

    class Counting(nn.Flatten):
        def forward(self, images):
            counts[torch.is_grad_enabled()] += len(images)
            return super().forward(images)

    counts = {True: 0, False: 0}
    view = view_of(Counting(), blobs(5, 1, (3, 16, 16)), attack.access)
    run(attack, view, Assets(public_images(blobs(8, 2, (3, 16, 16))), prior()))
    for_confidence = 5 * attack.kept
    assert attack.budget(AuditSize(5)).evaluations == counts[True] + for_confidence


@pytest.mark.parametrize(("count", "chosen"), [(10, 10), (10, 3), (7, 1), (1000, 999)])
def test_chosen_rows_are_spread_over_the_whole_set(count, chosen):
    rows = spread_evenly(count, chosen)
    assert len(set(rows.tolist())) == chosen
    assert rows[0] == 0
    assert chosen == 1 or rows[-1] == count - 1
