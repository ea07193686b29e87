"""BiDO: its hooks, what it refuses, and the effect of its terms on a network."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.data._balanced import balanced_batches
from frostglass.defenses import compose
from frostglass.defenses.base import Batch, TrainingProgress, TrainingSize
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
from frostglass.runtime.seeding import generator_for
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork, split, target

MEASURES = ("hsic_nocco", "hsic_trace", "coco_frobenius", "coco_spectral")
TAPS = ("2", "5")  # a spatial map and a vector
SIZE = TrainingSize(records=48, batch=16, epochs=1)


def tapped_target():
    return replace(target(), taps=TAPS)


def batch_of(model, count=16, names=TAPS, labels=None):
    images = split().train
    index = torch.arange(count)
    with capture(model.module, names) as seen:
        logits = model.module(images.floats(index))
    return Batch(
        images.floats(index),
        images.labels[index] if labels is None else labels,
        logits,
        seen,
        TrainingProgress(0, 1),
    )


def total(terms):
    return sum(term.weight * term.value for term in terms.values())


def test_disabled_parameters_change_nothing():
    disabled = Bido(**Bido.disabled)
    model = tapped_target()
    assert disabled.replaces() == frozenset()
    assert not disabled.couples_samples()
    assert disabled.taps(model) == ()
    assert (
        disabled.problems(
            replace(model, classes=("one",), taps=("nowhere",)), TrainingSize(1000, 2, 1)
        )
        == []
    )
    assert disabled.losses(batch_of(model)) == {}
    assert disabled.facts(model, SIZE) == {}


def test_defaults_are_the_published_hsic_setting():
    defense = Bido()
    assert (
        defense.measure,
        defense.lambda_x,
        defense.lambda_y,
        defense.per_identity,
        defense.sigma,
        defense.epsilon,
    ) == (
        "hsic_nocco",
        0.05,
        0.5,
        4,
        5.0,
        1e-5,
    )
    assert defense.couples_samples()
    assert defense.replaces() == {"batches"}
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
    model = tapped_target()
    batch = batch_of(model)
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
    assert model.module[0].weight.grad.abs().sum() > 0
    assert model.module[6].weight.grad is None  # the head comes after the taps


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
def test_one_term_alone_does_not_compute_the_other(one, other, monkeypatch):
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
    assert len(grams) == 3  # images or labels once, and each tap once
    both = Bido().losses(batch)
    assert all(torch.equal(term.value, both[key].value) for key, term in terms.items())
    assert alone.replaces() == {"batches"}
    assert alone.couples_samples()
    assert alone.taps(tapped_target()) == TAPS


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("labels", [[1], [2, 2], [0, 1], [3, 3, 3]])
def test_tiny_last_batches_stay_finite(name, labels):
    model = tapped_target()
    model.module.eval()
    terms = Bido(measure=name, per_identity=0).losses(
        batch_of(model, len(labels), labels=torch.tensor(labels))
    )
    total(terms).backward()
    assert all(term.value.isfinite() for term in terms.values())
    assert all(p.grad.isfinite().all() for p in model.module[:3].parameters())


def test_half_precision_outputs_give_single_precision_terms():
    model = tapped_target()
    batch = batch_of(model)
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
    ("name", "lambda_x", "lambda_y"),
    [
        ("hsic_nocco", 1.0, 0.0),
        ("hsic_nocco", 0.0, 1.0),
        ("coco_frobenius", 100.0, 0.0),
        ("coco_frobenius", 0.0, 100.0),
    ],
)
def test_descending_its_loss_moves_the_dependence_the_right_way(name, lambda_x, lambda_y):
    model = tapped_target()
    # At the default epsilon hsic_nocco is nearly at its bound and moves by rounding errors only.
    defense = Bido(measure=name, lambda_x=lambda_x, lambda_y=lambda_y, epsilon=1e-2)
    rule = torch.optim.SGD(model.module[:3].parameters(), lr=0.05)
    model.module[3].p = 0.0
    values = []
    for _ in range(15):
        terms = defense.losses(batch_of(model))
        values.append(sum(term.value.item() for term in terms.values()))
        rule.zero_grad()
        total(terms).backward()
        rule.step()
    better = [
        later < earlier if lambda_x else later > earlier for earlier, later in pairwise(values)
    ]
    assert all(better), values


def test_taps_are_the_targets_own_or_those_named():
    model = tapped_target()
    assert Bido().taps(model) == TAPS
    assert Bido(layers=("4",)).taps(model) == ("4",)
    assert Bido(layers=("4",)).facts(model, SIZE)["taps"] == ["4"]
    assert Bido().problems(model, TrainingSize(1000, 8, 1)) == []


def test_only_taps_after_trained_weights_are_read():
    model = deep_target()
    assert Bido().taps(model) == ("1", "2", "4")
    for weight in model.module[1].parameters():
        weight.requires_grad_(False)
    assert Bido().taps(model) == ("2", "4")
    for weight in model.module[2].parameters():
        weight.requires_grad_(False)
    assert Bido().taps(model) == ("4",)
    assert Bido().facts(model, SIZE)["taps"] == ["4"]
    assert Bido().problems(model, TrainingSize(1000, 16, 1)) == []


def deep_target():
    """Three taps, each after one more layer of weights."""
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(768, 8),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 6),
        nn.Linear(6, 4),
    )
    return replace(target(), module=module, head="5", taps=("1", "2", "4"))


def problem(defense, model, batch):
    problems = defense.problems(model, TrainingSize(1000, batch, 1))
    assert len(problems) == 1
    assert "\n" not in problems[0]
    return problems[0]


def test_batches_too_small_for_two_identities_are_a_problem():
    assert Bido().problems(tapped_target(), TrainingSize(1000, 8, 1)) == []
    assert (
        "batches of 7 cannot hold 2 identities of 4 images: raise target.batch to at least 8"
        in problem(Bido(), tapped_target(), 7)
    )
    assert "batches of 3 images are too small" in problem(Bido(per_identity=0), tapped_target(), 3)
    assert "batches of 3 cannot hold 2 identities of 2" in problem(
        Bido(per_identity=2), tapped_target(), 3
    )
    assert Bido(per_identity=0).problems(tapped_target(), TrainingSize(1000, 4, 1)) == []


def test_a_single_class_is_a_problem():
    assert "at least 2 identities" in problem(
        Bido(), replace(tapped_target(), classes=("only one",)), 64
    )


def test_layers_that_do_not_exist_are_a_problem():
    assert "has no layer named '9'" in problem(Bido(layers=("2", "9")), tapped_target(), 64)
    with pytest.raises(ModelError, match="has no layer named '9'"):
        Bido(layers=("9",)).taps(tapped_target())


def test_a_network_without_taps_is_a_problem():
    assert "name layers to tap with layers" in problem(Bido(), target(), 64)


def test_taps_that_are_all_frozen_are_a_problem():
    model = tapped_target()
    model.module[:3].requires_grad_(False)
    assert "no weight before 2, 5 is trained" in problem(Bido(), model, 64)
    with pytest.raises(ConfigError, match="freeze fewer layers"):
        Bido().taps(model)


def test_every_problem_is_reported_at_once():
    assert (
        len(
            Bido(layers=("9",)).problems(
                replace(target(), classes=("only one",)), TrainingSize(1000, 2, 1)
            )
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


def test_facts_name_the_batches():
    assert (
        Bido().facts(tapped_target(), TrainingSize(100, 64, 1))["batch"]
        == f"{len(tapped_target().classes)} people × 4"
    )  # fewer people than 16
    assert (
        Bido(per_identity=0).facts(tapped_target(), TrainingSize(100, 64, 1))["batch"] == "shuffled"
    )


@pytest.mark.parametrize("per_identity", [0, 4])
def test_the_measured_dependence_is_the_mean_over_batches(per_identity):
    model, images = tapped_target(), split().train
    defense = Bido(per_identity=per_identity)
    values = defense.dependence(model, images, seed=3)
    rng = generator_for(3, "bido", "dependence")
    if per_identity:
        batches = balanced_batches(images.labels, 16, 4, rng)[:4]
    else:
        batches = torch.randperm(len(images), generator=rng).split(64)[:4]
    model.module.eval()
    total = torch.zeros(2)
    for index in batches:
        with capture(model.module, TAPS) as seen, torch.no_grad():
            model.module(images.floats(index))
        z = gaussian_gram(seen[TAPS[0]])
        x, y = gaussian_gram(images.floats(index)), linear_gram(images.labels[index])
        total += torch.stack([hsic_nocco(x, z), hsic_nocco(z, y)])
    expected = total / len(batches)
    assert values.keys() == set(TAPS)
    assert list(values[TAPS[0]].values()) == pytest.approx(expected.tolist(), rel=1e-4)


def test_facts_have_the_dependence_after_training_and_others_can_be_measured():
    config = Training(model="cnn", options={"width": 4}, epochs=1, batch=16)
    defended = train_target(config, split(), [Bido(per_identity=2)], seed=0, work=NoWork())
    values = defended.info["facts"]["bido"]["dependence"]
    assert list(values) == list(defended.taps)
    assert all(pair["d_x"] > 0 and pair["d_y"] > 0 for pair in values.values())
    assert Bido(per_identity=2).dependence(defended, split().train, seed=0) == values
