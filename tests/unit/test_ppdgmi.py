"""PPDG-MI: distances by hand, what tuning changes and what it leaves alone, rounds, refusals."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from frostglass.attacks import Ppdgmi, invert
from frostglass.attacks._search.tuned import (
    AdversarialTuning,
    PointTuning,
    TunedCopy,
    conditional_transport,
    layer_features,
    mean_discrepancy,
    pixel_features,
    pointwise,
    ramp,
)
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.priors._style_space import StyleSpace
from worlds import (
    PUBLIC,
    NoWork,
    conditional_prior,
    linear_world,
    prior,
    rng,
    same_weights,
    styled_prior,
    target,
)

GMI = {"name": "gmi", "steps": 12, "lr": 0.1, "coupling": 1}
SMALL = {"base": GMI, "searches": 3, "points": 2, "keep": 2, "inversion": 6, "tuning": 6}
PIXELS = Ppdgmi(**SMALL, features="pixels")


def vectors(count, seed, size=5):
    return torch.randn(count, size, generator=rng(seed), dtype=torch.double)


def test_distances_of_pairs_and_of_sets_by_hand():
    ours, theirs = vectors(3, 0), vectors(3, 1)
    slow = sum(float((ours[i, j] - theirs[i, j]) ** 2) for i in range(3) for j in range(5)) / 3
    assert pointwise(ours, theirs) == pytest.approx(slow)
    theirs = vectors(4, 2)
    total = 0.0
    for one, other in ((ours, theirs), (theirs, ours)):
        for x in one:
            weights = [math.exp(float(x @ y)) for y in other]
            costs = [1 - float(x @ y / (x.norm() * y.norm())) for y in other]
            moved = sum(w * c for w, c in zip(weights, costs, strict=True)) / sum(weights)
            total += moved / len(one) / 2
    assert conditional_transport(ours, theirs) == pytest.approx(total)


def test_mean_discrepancy_by_hand():
    ours, theirs = vectors(3, 0), vectors(4, 2)
    both = [*ours, *theirs]
    distances = [[float((x - y).square().sum()) for y in both] for x in both]
    width = sum(map(sum, distances)) / (7 * 6)
    kernel = [[sum(math.exp(-d / (width * 2**k)) for k in (-2, -1, 0, 1, 2)) for d in row]
              for row in distances]  # fmt: skip
    own = sum(kernel[i][j] for i in range(3) for j in range(3)) / 9
    other = sum(kernel[i][j] for i in range(3, 7) for j in range(3, 7)) / 16
    across = sum(kernel[i][j] for i in range(3) for j in range(3, 7)) / 12
    assert mean_discrepancy(ours, theirs) == pytest.approx(own + other - 2 * across)
    assert mean_discrepancy(ours, ours).abs() < 1e-12


@pytest.mark.parametrize("distance", [pointwise, conditional_transport])
def test_distances_have_the_right_gradients(distance):
    ours = vectors(3, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distance(x, vectors(3, 1)), ours)


def test_features_of_pixels_and_layers():
    images = torch.rand(4, 3, 16, 16, generator=rng())
    first, second = pixel_features(images)[:2]
    assert (first - second).square().sum() == pytest.approx(
        (images[0] - images[1]).square().mean().item(), rel=1e-5
    )
    network = replace(target(), taps=("2",))
    network.module.eval()
    features = layer_features(network)(images)
    # The tap has a unit vector at each of 64 positions, the embedding is one.
    assert torch.allclose(features.square().sum(1), torch.full((4,), 2.0), atol=1e-3)


def test_the_step_size_rises_and_falls():
    assert [round(ramp(share), 3) for share in (0, 0.025, 0.05, 0.5, 0.75, 0.875)] == [
        0, 0.5, 1, 1, 1, 0.5,
    ]  # fmt: skip


def tuning(**more):
    settings = {
        "distance": pointwise, "features": pixel_features, "inversion": 20, "inversion_lr": 0.1,
        "realism": 0.0, "tuning": 30, "tuning_lr": 3e-3,
    }  # fmt: skip
    return PointTuning(**{**settings, **more})


@pytest.mark.parametrize("known", [prior(), styled_prior()], ids=["latents", "styles"])
def test_tuning_brings_the_copy_nearer_and_leaves_the_prior_alone(known):
    for module in known.modules:
        module.eval()
    images, labels = torch.rand(2, 3, 16, 16, generator=rng(3)), torch.zeros(2, dtype=torch.long)
    copy, method = TunedCopy.of(known), tuning()
    pivots = method.pivots(copy, pixel_features(images), labels, seed=1)

    @torch.no_grad()
    def gap(space, styles=pivots):
        return pointwise(pixel_features(space.images(styles, labels)), pixel_features(images))

    before = gap(copy)
    assert before < gap(copy, StyleSpace(known).mean.expand_as(pivots))
    method.run(copy, images, labels, seed=1)
    assert gap(copy) < 0.9 * before
    assert gap(TunedCopy.of(known)) == pytest.approx(before.item())
    assert not same_weights(copy.prior.generator, known.generator)
    assert not any(weight.requires_grad for weight in copy.prior.generator.parameters())
    copy.reset()
    assert same_weights(copy.prior.generator, known.generator)


def test_pivots_of_a_linear_generator_are_the_latents_themselves():
    _, known = linear_world()
    images = torch.rand(3, 1, 1, 5, generator=rng(2))
    copy, labels = TunedCopy.of(known), torch.zeros(3, dtype=torch.long)
    method = tuning(inversion=400, inversion_lr=0.05)
    pivots = method.pivots(copy, pixel_features(images), labels, seed=0)
    assert torch.allclose(pivots, images.flatten(1), atol=0.02)


def test_adversarial_tuning_mixes_what_was_found_into_the_public_images():
    found, method = torch.ones(3, 3, 16, 16), AdversarialTuning(PUBLIC, 2, 1e-3, 64, 1, 10.0, 0.25)
    drawn = torch.cat([method._real(found, rng(seed)) for seed in range(8)])
    share = (drawn == 1).flatten(1).all(1).float().mean()
    assert 0.15 < share < 0.35
    natural = replace(method, share=None)
    drawn = torch.cat([natural._real(found, rng(seed)) for seed in range(8)])
    assert 0.02 < (drawn == 1).flatten(1).all(1).float().mean() < 0.14  # 3 of 43
    known = prior()
    copy = TunedCopy.of(known)
    method.run(copy, found, torch.zeros(3, dtype=torch.long), seed=0)
    assert not same_weights(copy.prior.generator, known.generator)
    assert not same_weights(copy.prior.critic, known.critic)


def test_adversarial_tuning_raises_the_score_of_what_was_found():
    """The critic learns that found images are real, when they are all that is real."""
    known, found = prior(), torch.rand(4, 3, 16, 16, generator=rng(5))
    copy = TunedCopy.of(known)
    AdversarialTuning(PUBLIC, 1, 1e-2, 16, 10, 0.0, 1.0).run(
        copy, found, torch.zeros(4, dtype=torch.long), seed=0
    )
    made = TunedCopy.of(known).prior.images(torch.randn(16, 6, generator=rng()))
    gaps = [p.critic(found).mean() - p.critic(made).mean() for p in (known, copy.prior)]
    assert gaps[1] > gaps[0]


def attacked(attack, known=None, labels=(0, 2), **more):
    view = target().view(["gradients"])
    assets = Assets(public=PUBLIC, prior=known or prior(), **more)
    return invert(attack, view, assets, people=labels, work=NoWork())


def test_images_come_from_the_copy_and_latents_are_the_generators():
    result = attacked(PIXELS)
    known = prior()
    known.generator.eval()
    assert result.latents.shape == (2, 2, 6)
    with torch.no_grad():
        plain = known.generator(result.latents.flatten(0, 1)).unflatten(0, (2, 2))
    assert (plain - result.images).abs().amax((2, 3, 4)).min() > 1e-3


def test_more_tuning_moves_the_result_further_from_the_prior():
    none, some = (
        attacked(replace(PIXELS, tuning=1, tuning_lr=rate, reselect=False)) for rate in (1e-9, 1e-2)
    )
    assert not torch.allclose(none.images, some.images, atol=1e-2)


def test_a_generator_is_tuned_for_each_person_from_the_prior():
    alone, beside = attacked(PIXELS, labels=(2,)), attacked(PIXELS, labels=(0, 2))
    assert torch.allclose(alone.images[0], beside.images[1], atol=1e-3)


def test_starts_are_chosen_anew_only_if_asked():
    pooled = {**GMI, "pool": 50}
    again, once = (
        attacked(replace(PIXELS, base=pooled, reselect=reselect)) for reselect in (True, False)
    )
    searched = 2 * (2 * 3 * 12 + 3) + 2 * 3  # two people, two rounds, a look after each
    assert once.queries == 50 + searched
    assert again.queries == once.queries + 2 * 50


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"points \(4\) must not exceed the images of a round"):
        Ppdgmi(**{**SMALL, "points": 4})
    with pytest.raises(ConfigError, match="rounds: expected at least 2, got 1"):
        Ppdgmi(**SMALL, rounds=1)
    vanilla = replace(PIXELS, measure="vanilla", tuning_batch=8)
    for known in (prior(critic=False), conditional_prior("label")):
        with pytest.raises(ConfigError, match="trains a WGAN on, but the prior is none"):
            attacked(vanilla, known)
    with pytest.raises(ConfigError, match=r"ppdgmi needs assets\.embedder"):
        attacked(Ppdgmi(**SMALL))
    with pytest.raises(ConfigError, match=r"ppdgmi needs assets\.public, got none"):
        invert(vanilla, target().view(["gradients"]), Assets(prior=prior()), work=NoWork())


def test_it_wraps_an_attack_that_sees_labels_alone():
    base = {"name": "brepmi", "points": 6, "radius": 0.5, "max_queries": 60, "patience": 25}
    attack = replace(PIXELS, base=base, reselect=False, searches=2)
    view = target().view(["labels"])
    result = invert(attack, view, Assets(prior=prior()), people=(0, 2), work=NoWork())
    assert attack.access == ("labels",)
    assert result.images.shape == (2, 2, 3, 16, 16)
    assert isinstance(view.module, nn.Module)
