"""Defenses against known values of their papers, and their hooks."""

import math

import pytest
import torch
import torch.nn.functional as F

from frostglass.core.errors import ConfigError
from frostglass.defenses.base import Batch, Defense, TrainingProgress
from frostglass.defenses.compose import conflicts, losses
from frostglass.defenses.training.calor import Calor, LowRankHead, confidence_adaptation
from frostglass.defenses.training.label_smoothing import LabelSmoothing, smoothed_cross_entropy
from worlds import target


def logits_for(p: float) -> torch.Tensor:
    """Two classes, probability p for class 0."""
    return torch.tensor([[math.log(p / (1 - p)), 0.0]], dtype=torch.double)


@pytest.mark.parametrize(
    ("p", "value"), [(0.5, -0.00270761), (0.9, -0.0453542), (0.8824969, -0.0459849)]
)
def test_confidence_adaptation_oracles(p, value):
    assert confidence_adaptation(
        logits_for(p), torch.tensor([0]), 1.0, 8.0
    ).item() == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(
    ("b", "p"), [(1, 0.3679), (2, 0.6065), (4, 0.7788), (8, 0.8825), (16, 0.9394)]
)
def test_confidence_adaptation_has_its_minimum_at_the_stated_confidence(b, p):
    grid = torch.linspace(0.001, 0.999, 9981, dtype=torch.double)
    values = [
        confidence_adaptation(logits_for(q), torch.tensor([0]), 1.0, b).item()
        for q in grid[::20].tolist()
    ]
    assert grid[::20][int(torch.tensor(values).argmin())].item() == pytest.approx(p, abs=2e-3)


def test_confidence_adaptation_is_finite_where_the_naive_form_is_not():
    logits = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    loss = confidence_adaptation(logits, torch.tensor([0]), 1.0, 8.0)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.isfinite().all()
    naive = logits.softmax(1)[0, 0] ** 8 * logits.softmax(1)[0, 0].log()
    assert naive.isnan()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.7])
def test_confidence_adaptation_hardly_moves_hard_samples(p):
    """Its gradient as a share of cross-entropy's is -b p^b (ln p + 1/b) by calculus."""
    share = []
    for loss in (
        lambda x: confidence_adaptation(x, torch.tensor([0]), 1.0, 8.0),
        lambda x: F.cross_entropy(x, torch.tensor([0])),
    ):
        x = logits_for(p).requires_grad_()
        loss(x).backward()
        share.append(x.grad[0, 0].item())
    assert share[0] / share[1] == pytest.approx(-(p**8) * (8 * math.log(p) + 1), rel=1e-6)


@pytest.mark.parametrize("alpha", [-0.3, -0.02, 0.0, 0.1])
def test_smoothing_at_uniform_is_ln_classes(alpha):
    assert smoothed_cross_entropy(
        torch.zeros(3, 1000), torch.tensor([0, 5, 9]), alpha
    ).item() == pytest.approx(6.9078, abs=1e-4)


def test_smoothing_agrees_with_the_library_where_it_accepts_the_factor():
    logits, labels = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    assert torch.allclose(
        smoothed_cross_entropy(logits, labels, 0.1),
        F.cross_entropy(logits, labels, label_smoothing=0.1),
        atol=1e-6,
    )


def test_smoothing_always_pushes_wrong_logits_down():
    logits = torch.tensor([[60.0, 0.0, -60.0, -60.0]], dtype=torch.double, requires_grad=True)
    smoothed_cross_entropy(logits, torch.tensor([0]), -0.3).backward()
    assert logits.grad[0, 2].item() == pytest.approx(0.3 / 4)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: smoothed_cross_entropy(x, y, -0.3),
        lambda x, y: confidence_adaptation(x, y, 1.0, 8.0),
    ],
)
def test_gradients(loss):
    logits = torch.randn(
        4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, torch.tensor([0, 1, 2, 4])), logits)


