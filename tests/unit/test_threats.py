"""Adversarial examples and triggers, on models whose answers are known."""

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.types import Target
from frostglass.robustness import Badnets, Bim, Blended, Evasion, Fgsm, OnePixel, Pgd, Victims
from frostglass.robustness.methods.one_pixel import painted
from worlds import rng

SHAPE = (3, 4, 4)
SIZE = 48


def linear(weight):
    """A target whose logits are a linear function of the pixels."""
    layer = nn.Linear(weight.shape[1], len(weight))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    module = nn.Sequential(nn.Flatten(), layer)
    names = tuple(map(str, range(len(weight))))
    return Target(module, names, SHAPE, head="1")


@pytest.fixture
def target():
    return linear(torch.randn(2, SIZE, generator=rng()))


def victims(count=3, goals=None):
    images = 0.2 + 0.6 * torch.rand(count, *SHAPE, generator=rng(1))
    return Victims(images, torch.arange(count) % 2, goals, torch.arange(count))


def perturbed(method, target, chosen, seed=0):
    return method.perturb(target.view({"labels", *method.access}), chosen, seed=seed)


@pytest.mark.parametrize("loss", ["ce", "margin"])
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("method", [Fgsm, Bim, Pgd])
def test_the_corner_of_the_box_is_best_against_a_linear_model(method, targeted, loss, target):
    """Of two classes, the gradient's sign is that of the other class's weights minus the own."""
    labels = victims().labels
    chosen = victims(goals=1 - labels if targeted else None)
    weight = target.module[1].weight
    direction = (weight[1 - labels] - weight[labels]).sign().reshape(-1, *SHAPE)
    expected = chosen.images + 0.05 * direction
    changed = perturbed(method(epsilon=0.05, targeted=targeted, loss=loss), target, chosen)
    # 10 steps of 2/255 reach the corner from the image, but not from the far side of the box.
    if method is Pgd:
        near = (changed - chosen.images) * direction
        assert near.min() > -0.05 + 10 * 2 / 255 - 1e-6
        assert near.max() <= 0.05 + 1e-6
    else:
        torch.testing.assert_close(changed, expected)


def test_steps_stay_within_epsilon_and_the_range_of_pixels(target):
    chosen = victims()
    chosen = Victims(chosen.images.round(), chosen.labels, None, chosen.numbers)
    for method in (Fgsm(epsilon=0.3), Bim(epsilon=0.3, step_size=0.2), Pgd(epsilon=0.3, steps=3)):
        changed = perturbed(method, target, chosen)
        assert ((changed - chosen.images).abs() <= 0.3 + 1e-6).all()
        assert changed.min() >= 0
        assert changed.max() <= 1


def test_a_random_start_depends_on_the_image_and_not_on_its_batch(target):
    chosen, method = victims(), Pgd(steps=1)
    whole = perturbed(method, target, chosen)
    alone = perturbed(method, target, chosen.at(torch.tensor([2])))
    torch.testing.assert_close(whole[2:], alone)
    assert not torch.equal(whole, perturbed(method, target, chosen, seed=1))


def test_the_margin_works_where_cross_entropy_has_no_gradient(target):
    """A model so sure that its probabilities are 1 in float32 masks the gradient."""
    with torch.no_grad():
        target.module[1].weight.mul_(1e4)
    chosen = victims(8)
    with torch.no_grad():
        said = target.module(chosen.images).argmax(1)
    chosen = Victims(chosen.images, said, None, chosen.numbers)
    assert torch.equal(perturbed(Fgsm(), target, chosen), chosen.images)
    moved = perturbed(Fgsm(loss="margin"), target, chosen)
    assert ((moved - chosen.images).abs() > 0.03).float().mean() > 0.9


def test_a_gradient_that_is_not_finite(target):
    with torch.no_grad():
        target.module[1].weight.fill_(torch.nan)
    with pytest.raises(RunError, match="fgsm: the target's gradient is not finite"):
        perturbed(Fgsm(), target, victims())


def planted():
    """Class 0, but class 1 if the red of the pixel in row 2, column 1 is nearly full."""
    weight = torch.zeros(3, *SHAPE)
    weight[1, 0, 2, 1] = 10.0
    target = linear(weight.flatten(1))
    with torch.no_grad():
        target.module[1].bias.copy_(torch.tensor([9.0, 0.0, 0.0]))
    return target


@pytest.mark.parametrize("targeted", [False, True])
def test_one_pixel_finds_the_one_that_matters(targeted):
    goals = torch.ones(4, dtype=torch.long) if targeted else None
    chosen = Victims(victims(4).images, torch.zeros(4).long(), goals, torch.arange(4))
    method = OnePixel(targeted=targeted, population=60, generations=30)
    changed = perturbed(method, planted(), chosen)
    different = (changed != chosen.images).any(1)
    assert different[:, 2, 1].all()
    assert (different.sum((1, 2)) == 1).all()
    assert planted().module(changed).argmax(1).tolist() == [1] * 4


