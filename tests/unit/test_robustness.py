"""Rates and their intervals, poisoned splits, and what is measured on one model."""

from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import ConfigError, RunError
from frostglass.robustness import (
    Badnets,
    Bim,
    Blended,
    Fgsm,
    Pgd,
    Rate,
    measure,
    poison,
)
from frostglass.robustness.measuring import labels_of
from frostglass.testing import tiny_split, tiny_target
from frostglass.training.loop import train_target
from frostglass.training.settings import Training

TRAINING = Training(model="cnn", options={"width": 4}, epochs=10, batch=16, lr=1e-2, flip=False)


@pytest.fixture(scope="module")
def split():
    return tiny_split(images=24)


@pytest.fixture(scope="module")
def clean(split):
    return train_target(TRAINING, split)


def test_a_rate_is_the_share_of_all_images_that_were_tried():
    rate = Rate(torch.tensor([[1, 0, 3]]), torch.tensor([[1, 0, 7]]))
    assert rate.value == 0.5
    assert rate.images == 8
    low, high = rate.interval
    assert 0 <= low < 0.5 < high <= 1


@pytest.mark.parametrize("hits", [0, 5])
def test_a_rate_without_spread_has_the_exact_bound_over_people(hits):
    tried = torch.full((3, 20), 5)
    low, high = Rate(torch.full((3, 20), hits), tried).interval
    bound = 0.025 ** (1 / 20)
    assert (low, high) == pytest.approx((bound, 1.0) if hits else (0.0, 1 - bound))


def test_seeds_that_differ_widen_the_interval():
    tried = torch.full((3, 30), 4)
    same = Rate(torch.tensor([2, 1, 3] * 10).repeat(3, 1), tried)
    seeds = Rate.joined([Rate((same.hits[:1] + more), tried[:1]) for more in (-1, 0, 1)])
    assert seeds.value == pytest.approx(same.value)
    assert seeds.interval[1] - seeds.interval[0] > 2 * (same.interval[1] - same.interval[0])


def test_some_training_images_are_poisoned_and_nothing_else(split):
    backdoor = Badnets(rate=0.1, target_class=2)
    bad = poison(split, backdoor, seed=5)
    different = (bad.train.pixels != split.train.pixels).flatten(1).any(1)
    assert int(different.sum()) == round(0.1 * len(split.train)) == 10
    assert (split.train.labels[different] != 2).all()
    assert (bad.train.labels[different] == 2).all()
    assert torch.equal(bad.train.labels[~different], split.train.labels[~different])
    for part in ("validation", "test", "public"):
        assert getattr(bad, part) is getattr(split, part)
    assert bad.manifest["poisoned"] == {"backdoor": "badnets", "images": 10}


def test_the_key_of_a_poisoned_split_says_how(split):
    chosen = [
        poison(split, Badnets(), seed=0),
        poison(split, Badnets(), seed=1),
        poison(split, Badnets(size=4), seed=0),
        poison(split, Blended(), seed=0),
        poison(replace(split, key="other"), Badnets(), seed=0),
    ]
    assert len({bad.key for bad in chosen} | {split.key}) == 6
    assert len({bad.train.key for bad in chosen} | {split.train.key}) == 6
    assert poison(split, Badnets(), seed=0).key == chosen[0].key


@pytest.mark.parametrize(("rate", "fix"), [(0.001, "raise it"), (0.9, "lower it")])
def test_a_rate_of_no_image_or_of_too_many(split, rate, fix):
    with pytest.raises(ConfigError, match=f"expected to poison 1 to 72 of 96 .*: {fix}"):
        poison(split, Badnets(rate=rate), seed=0)


@pytest.mark.parametrize("backdoor", [Badnets(rate=0.15), Blended(rate=0.15, ratio=0.3)])
def test_a_trigger_works_on_the_poisoned_model_alone(split, clean, backdoor):
    poisoned = train_target(TRAINING, poison(split, backdoor, seed=0))
    name = backdoor.label
    table, control = (measure(each, split.test, [backdoor]) for each in (poisoned, clean))
    assert table[name].value > 0.8 > 0.3 > control[name].value
    assert table["accuracy"].value > 0.8
    assert table[name].tried[0].tolist() == [0, 4, 4, 4]


def test_adversarial_examples_beat_noise_of_the_same_size(split, clean):
    epsilon = 0.15
    methods = [Fgsm(epsilon=epsilon), Bim(epsilon=epsilon), Pgd(epsilon=epsilon, steps=20)]
    table = measure(clean, split.test, [*methods, Pgd(epsilon=epsilon, steps=20, targeted=True)])
    rng = torch.Generator().manual_seed(0)
    images = split.test.floats()
    noisy = (images + epsilon * torch.randn(images.shape, generator=rng).sign()).clamp(0, 1)
    with torch.no_grad():
        noise = (clean.module(noisy).argmax(1) != split.test.labels).double().mean().item()
    for name in ("FGSM", "BIM", "PGD"):
        assert table[name].value > noise + 0.3
    assert table["PGD"].value >= table["FGSM"].value
    assert table["PGD, targeted"].value > noise + 0.3
    assert table["PGD"].queries > table["FGSM"].queries


def test_names_tell_methods_apart():
    methods = [Pgd(), Pgd(loss="margin"), Pgd(targeted=True)]
    assert list(labels_of(methods)) == ["PGD (defaults)", "PGD (loss margin)", "PGD, targeted"]
    with pytest.raises(ConfigError, match=r"threats: PGD .* is given twice: remove one"):
        labels_of([Pgd(), Pgd()])


def test_every_problem_is_named_at_once(split):
    methods = [Fgsm(targeted=True, target_class=9), Badnets(size=99)]
    with pytest.raises(ConfigError) as raised:
        measure(tiny_target(), split.test, methods)
    assert [line.partition(":")[0] for line in raised.value.problems] == [
        "fgsm.target_class",
        "badnets.size",
    ]


def test_a_model_of_attributes_is_refused(split):
    target = replace(tiny_target(), attributes=True)
    with pytest.raises(ConfigError, match="expected a classifier of two or more people, got one"):
        measure(target, split.test, [Fgsm()])


def test_a_model_that_is_always_wrong_gives_no_number(split, clean):
    wrong = replace(split.test, labels=(split.test.labels + 1) % 4)
    perfect = measure(clean, split.test, [])["accuracy"].value
    assert perfect == 1.0
    with pytest.raises(RunError, match="fgsm: no image can be tried: the model classifies none"):
        measure(clean, wrong, [Fgsm()])
