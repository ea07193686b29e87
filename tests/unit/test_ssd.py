"""SSD: the changed scores solve the paper's problem, and who sees which answers."""

from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import AccessError, ConfigError
from frostglass.defenses.training.ssd import Shield, Ssd, class_means, scores_of, water_filling
from frostglass.training.build import rebuild_network
from frostglass.training.loop import accuracy, train_target
from frostglass.training.settings import Training
from worlds import NoWork, rng, split, target

CONFIG = Training(model="cnn", options={"width": 4}, epochs=2, batch=16, lr=5e-3)


def simplex(count, classes, seed=0, sharpness=2.0):
    return (sharpness * torch.randn(count, classes, generator=rng(seed))).softmax(1).double()


def divergence(p, q):
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(1)


def test_the_filled_scores_are_probabilities_within_the_distance():
    f, q = simplex(200, 6), simplex(200, 6, seed=1)
    distance = torch.linspace(0, 1.5, 200, dtype=torch.double)
    p = water_filling(f, q, distance)
    torch.testing.assert_close(p.sum(1), torch.ones(200, dtype=torch.double))
    assert (p >= 0).all()
    reached = (f - q).abs().sum(1)
    torch.testing.assert_close((p - f).abs().sum(1), distance.minimum(reached))


def test_no_other_probabilities_within_the_distance_are_nearer_to_the_goal():
    f, q = simplex(40, 4), simplex(40, 4, seed=1)
    distance = torch.full((40,), 0.3, dtype=torch.double)
    best = divergence(water_filling(f, q, distance), q)
    nearest = torch.full((40,), torch.inf, dtype=torch.double)
    for seed in range(300):  # steps of mean zero stay in the simplex while nothing is negative
        step = torch.randn(40, 4, generator=rng(seed)).double()
        step = step - step.mean(1, keepdim=True)
        step *= 0.3 * torch.rand(40, 1, generator=rng(seed)).double() / step.abs().sum(1, True)
        other = f + step
        value = torch.where((other >= 0).all(1), divergence(other.clamp_min(0), q), torch.inf)
        nearest = nearest.minimum(value)
    assert nearest.isfinite().sum() > 30
    assert (best <= nearest + 1e-9).all()


def test_known_values():
    """Three classes by hand: 0.1 is taken from the first, whose ratio is largest, and given."""
    f = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.double)
    q = torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.double)
    p = water_filling(f, q, torch.tensor([0.2], dtype=torch.double))
    torch.testing.assert_close(p, torch.tensor([[0.6, 0.2, 0.2]], dtype=torch.double))
    assert torch.equal(water_filling(f, q, torch.zeros(1)), f)
    assert torch.equal(water_filling(f, q, torch.full((1,), 0.7)), q)


def test_the_class_is_drawn_from_the_softmax_of_the_scores():
    """All goals differ, so that the answer tells which class was drawn."""
    shield = Shield(3, temperature=0.5, distortion=100.0)
    shield.means.copy_(torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]))
    scores = torch.tensor([[0.6, 0.3, 0.1]]).repeat(4000, 1)
    scores = scores + 1e-5 * torch.rand(4000, 3, generator=rng())  # other bits, other draws
    drawn = shield.answers(scores, 0).argmax(1)
    share = drawn.bincount(minlength=3) / 4000
    torch.testing.assert_close(
        share, (torch.tensor([0.6, 0.3, 0.1]) / 0.5).softmax(0), atol=0.03, rtol=0
    )
    assert torch.equal(drawn, shield.answers(scores, 0).argmax(1))  # asking again tells no more
    assert not torch.equal(drawn, shield.answers(scores, 1).argmax(1))


def test_means_of_classes():
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.3, 0.0], [0.2, 0.8, 0.0]])
    means = class_means(scores, torch.tensor([0, 0, 0]))
    torch.testing.assert_close(means[0], scores.mean(0))
    torch.testing.assert_close(means[1], scores[2])  # no image, but one that is called so
    torch.testing.assert_close(means[2], scores.mean(0))  # neither


@pytest.fixture(scope="module")
def shielded():
    return train_target(CONFIG, split(), [Ssd(distortion=1.0)], seed=0, work=NoWork())


def test_scores_and_labels_are_changed_and_gradients_are_not(shielded):
    images = split().test.floats()
    plain = shielded.module(images).softmax(1)
    shield = shielded.module.get_submodule("shield")
    changed = shield.answers(plain.detach(), 0)
    torch.testing.assert_close(shielded.view("scores").scores(images), changed)
    assert torch.equal(shielded.view("labels").labels(images), changed.argmax(1))
    assert torch.equal(shielded.view("gradients").scores(images), plain.detach())
    assert not torch.allclose(changed, plain, atol=1e-3)
    averaged = shielded.view("scores").averaged(2).scores(images)
    torch.testing.assert_close(averaged, (changed + shield.answers(plain.detach(), 1)) / 2)


def test_scores_asked_of_a_view_of_labels_are_refused(shielded):
    with pytest.raises(AccessError, match="this view grants labels, not scores: ask for it with"):
        shielded.view("labels").scores(split().test.floats())


def test_the_accuracy_is_that_of_the_changed_answers(shielded):
    facts = shielded.info["facts"]["ssd"]
    assert shielded.info["accuracy"]["test"] == facts["accuracy_changed"]
    right = scores_of(shielded, split().test).argmax(1) == split().test.labels
    assert facts["accuracy_unchanged"] == right.double().mean().item()
    assert facts["mean_distance"] > 0
    assert accuracy(shielded, split().test) == facts["accuracy_changed"]


def test_a_stored_network_keeps_its_shield(shielded):
    recipe = {
        "training": {"model": "cnn", "options": {"width": 4}},
        "defenses": [{"name": "ssd", "distortion": 1.0}],
        "classes": 4,
        "image_shape": (3, 16, 16),
        "seed": 0,
    }
    again = rebuild_network(recipe)
    again.load_state_dict(shielded.module.state_dict())
    images = split().test.floats()
    copy = replace(shielded, module=again.eval())
    assert torch.equal(copy.view("scores").scores(images), shielded.view("scores").scores(images))


def test_bad_parameters_are_refused():
    with pytest.raises(ConfigError, match="temperature: expected more than 0, got 0"):
        Ssd(temperature=0.0)
    with pytest.raises(ConfigError, match="distortion: expected at least 0, got -1"):
        Ssd(distortion=-1.0)
    assert Ssd(**Ssd.disabled).replaces() == frozenset()
    assert "shield" not in dict(
        Ssd(**Ssd.disabled).prepare(target(), seed=0).module.named_children()
    )
