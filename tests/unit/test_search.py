"""Tests of the optimisation loop: its rules, early stopping, and independent rows."""

import pytest
import torch

from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import CHECK_EVERY, OptimizerSettings, descend
from frostglass.core.objective import logit
from frostglass.runtime.batching import padded_rows
from worlds import linear_world


def searched(start, objective, pace, labels=None, batch_multiple=1):
    """`objective(state)` alone, where labels, rng and confidence do not matter."""
    labels = torch.zeros(len(start), dtype=torch.long) if labels is None else labels
    rng = RowRng.of(0, "tests", labels, torch.arange(len(start)))
    view = linear_world()[0].view(["gradients"])
    return descend(
        view,
        start,
        labels,
        rng,
        lambda z, y, d: (objective(z), torch.zeros(len(z))),
        pace,
        batch_multiple=batch_multiple,
    )


@pytest.mark.parametrize("rule", ["nesterov", "momentum"])
def test_the_rules_are_the_published_recursions(rule):
    scale = torch.tensor([0.5, 2.0, 3.0], dtype=torch.double)
    start = torch.tensor([[1.0, -2.0, 0.3]], dtype=torch.double)
    found = searched(
        start, lambda z: 0.5 * (scale * z**2).sum(1), OptimizerSettings(25, 0.05, rule, 0.9)
    )
    z, v = start.clone(), torch.zeros_like(start)
    for _ in range(25):
        old, v = v, 0.9 * v - 0.05 * scale * z
        z = z - 0.9 * old + 1.9 * v if rule == "nesterov" else z + v
    assert torch.allclose(found.state, z, atol=1e-12)
    assert found.steps.tolist() == [25]
    assert found.finished.all()


def test_projection_holds_after_every_step():
    pace = OptimizerSettings(40, 0.5, "nesterov", project=lambda z, start: z.clamp(-1, 1))
    assert torch.equal(
        searched(torch.zeros(2, 3), lambda z: -z.sum(1), pace).state, torch.ones(2, 3)
    )


def test_closed_form_world_reaches_the_known_optimum():
    """With a linear world and a box, the optimum is the sign of the class's weight row."""
    target, prior = linear_world()
    view, labels = target.view(["gradients"]), torch.tensor([0, 1, 2])

    def objective(z, y, rng):
        return logit(view.logits(prior.images(z)), y), torch.zeros(len(z))

    rng = RowRng.of(0, "tests", labels, torch.zeros(3, dtype=torch.long))
    pace = OptimizerSettings(60, 0.1, "adam", project=lambda z, start: z.clamp(-1, 1))
    found = descend(view, torch.zeros(3, 5, dtype=torch.double), labels, rng, objective, pace)
    assert torch.equal(found.state, target.module[1].weight.sign())
    assert view.queries == 3 * 60  # rows that fill a batch up are not counted


def confident(rates, noise=0.0):
    """Rows z with loss (z - 1)²; the confidence of row i moves by rates[i] a step until z is 1."""

    def objective(z, y, rng):
        sure = (z[:, 0].detach() * rates[y]).clamp(0, 1)
        return ((z - 1 + noise * rng.normal(z.shape[1])) ** 2).sum(1), sure

    return objective


def run(labels, pace, noise=0.3, rates=(1.0, 0.5, 0.0, 1.0), batch_multiple=4):
    labels = torch.tensor(labels)
    rng = RowRng.of(3, "tests", labels, torch.zeros_like(labels))
    view = linear_world()[0].view(["gradients"])
    start = -0.2 * labels[:, None].double() * torch.ones(3, dtype=torch.double)
    return descend(
        view,
        start,
        labels,
        rng,
        confident(torch.tensor(rates), noise),
        pace,
        batch_multiple=batch_multiple,
    )


def test_a_row_leaves_once_its_confidence_has_been_flat():
    found = run(
        [0, 1, 2, 3], OptimizerSettings(400, 0.05, "adam", patience=15, flat=0.01), noise=0.0
    )
    assert found.finished.all()
    assert (
        found.steps[2] == 400
    )  # never convinces the target: a confidence of 0 is flat too, and no reason to stop
    assert 20 < found.steps[0] < 200
    assert (found.steps % CHECK_EVERY == 0).all()
    assert (found.state[[0, 1, 3]] - 1).abs().max() < 0.15


def test_without_patience_nobody_leaves():
    assert run([0, 1, 2, 3], OptimizerSettings(47, 0.05)).steps.tolist() == [47] * 4


@pytest.mark.parametrize("optimizer", ["adam", "nesterov", "momentum"])
def test_who_leaves_changes_nothing_for_those_who_stay(optimizer):
    """Optimiser memory and random numbers stay with their row, whoever goes."""
    pace = OptimizerSettings(200, 0.02, optimizer, patience=15, flat=0.05)
    whole = run([0, 1, 2, 3], pace)
    assert len(set(whole.steps.tolist())) > 1
    for labels in ([1], [3, 1], [2, 3]):
        some = run(labels, pace)
        for place, label in enumerate(labels):
            assert torch.allclose(some.state[place], whole.state[label], atol=1e-5)
            assert some.steps[place] == whole.steps[label]


