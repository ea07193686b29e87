"""Analyses of trained networks against closed forms and slow references."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from frostglass.analyses._descent import Search
from frostglass.analyses._layers import weighted_layers
from frostglass.analyses.fisher import (
    inversion_information,
    mean_depth,
    shares,
    task_information,
)
from frostglass.analyses.head_ranks import (
    effective_rank,
    head_parts,
    numeric_rank,
    singular_values,
)
from frostglass.analyses.toy_world import Networks, ToyWorld, nearest_of_class
from frostglass.core.errors import RunError
from frostglass.core.types import Target
from frostglass.defenses.training.calor import Calor
from worlds import linear_world, rng, target


def two_layers() -> Target:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Target(module=module, classes=("a", "b", "c"), image_shape=(1, 1, 5), head="3")


def layers_of(model: Target) -> dict[str, nn.Module]:
    return {n: part for n, part in model.module.named_modules() if isinstance(part, nn.Linear)}


def test_layers_with_weights_are_listed_in_the_order_they_run():
    assert list(weighted_layers(target())) == ["0", "6"]


def test_fisher_information_of_a_linear_softmax_model_has_its_closed_form():
    """The gradient of ln p_y is (e_y - p) xᵀ, so its mean square is ‖e_y - p‖² ‖x‖² / size."""
    model, _ = linear_world()
    images = torch.rand(6, 1, 1, 5, generator=rng(), dtype=torch.double)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    layers = layers_of(model)
    found = task_information(model, images, labels, layers)
    p = model.module(images).softmax(1)
    gap = (nn.functional.one_hot(labels, 3) - p).square().sum(1)
    expected = gap * images.flatten(1).square().sum(1) / 15
    torch.testing.assert_close(found, expected.detach()[:, None])
    assert all(not p.requires_grad or p.grad is None for p in model.module.parameters())


def test_fisher_information_of_two_layers_agrees_with_back_propagation_by_hand():
    model = two_layers()
    images = torch.rand(7, 1, 1, 5, generator=rng(), dtype=torch.double)
    labels = torch.arange(7) % 3
    first, last = model.module[1], model.module[3]
    hidden = torch.tanh(first(images.flatten(1)))
    late = last(hidden).softmax(1) - nn.functional.one_hot(labels, 3)
    early = (late @ last.weight) * (1 - hidden.square())

    def mean_square(slope, inputs):
        return (slope[:, :, None] * inputs[:, None]).square().flatten(1).mean(1)

    expected = [mean_square(early, images.flatten(1)), mean_square(late, hidden)]
    found = task_information(model, images, labels, layers_of(model))
    torch.testing.assert_close(found, torch.stack(expected, 1).detach())


def test_inversion_information_agrees_with_finite_differences():
    """The distance after one step of the attack, for each weight moved a little."""
    model, (_, prior) = two_layers(), linear_world()
    labels = torch.tensor([0, 2])
    search = Search(model, prior, labels)
    latents = torch.randn(2, 5, generator=rng(1), dtype=torch.double)
    truth = torch.rand(2, 1, 1, 5, generator=rng(2), dtype=torch.double)

    def distance(a, b):
        return (a - b).square().flatten(1).mean(1)

    def after_a_step():
        point = latents.clone().requires_grad_(True)
        loss = nn.functional.cross_entropy(
            model.module(point.view(-1, 1, 1, 5)), labels, reduction="sum"
        )
        (slope,) = torch.autograd.grad(loss, point)
        return distance((point - 0.3 * slope).view(-1, 1, 1, 5), truth).detach()

    layers = layers_of(model)
    found = inversion_information(search, latents, truth, {"l2": distance}, layers, 0.3)["l2"]
    for place, layer in enumerate(layers.values()):
        squares, size = torch.zeros(2, dtype=torch.double), 1e-5
        flat = layer.weight.data.view(-1)
        for index in range(len(flat)):
            before = flat[index].item()
            flat[index] = before + size
            above = after_a_step()
            flat[index] = before - size
            below = after_a_step()
            flat[index] = before
            squares += ((above - below) / (2 * size)).square()
        torch.testing.assert_close(found[:, place], squares / len(flat), rtol=1e-5, atol=1e-10)


def test_shares_and_mean_depth():
    information = torch.tensor([[1.0, 0.0, 3.0], [1.0, 0.0, 3.0]])
    share = shares(information)
    assert share.tolist() == [0.25, 0.0, 0.75]
    assert mean_depth(share) == pytest.approx(0.75)
    for bad in (torch.zeros(2, 3), torch.full((2, 3), float("nan"))):
        with pytest.raises(RunError, match="zero or not finite"):
            shares(bad)


def test_the_search_lowers_its_loss_and_visits_what_it_was_asked_for():
    model, prior = linear_world()
    search = Search(model, prior, torch.tensor([0, 1, 2]))
    start = search.start(0).double()
    visited = dict(search.visit(start, (40, 0, 10)))
    assert list(visited) == [0, 10, 40]
    assert torch.equal(visited[0], start)
    losses = [search.losses(search.images(latents)).sum().item() for latents in visited.values()]
    assert losses[0] > losses[1] > losses[2]


def test_ranks_of_matrices_that_are_known():
    rank_two = torch.randn(9, 2, generator=rng()) @ torch.randn(2, 6, generator=rng(1))
    assert numeric_rank(singular_values(rank_two), (9, 6)) == 2
    assert numeric_rank(singular_values(torch.eye(5)), (5, 5)) == 5
    assert effective_rank(singular_values(torch.eye(5))) == pytest.approx(5)
    assert effective_rank(singular_values(torch.ones(4, 4))) == pytest.approx(1, abs=1e-4)
    assert numeric_rank(singular_values(torch.zeros(3, 3)), (3, 3)) == 0
    decaying = torch.diag(torch.tensor([1.0, 0.1, 0.01]))
    assert numeric_rank(singular_values(decaying), (3, 3), tolerance=0.05) == 2
    with pytest.raises(RunError, match="not finite"):
        singular_values(torch.full((2, 2), float("nan")))


def test_a_low_rank_head_has_two_matrices_whose_product_has_its_rank():
    plain = target(classes=4)
    assert list(head_parts(plain)) == ["6"]
    low = Calor(rank=3).prepare(replace(plain), seed=0)
    parts = head_parts(low)
    first, second = parts.values()
    assert (first.shape, second.shape) == ((3, 128), (4, 3))
    assert numeric_rank(singular_values(second @ first), (4, 128)) == 3


def test_networks_computed_together_are_those_computed_alone():
    both = Networks(2, [2, 5, 3], ["tanh"], seed=0)
    points = torch.randn(2, 7, 2, generator=rng())
    for place, part in enumerate(points):
        hidden = torch.tanh(part @ both.weights[0][place] + both.biases[0][place])
        alone = hidden @ both.weights[1][place] + both.biases[1][place]
        torch.testing.assert_close(both(points)[place], alone)


def test_the_attack_of_the_toy_world_climbs_the_gradient_of_a_linear_model():
    """One step of a linear softmax model moves a point by step · Wᵀ (e_y - p)."""
    world = ToyWorld(steps=1, starts=2, networks=2, classes=3, step=0.3)
    linear = Networks(2, [2, 3], [], seed=1).requires_grad_(False)
    path, wanted = world.attack(linear)
    weight, bias = linear.weights[0], linear.biases[0]
    p = (path[0] @ weight + bias).softmax(2)
    slope = (nn.functional.one_hot(wanted, 3) - p) @ weight.transpose(1, 2)
    torch.testing.assert_close(path[1], path[0] + 0.3 * slope)


def test_the_nearest_point_is_one_of_the_class():
    data, labels = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([0, 1])
    ends = torch.zeros(2, 2)
    away = nearest_of_class(ends, torch.tensor([0, 1]), data, labels)
    assert away.tolist() == [0.0, 5.0]


def test_the_toy_world_has_four_panels_and_learns():
    world = ToyWorld(epochs=80, steps=30, networks=2, starts=2)
    found = world.run(None)
    (table,) = found.tables
    assert [row[0] for row in table.rows] == ["plain", "tanh", "low rank", "low rank and tanh"]
    assert len(found.figures) == 4
    assert table.rows[0][1] > 0.95  # accuracy of the plain network
    assert all(math.isfinite(row[3]) for row in table.rows)
