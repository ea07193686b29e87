"""Losses against hand-made values, slow references and gradcheck."""

import math

import pytest
import torch

from frostglass.attacks.objective import LOSSES, ce, logit, margin, poincare
from frostglass.attacks.search import descend
from frostglass.errors import RunError
from worlds import linear_world

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0], [0.0, 3.0, 2.5, -4.0]], dtype=torch.double)
LABELS = torch.tensor([0, 2])


def test_values_by_hand():
    assert logit(LOGITS, LABELS).tolist() == [-2.0, -2.5]
    assert margin(LOGITS, LABELS).tolist() == [-1.5, 0.5]
    total = sum(math.exp(v) for v in (2.0, -1.0, 0.5, 0.0))
    assert ce(LOGITS, LABELS)[0].item() == pytest.approx(math.log(total) - 2.0)


def test_poincare_by_definition():
    u = [v / 3.5 for v in (2.0, -1.0, 0.5, 0.0)]
    v = [1 - 1e-4, 0.0, 0.0, 0.0]
    gap = sum((a - b) ** 2 for a, b in zip(u, v, strict=True))
    expected = math.acosh(1 + 2 * gap / ((1 - sum(a * a for a in u)) * (1 - sum(b * b for b in v))))
    assert poincare(LOGITS, LABELS)[0].item() == pytest.approx(expected, rel=1e-9)


def test_poincare_ignores_the_scale_of_logits():
    assert torch.allclose(poincare(LOGITS, LABELS), poincare(1000 * LOGITS, LABELS))


@pytest.mark.parametrize("row", [[0.0] * 4, [1.0] * 4, [5.0, 0, 0, 0], [0, 5.0, 0, 0], [1e30, -1e30, 0, 0]])
def test_poincare_is_finite_at_the_edges(row):
    logits = torch.tensor([row], requires_grad=True)
    value = poincare(logits, torch.tensor([0]))
    value.sum().backward()
    assert value.isfinite().all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients(name):
    logits = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, LABELS), logits)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_samples_do_not_see_each_other(name):
    both = LOSSES[name](LOGITS, LABELS)
    alone = torch.cat([LOSSES[name](LOGITS[i : i + 1], LABELS[i : i + 1]) for i in range(2)])
    assert torch.equal(both, alone)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_lower_means_closer_to_the_label(name):
    better = LOGITS.clone()
    better[:, :] = torch.tensor([[6.0, -1, 0.5, 0], [0, 1, 6.5, -4]])
    assert (LOSSES[name](better, LABELS) < LOSSES[name](LOGITS, LABELS)).all()


def test_nesterov_is_the_published_recursion():
    scale = torch.tensor([0.5, 2.0, 3.0], dtype=torch.double)
    start = torch.tensor([[1.0, -2.0, 0.3]], dtype=torch.double)
    ours = descend(start, lambda z: 0.5 * (scale * z**2).sum(1), steps=25, lr=0.05, optimizer="nesterov", momentum=0.9)
    z, v = start.clone(), torch.zeros_like(start)
    for _ in range(25):
        old, v = v, 0.9 * v - 0.05 * scale * z
        z = z - 0.9 * old + 1.9 * v
    assert torch.allclose(ours, z, atol=1e-12)


def test_projection_holds_after_every_step():
    found = descend(torch.zeros(2, 3), lambda z: -z.sum(1), steps=40, lr=0.5, optimizer="nesterov", project=lambda z: z.clamp(-1, 1))
    assert torch.equal(found, torch.ones(2, 3))


def test_closed_form_world_reaches_the_known_optimum():
    """Linear generator and classifier, logit loss, latents in a box: the optimum is the sign of the class's weight row."""
    target, prior = linear_world()
    view = target.view(["gradients"])
    labels = torch.tensor([0, 1, 2])
    start = torch.zeros(3, 5, dtype=torch.double)
    found = descend(
        start, lambda z: logit(view.logits(prior.images(z)), labels), steps=60, lr=0.1, optimizer="adam", project=lambda z: z.clamp(-1, 1)
    )
    assert torch.equal(found, target.module[1].weight.sign())


def test_a_loss_that_explodes_stops_the_attack():
    with pytest.raises(RunError, match="not finite at step"):
        descend(torch.ones(1, 2), lambda z: (z * float("inf")).sum(1), steps=3, lr=0.1)