def test_a_loss_that_is_not_finite_ends_one_row_with_what_it_had():
    labels = torch.tensor([0, 1])

    def objective(z, y, rng):
        cliff = torch.where((y == 1) & (z[:, 0] > 0.5), torch.nan, 1.0)
        return ((z - 1) ** 2).sum(1) * cliff, torch.zeros(len(z))

    view = linear_world()[0].view(["gradients"])
    rng = RowRng.of(0, "tests", labels, labels)
    found = descend(
        view,
        torch.zeros(2, 1),
        labels,
        rng,
        objective,
        OptimizerSettings(100, 0.02),
        batch_multiple=1,
    )
    assert found.finished.tolist() == [True, False]
    assert found.steps[0] == 100
    assert found.steps[1] < 100
    assert found.state.isfinite().all()
    assert 0 < found.state[1, 0] <= 0.5
    assert found.state[0, 0] == pytest.approx(1, abs=0.05)


def shapes_of(count, objective, patience=0, steps=200):
    """Search rows that in batches of a multiple of 4; return the shapes of all batches."""
    labels, seen = torch.arange(count) % 4, []

    def noting(z, y, rng):
        seen.append(len(z))
        return objective(z, y, rng)

    rng = RowRng.of(3, "tests", labels, torch.arange(count))
    view = linear_world()[0].view(["gradients"])
    start = -0.2 * labels[:, None].double() * torch.ones(3, dtype=torch.double)
    pace = OptimizerSettings(steps, 0.05, patience=patience)
    descend(view, start, labels, rng, noting, pace, batch_multiple=4, alike={})
    return seen


@pytest.mark.parametrize(
    ("count", "shapes"), [(3, [3, 4] + 5 * [3]), (6, [6, 8] + 5 * [6]), (8, 5 * [8])]
)
def test_rows_are_not_padded_where_kernels_round_alike(count, shapes):
    """A trial compares the bits of a batch of the rows alone with those of a padded batch."""
    assert shapes_of(count, confident(torch.ones(4), 0.3), steps=5) == shapes


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_rows_are_padded_where_they_do_not(wrong):
    def objective(z, y, rng):
        bit = 1e-15 * (len(z) % 4)  # kernels that round differently for odd numbers of rows
        shift = bit * (z.detach() if wrong == "loss" else z - z.detach())
        return ((z - 1) ** 2).sum(1) + shift.sum(1) + (bit if wrong == "loss" else 0), z[:, 0] * 0

    assert shapes_of(6, objective, steps=3) == [6, 8, 8, 8, 8]


def test_a_trial_is_not_repeated_and_changes_nothing():
    labels, seen, alike = torch.arange(3), [], {}
    base, view = confident(torch.ones(4), 0.3), linear_world()[0].view(["gradients"])

    def objective(z, y, rng):
        seen.append(len(z))
        view.queries += len(z)
        return base(z, y, rng)

    start, pace = torch.zeros(3, 3, dtype=torch.double), OptimizerSettings(4, 0.05)
    found = []
    for _ in range(2):
        rng = RowRng.of(3, "tests", labels, labels)
        found.append(
            descend(view, start, labels, rng, objective, pace, batch_multiple=4, alike=alike)
        )
    assert seen == [3, 4] + 8 * [3]
    assert view.queries == 2 * 3 * 4
    assert torch.equal(found[0].state, found[1].state)


def test_smaller_batches_replace_larger_ones_as_rows_stop():
    """Row 2 of each four never converges."""
    seen = shapes_of(9, confident(torch.tensor((1.0, 0.5, 0.0, 1.0))), patience=15)
    assert seen[:3] == [9, 12, 9]
    assert set(seen[2:]) <= {9, 8, 4}
    assert seen[-1] == 4
    assert seen[2:] == sorted(seen[2:], reverse=True)


def test_rows_that_stopped_in_their_places_are_as_if_alone_and_are_not_counted():
    pace = OptimizerSettings(200, 0.02, patience=15, flat=0.05)
    labels = torch.tensor([0, 1, 2])
    view, base = linear_world()[0].view(["gradients"]), confident(torch.tensor((1.0, 0.5, 0.0)))

    def objective(z, y, rng):
        view.queries += len(z)
        return base(z, y, rng)

    rng = RowRng.of(3, "tests", labels, torch.zeros_like(labels))
    start = -0.2 * labels[:, None].double() * torch.ones(3, dtype=torch.double)
    found = descend(view, start, labels, rng, objective, pace, batch_multiple=4)
    assert len(set(found.steps.tolist())) == 3
    assert view.queries == found.steps.sum()
    for label in labels.tolist():
        alone = run([label], pace, noise=0.0, rates=(1.0, 0.5, 0.0))
        assert torch.allclose(alone.state[0], found.state[label], atol=1e-5)
        assert alone.steps[0] == found.steps[label]


def test_filling():
    assert padded_rows(3, 4).tolist() == [0, 1, 2, 2]
    assert padded_rows(4, 4).tolist() == [0, 1, 2, 3]
    assert len(padded_rows(17)) == 32


def test_dice_belong_to_the_row_and_filling_repeats():
    labels, draws = torch.tensor([4, 7, 4]), torch.tensor([0, 0, 1])
    rolled = RowRng.of(1, "x", labels, draws).at([0, 1, 2], 4)
    first, second = rolled.normal(2, 3), rolled.normal(2, 3)
    assert first.shape == (4, 2, 3)
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(first, second)
    alone = RowRng.of(1, "x", labels[1:2], draws[1:2]).at([0], 1)
    assert torch.equal(alone.normal(2, 3)[0], first[1])
    assert torch.equal(alone.normal(2, 3)[0], second[1])
    uniform = RowRng.of(1, "x", labels, draws).uniform(1000)
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