def test_ramp_is_the_official_one_at_100_epochs():
    ramp = LabelSmoothing(alpha=-1.0)
    at = {e: ramp.alpha_at(TrainingProgress(e, 100)) for e in (0, 49, 50, 74, 75, 99)}
    assert at == {
        0: 0.0,
        49: 0.0,
        50: pytest.approx(-1 / 50),
        74: pytest.approx(-25 / 50),
        75: -1.0,
        99: -1.0,
    }
    assert not ramp.at_full_strength(TrainingProgress(74, 100))
    assert ramp.at_full_strength(TrainingProgress(75, 100))
    assert LabelSmoothing(alpha=-1.0, ramp=False).alpha_at(TrainingProgress(0, 100)) == -1.0


def test_the_ramp_can_reach_full_strength_earlier_or_later():
    early = LabelSmoothing(alpha=-1.0, full_from=0.3)
    at = [early.alpha_at(TrainingProgress(epoch, 100)) for epoch in (19, 20, 29, 30)]
    assert at == pytest.approx([0.0, -1 / 80, -10 / 80, -1.0])
    late = LabelSmoothing(alpha=-1.0, full_from=0.9)
    assert [late.at_full_strength(TrainingProgress(epoch, 10)) for epoch in (8, 9)] == [False, True]
    with pytest.raises(ConfigError, match="full_from: expected less than 1, got 1"):
        LabelSmoothing(full_from=1.0)


def test_low_rank_head_has_its_rank_and_forgets_the_rest():
    head = LowRankHead(20, 3, 11, activation="identity", gain=1.0, pre_norm=False)
    product = head.expand.weight @ head.compress.weight
    assert torch.linalg.matrix_rank(product) == 3
    null = torch.linalg.svd(head.compress.weight.detach())[2][3:]
    features = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    moved = features + torch.randn(5, 17, generator=torch.Generator().manual_seed(1)) @ null
    assert torch.allclose(head(features), head(moved), atol=1e-5)


def test_calor_replaces_the_head_and_the_penultimate_feature():
    prepared = Calor(rank=2).prepare(target(), seed=0)
    assert prepared.head == "6.expand"
    logits, features = prepared.outputs(torch.rand(3, 3, 16, 16))
    assert logits.shape == (3, 4)
    assert features.shape == (3, 2)
    assert features.abs().max() <= 1  # the input of the last linear layer comes after the tanh


def test_calor_changes_its_loss_at_the_switch():
    def batch(epoch):
        progress = TrainingProgress(epoch, 20)
        return Batch(torch.zeros(1), torch.tensor([0]), torch.zeros(1, 3), {}, progress)

    defense = Calor(rank=0, switch=0.5)
    assert list(losses([defense], batch(9), [()])) == ["cross_entropy"]
    assert list(losses([defense], batch(10), [()])) == ["confidence_adaptation"]
    assert [defense.at_full_strength(TrainingProgress(e, 20)) for e in (9, 10)] == [False, True]


def test_rank_above_what_fits_is_refused():
    with pytest.raises(
        ConfigError, match=r"rank must be at most 4 here \(128 features, 4 classes\), got 5"
    ):
        Calor(rank=5).prepare(target(), seed=0)


def test_two_replacements_of_one_part_are_refused_by_name():
    (problem,) = conflicts([Calor(rank=2), LabelSmoothing(alpha=-0.1)])
    assert "calor and label_smoothing both replace the classification loss" in problem
    # The low-rank head alone goes with smoothing.
    assert not conflicts([Calor(rank=2, a=0.0), LabelSmoothing(alpha=-0.1)])


def test_a_defense_without_a_hook_that_it_announces_is_refused():
    with pytest.raises(TypeError, match=r"Mute has releases = True and lacks release\(\)"):

        class Mute(Defense):
            releases = True

    class Sampler(Defense):
        name = "sampler"

        def replaces(self):
            return frozenset({"batches"})

    (problem,) = conflicts([Sampler()])
    assert problem == "sampler replaces the batches and lacks batches(): define it"


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": -1},
        {"a": -1.0},
        {"b": 0.0},
        {"a": float("nan")},
        {"switch": 1.5},
        {"activation": "gelu"},
    ],
)
def test_bad_parameters(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Calor(**bad)
