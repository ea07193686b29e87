"""Losses against hand-made values, slow references and gradcheck."""

import math

import pytest
import torch

from frostglass.core.objective import LOSSES, ce, logit, loss_of, margin, poincare

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0], [0.0, 3.0, 2.5, -4.0]], dtype=torch.double)
LABELS = torch.tensor([0, 2])


def test_values_by_hand():
    assert logit(LOGITS, LABELS).tolist() == [-2.0, -2.5]
    assert margin(LOGITS, LABELS).tolist() == [-1.5, 0.5]
    total = sum(math.exp(v) for v in (2.0, -1.0, 0.5, 0.0))
    assert ce(LOGITS, LABELS)[0].item() == pytest.approx(math.log(total) - 2.0)


def test_a_smoothed_label_by_hand():
    logs = LOGITS[0].log_softmax(0).tolist()
    expected = -0.7 * logs[0] - 0.1 * sum(logs[1:])
    assert ce(LOGITS, LABELS, 0.3)[0].item() == pytest.approx(expected)
    for name, changed in (("ce", True), ("margin", False)):
        plain = loss_of(name, LOGITS, LABELS, aim=0.5)
        smoothed = loss_of(name, LOGITS, LABELS, aim=0.5, smoothing=0.3)
        assert torch.equal(plain, smoothed) != changed


def test_poincare_by_definition():
    u = [v / 3.5 for v in (2.0, -1.0, 0.5, 0.0)]
    v = [1 - 1e-4, 0.0, 0.0, 0.0]
    gap = sum((a - b) ** 2 for a, b in zip(u, v, strict=True))
    expected = math.acosh(1 + 2 * gap / ((1 - sum(a * a for a in u)) * (1 - sum(b * b for b in v))))
    assert poincare(LOGITS, LABELS)[0].item() == pytest.approx(expected, rel=1e-9)


def test_poincare_ignores_the_scale_of_logits():
    assert torch.allclose(poincare(LOGITS, LABELS), poincare(1000 * LOGITS, LABELS))


@pytest.mark.parametrize(
    "row", [[0.0] * 4, [1.0] * 4, [5.0, 0, 0, 0], [0, 5.0, 0, 0], [1e30, -1e30, 0, 0]]
)
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
def test_samples_are_independent(name):
    both = LOSSES[name](LOGITS, LABELS)
    alone = torch.cat([LOSSES[name](LOGITS[i : i + 1], LABELS[i : i + 1]) for i in range(2)])
    assert torch.equal(both, alone)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_lower_means_closer_to_the_label(name):
    better = LOGITS.clone()
    better[:, :] = torch.tensor([[6.0, -1, 0.5, 0], [0, 1, 6.5, -4]])
    assert (LOSSES[name](better, LABELS) < LOSSES[name](LOGITS, LABELS)).all()


def test_aim_is_least_at_its_confidence():
    """Two classes with logits (a, 0): p = sigmoid(a), so CALoR's p = exp(-1/8) has a known a."""
    p = torch.tensor(8.0, dtype=torch.double).neg().reciprocal().exp()
    a = torch.linspace(-4, 8, 1201, dtype=torch.double)
    values = loss_of(
        "aim",
        torch.stack([a, torch.zeros_like(a)], 1),
        torch.zeros(1201, dtype=torch.long),
        aim=p.item(),
    )
    assert a[values.argmin()].item() == pytest.approx((p / (1 - p)).log().item(), abs=0.006)
    assert values.min() < 1e-5
    assert values[0].item() == pytest.approx((torch.sigmoid(a[0]).log() + 0.125).item() ** 2)
