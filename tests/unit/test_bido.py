"""BiDO: its hooks, what it refuses, and what its terms do to a network."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.data._balanced import balanced_batches
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, Size, TrainingProgress
from frostglass.defenses.training import bido
from frostglass.defenses.training._dependence import (
    coco,
    gaussian_gram,
    hsic_nocco,
    hsic_trace,
    linear_gram,
)
from frostglass.defenses.training.bido import Bido
from frostglass.runtime.hooks import capture
from worlds import split, target

MEASURES = ("hsic_nocco", "hsic_trace", "coco_frobenius", "coco_spectral")
TAPS = ("2", "5")  # a spatial map and a vector
SIZE = Size(records=48, batch=16, epochs=1)


def tapped_target():
    return replace(target(), taps=TAPS)


def batch_of(made, count=16, names=TAPS, labels=None):
    images = split().train
    index = torch.arange(count)
    with capture(made.module, names) as seen:
        logits = made.module(images.floats(index))
    return Batch(
        images.floats(index),
        images.labels[index] if labels is None else labels,
        logits,
        seen,
        TrainingProgress(0, 1),
    )


def total(terms):
    return sum(term.weight * term.value for term in terms.values())


def test_off_touches_nothing():
    off = Bido(**Bido.off)
    made = tapped_target()
    assert off.replaces() == frozenset()
    assert not off.couples_samples()
    assert off.taps(made) == ()
    assert off.problems(replace(made, classes=("one",), taps=("nowhere",)), Size(1000, 2, 1)) == []
    assert off.losses(batch_of(made)) == {}
    assert off.facts(made, SIZE) == {}


def test_defaults_are_the_published_hsic_setting():
    made = Bido()
    assert (
        made.measure,
        made.lambda_x,
        made.lambda_y,
        made.per_identity,
        made.sigma,
        made.epsilon,
    ) == (
        "hsic_nocco",
        0.05,
        0.5,
        4,
        5.0,
        1e-5,
    )
    assert made.couples_samples()
    assert made.replaces() == {"batches"}
    assert Bido(per_identity=0).replaces() == frozenset()


def test_batches_of_sixty_four_are_sixteen_identities_of_four():
    labels = torch.arange(40).repeat_interleave(8)
    batches = Bido().batches(labels, 64, torch.Generator().manual_seed(3))
    for batch in batches:
        assert labels[batch].unique(return_counts=True)[1].tolist() == [4] * 16
    expected = balanced_batches(labels, 16, 4, torch.Generator().manual_seed(3))
    assert all(torch.equal(one, other) for one, other in zip(batches, expected, strict=True))


def slow_terms(name, batch, lambda_x, lambda_y):
    whole = {
        "hsic_nocco": lambda k, ell: hsic_nocco(k, ell, 1e-5),
        "hsic_trace": hsic_trace,
        "coco_frobenius": coco,
        "coco_spectral": lambda k, ell: coco(k, ell, "spectral"),
    }[name]
    x, y = gaussian_gram(batch.images, 5.0), linear_gram(batch.labels)
    loss = 0
    for output in batch.tapped.values():
        z = gaussian_gram(output, 5.0)
        loss = loss + lambda_x * whole(x, z) - lambda_y * whole(z, y)
    return loss


@pytest.mark.parametrize("name", MEASURES)
def test_the_loss_is_the_formula_over_the_taps(name):
    made = tapped_target()
    batch = batch_of(made)
    terms = Bido(measure=name, lambda_x=2.0, lambda_y=3.0).losses(batch)
    assert {key: term.weight for key, term in terms.items()} == {
        "bido_x:2": 2.0,
        "bido_y:2": -3.0,
        "bido_x:5": 2.0,
        "bido_y:5": -3.0,
    }
    torch.testing.assert_close(total(terms), slow_terms(name, batch, 2.0, 3.0))
    assert all(term.value > 0 for term in terms.values())
    total(terms).backward()
    assert made.module[0].weight.grad.abs().sum() > 0
    assert made.module[6].weight.grad is None  # the head comes after the taps


def test_each_parameter_of_the_measure_matters():
    batch = batch_of(tapped_target())
    value = total(Bido().losses(batch)).item()
    for change in (
        {"sigma": 4.0},
        {"epsilon": 1e-4},
        *({"measure": name} for name in MEASURES[1:]),
    ):
        assert abs(total(Bido(**change).losses(batch)).item() - value) > 1e-4, change


@pytest.mark.parametrize(("one", "other"), [("x", "y"), ("y", "x")])
def test_either_side_alone_is_an_ablation_and_the_other_is_not_computed(one, other, monkeypatch):
    grams = []
    monkeypatch.setattr(
        bido, "linear_gram", lambda labels: grams.append("y") or linear_gram(labels)
    )
    monkeypatch.setattr(
        bido,
        "gaussian_gram",
        lambda features, sigma: (
            grams.append(tuple(features.shape)) or gaussian_gram(features, sigma)
        ),
    )
    batch = batch_of(tapped_target())
    alone = Bido(**{f"lambda_{other}": 0.0})
    terms = alone.losses(batch)
    assert set(terms) == {f"bido_{one}:2", f"bido_{one}:5"}
    assert ("y" in grams) == (one == "y")
    assert ((16, 3, 16, 16) in grams) == (one == "x")
    assert len(grams) == 3  # pictures or labels once, and each tap once
    both = Bido().losses(batch)
    assert all(torch.equal(term.value, both[key].value) for key, term in terms.items())
    assert alone.replaces() == {"batches"}
    assert alone.couples_samples()
    assert alone.taps(tapped_target()) == TAPS


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("labels", [[1], [2, 2], [0, 1], [3, 3, 3]])
def test_tiny_last_batches_stay_finite(name, labels):
    made = tapped_target()
    made.module.eval()
    terms = Bido(measure=name, per_identity=0).losses(
        batch_of(made, len(labels), labels=torch.tensor(labels))
    )
    total(terms).backward()
    assert all(term.value.isfinite() for term in terms.values())
    assert all(p.grad.isfinite().all() for p in made.module[:3].parameters())


def test_half_precision_outputs_give_single_precision_terms():
    made = tapped_target()
    batch = batch_of(made)
    halved = replace(
        batch, tapped={name: output.bfloat16() for name, output in batch.tapped.items()}
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = Bido().losses(halved)
    assert all(
        term.value.dtype == torch.float32 and term.value.isfinite() for term in terms.values()
    )


def test_terms_join_the_cross_entropy():
    batch = batch_of(tapped_target())
    terms = compose.losses([Bido()], batch, [TAPS])
    assert list(terms) == ["cross_entropy", "bido_x:2", "bido_y:2", "bido_x:5", "bido_y:5"]
    assert torch.equal(terms["cross_entropy"].value, F.cross_entropy(batch.logits, batch.labels))


@pytest.mark.parametrize(
    ("name", "lambda_x", "lambda_y"), [("hsic_nocco", 1.0, 0.0), ("hsic_nocco", 0.0, 1.0), ("coco_frobenius", 100.0, 0.0), ("coco_frobenius", 0.0, 100.0)]
)  # fmt: skip
def test_descending_its_loss_moves_the_dependence_the_right_way(name, lambda_x, lambda_y):
    made = tapped_target()
    defense = Bido(measure=name, lambda_x=lambda_x, lambda_y=lambda_y)
    rule = torch.optim.SGD(made.module[:3].parameters(), lr=0.05)
    made.module[3].p = 0.0
    values = []
    for _ in range(15):
        terms = defense.losses(batch_of(made))
        values.append(sum(term.value.item() for term in terms.values()))
        rule.zero_grad()
        total(terms).backward()
        rule.step()
    better = [
        later < earlier if lambda_x else later > earlier for earlier, later in pairwise(values)
    ]
    assert all(better), values


def test_taps_are_the_targets_own_or_those_named():
    made = tapped_target()
    assert Bido().taps(made) == TAPS
    assert Bido(layers=("4",)).taps(made) == ("4",)
    assert Bido(layers=("4",)).facts(made, SIZE)["taps"] == ["4"]
    assert Bido().problems(made, Size(1000, 8, 1)) == []


def test_only_taps_that_learn_are_read():
    made = deep_target()
    assert Bido().taps(made) == ("1", "2", "4")
    for weight in made.module[1].parameters():
        weight.requires_grad_(False)
    assert Bido().taps(made) == ("2", "4")
    for weight in made.module[2].parameters():
        weight.requires_grad_(False)
    assert Bido().taps(made) == ("4",)
    assert Bido().facts(made, SIZE)["taps"] == ["4"]
    assert Bido().problems(made, Size(1000, 16, 1)) == []


def deep_target():
    """Three taps, each behind one more layer of weights."""
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(768, 8),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 6),
        nn.Linear(6, 4),
    )
    return replace(target(), module=module, head="5", taps=("1", "2", "4"))


def problem(defense, made, batch):
    found = defense.problems(made, Size(1000, batch, 1))
    assert len(found) == 1
    assert "\n" not in found[0]
    return found[0]


def test_batches_too_small_for_two_identities_are_a_problem():
    assert Bido().problems(tapped_target(), Size(1000, 8, 1)) == []
    assert (
        "batches of 7 have no room for 2 identities of 4 pictures: raise target.batch to at least 8"
        in problem(Bido(), tapped_target(), 7)
    )
    assert "batches of 3 pictures are too small" in problem(
        Bido(per_identity=0), tapped_target(), 3
    )
    assert "batches of 3 have no room for 2 identities of 2" in problem(
        Bido(per_identity=2), tapped_target(), 3
    )
    assert Bido(per_identity=0).problems(tapped_target(), Size(1000, 4, 1)) == []


def test_a_single_class_is_a_problem():
    assert "at least 2 identities" in problem(
        Bido(), replace(tapped_target(), classes=("only one",)), 64
    )


def test_layers_that_do_not_exist_are_a_problem():
    assert "has no layer named '9'" in problem(Bido(layers=("2", "9")), tapped_target(), 64)
    with pytest.raises(ModelError, match="has no layer named '9'"):
        Bido(layers=("9",)).taps(tapped_target())


def test_a_network_without_taps_is_a_problem():
    assert "name some with layers" in problem(Bido(), target(), 64)


def test_taps_that_are_all_frozen_are_a_problem_and_never_a_silent_nothing():
    made = tapped_target()
    made.module[:3].requires_grad_(False)
    assert "no weight before 2, 5 learns" in problem(Bido(), made, 64)
    with pytest.raises(ConfigError, match="freeze fewer layers"):
        Bido().taps(made)


def test_every_problem_is_told_at_once():
    assert (
        len(
            Bido(layers=("9",)).problems(replace(target(), classes=("only one",)), Size(1000, 2, 1))
        )
        == 3
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"measure": "hsic"}, "measure"),
        ({"lambda_x": -0.1}, "lambda_x"),
        ({"lambda_y": float("inf")}, "lambda_y"),
        ({"lambda_y": float("nan")}, "lambda_y"),
        ({"sigma": 0.0}, "sigma"),
        ({"epsilon": 1e-8}, "epsilon"),
        ({"per_identity": -1}, "per_identity"),
        ({"per_identity": 1}, "use at least 2, or 0 for plain shuffling"),
    ],
)
def test_impossible_parameters_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Bido(**values)


def test_a_reader_is_told_the_batches():
    assert (
        Bido().facts(tapped_target(), Size(100, 64, 1))["batch"]
        == f"{len(tapped_target().classes)} people × 4"
    )  # fewer people than 16
    assert Bido(per_identity=0).facts(tapped_target(), Size(100, 64, 1))["batch"] == "shuffled"