def test_one_pixel_that_cannot_succeed_still_changes_one_at_most():
    goals = torch.full((3,), 2)
    chosen = Victims(victims().images, torch.zeros(3).long(), goals, torch.arange(3))
    changed = perturbed(OnePixel(targeted=True, pixels=2), planted(), chosen)
    assert ((changed != chosen.images).any(1).sum((1, 2)) <= 2).all()
    assert planted().module(changed).argmax(1).tolist() != [2] * 3


def test_one_pixel_needs_scores_alone():
    chosen = Victims(victims().images, torch.zeros(3).long(), None, torch.arange(3))
    method = OnePixel()
    view = planted().view("scores")
    method.perturb(view, chosen, seed=0)
    assert 3 * 10 <= view.queries <= 3 * 10 * 11


def test_a_candidate_is_painted_where_it_says():
    candidates = torch.tensor([[[0.5, 0.999, 0.1, 0.2, 0.3]], [[1.0, 0.0, 1.0, 1.0, 1.0]]])
    changed = painted(torch.zeros(2, *SHAPE), candidates)
    assert changed[0, :, 2, 3].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert changed[1, :, 3, 0].tolist() == [1, 1, 1]
    assert changed.count_nonzero() == 6


def test_goals_are_other_classes():
    labels = torch.arange(5).repeat(40)
    goals = Pgd(targeted=True).goals(labels, 5, seed=0)
    assert (goals != labels).all()
    assert set(goals.tolist()) == set(range(5))
    assert Pgd(targeted=True, target_class=2).goals(labels, 5, seed=0).tolist() == [2] * 200
    assert Fgsm().goals(labels, 5, seed=0) is None


def test_an_image_of_the_targeted_class_is_not_tried():
    said = labels = torch.tensor([0, 1, 2])
    suits = Evasion.suits
    method = Fgsm(targeted=True, target_class=1)
    assert suits(method, said, labels, torch.ones(3).long()).tolist() == [True, False, True]
    assert Fgsm().suits(torch.tensor([0, 0, 2]), labels, None).tolist() == [True, False, True]


def test_the_patch_is_chequered_in_the_corner():
    stamped = Badnets(size=2, margin=1).stamp(torch.full((1, 1, 4, 4), 0.5), seed=0)
    assert stamped[0, 0].tolist() == [
        [0.5, 0.5, 0.5, 0.5],
        [0.5, 1.0, 0.0, 0.5],
        [0.5, 0.0, 1.0, 0.5],
        [0.5, 0.5, 0.5, 0.5],
    ]


def test_a_blended_image_has_its_share_of_the_pattern():
    images = torch.rand(2, *SHAPE, generator=rng())
    pattern = Blended(ratio=1.0).stamp(images, seed=3)
    assert torch.equal(pattern[0], pattern[1])
    mixed = Blended(ratio=0.25).stamp(images, seed=3)
    torch.testing.assert_close(mixed, 0.75 * images + 0.25 * pattern)
    assert not torch.equal(pattern, Blended(ratio=1.0).stamp(images, seed=4))


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        (Fgsm, {"epsilon": 8}, "epsilon: expected at most 1, got 8"),
        (Pgd, {"epsilon": 0}, "epsilon: expected more than 0, got 0"),
        (Bim, {"step_size": -1}, "step_size: expected more than 0, got -1"),
        (Bim, {"epsilon": float("nan")}, "epsilon: expected"),
        (Pgd, {"steps": 0}, "steps: expected at least 1, got 0"),
        (OnePixel, {"population": 3}, "population: expected at least 4, got 3"),
        (Badnets, {"rate": 0}, "rate: expected more than 0, got 0"),
        (Blended, {"rate": 1.0}, "rate: expected less than 1, got 1.0"),
        (Blended, {"ratio": 1.5}, "ratio: expected at most 1, got 1.5"),
        (Fgsm, {"target_class": 1}, "target_class: 1 is used by targeted attacks alone: set"),
    ],
)
def test_parameters_out_of_range(method, values, message):
    with pytest.raises(ConfigError, match=message):
        method(**values)


def test_a_trigger_larger_than_the_image():
    assert Badnets(size=15).problems((3, 16, 16), 4) == []
    (problem,) = Badnets(size=16).problems((3, 16, 20), 4)
    assert problem == (
        "size: expected a trigger within the image, size + margin at most 16 (16×20 pixels), "
        "got 16 + 1: lower size"
    )
    assert OnePixel(pixels=17).problems((3, 4, 4), 4) == [
        "pixels: expected at most 16, got 17: lower it"
    ]
