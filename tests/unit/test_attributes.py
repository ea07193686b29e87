"""Classifiers of attributes: binary cross-entropy, and accuracy as a share of attributes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from frostglass.core.errors import ConfigError
from frostglass.defenses.base import Batch, TrainingProgress, defenses, task_loss
from frostglass.defenses.compose import losses
from frostglass.training.loop import accuracy, train_target
from frostglass.training.settings import Training, classes_of, targets_for
from frostglass.training.trainer import correct
from worlds import KilledError, MemoryWork, NoWork, same_weights, split, target

NAMES = ("even", "large", "never")
CONFIG = Training(
    model="cnn", options={"width": 8}, epochs=3, batch=16, lr=5e-3, attributes=("all",)
)


def described(part):
    marks = torch.stack([part.labels % 2 == 0, part.labels > 1, part.labels < 0], 1)
    return replace(part, attributes=marks, attribute_names=NAMES)


def data():
    plain = split()
    return replace(
        plain,
        train=described(plain.train),
        validation=described(plain.validation),
        test=described(plain.test),
    )


def train(config=CONFIG, chosen=(), work=None):
    return train_target(config, data(), chosen, seed=0, work=work or NoWork())


def test_the_loss_is_torchs_and_the_mean_over_attributes():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    answers = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0]])
    batch = Batch(torch.zeros(5, 3, 8, 8), answers, logits, {}, TrainingProgress(0, 1))
    (term,) = losses([], batch, []).values()
    assert term.weight == 1.0
    assert torch.equal(term.value, F.binary_cross_entropy_with_logits(logits, answers))
    p = logits.sigmoid()
    slow = torch.stack(
        [
            -(a * q.log() + (1 - a) * (1 - q).log())
            for a, q in zip(answers.flatten(), p.flatten(), strict=True)
        ]
    ).mean()
    torch.testing.assert_close(term.value, slow)
    people = torch.tensor([0, 1, 2, 0, 1])
    assert torch.equal(task_loss(logits, people), F.cross_entropy(logits, people))


def test_gradients_of_the_loss():
    answers = torch.tensor([[1.0, 0, 1], [0, 0, 0]], dtype=torch.double)
    logits = torch.randn(
        2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: task_loss(x, answers), logits)


def test_an_image_is_correct_by_its_share_of_attributes():
    logits = torch.tensor([[2.0, -1.0, 3.0], [0.1, 0.1, -5.0], [-1.0, -1.0, -1.0]])
    answers = torch.tensor([[1.0, 0, 1], [1, 0, 1], [1, 1, 1]])
    assert correct(logits, answers).tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    people = torch.tensor([2, 0, 1])
    assert correct(logits, people).tolist() == [1.0, 1.0, 0.0]


def test_accuracy_is_the_mean_over_attributes():
    made = train()
    assert made.attributes
    assert made.classes == NAMES
    part = described(split().test)
    with torch.no_grad():
        said = made.module(part.floats()) > 0
    by_attribute = [
        (said[:, column] == part.attributes[:, column]).double().mean().item()
        for column in range(3)
    ]
    assert accuracy(made, part) == pytest.approx(sum(by_attribute) / 3)
    assert made.info["accuracy"]["test"] == accuracy(made, part)
    assert len(set(by_attribute)) > 1


def test_it_learns_them():
    made = train(replace(CONFIG, epochs=12))
    history = made.info["history"]
    assert history[-1]["cross_entropy"] < 0.3 * history[0]["cross_entropy"]
    assert made.info["accuracy"]["test"] > 0.9


def test_one_attribute_and_any_order_of_attributes():
    single = train(replace(CONFIG, attributes=("large",)))
    assert single.classes == ("large",)
    assert single.module(torch.zeros(2, 3, 16, 16)).shape == (2, 1)
    made = replace(target(), classes=("large", "even"), attributes=True)
    part = described(split().test)
    assert torch.equal(
        targets_for(made, part), torch.stack([part.labels > 1, part.labels % 2 == 0], 1).float()
    )
    assert torch.equal(targets_for(target(), part), part.labels)


def test_the_same_weights_again_and_after_a_kill():
    work = MemoryWork(saves_before_death=1)
    with pytest.raises(KilledError):
        train(work=work)
    work.left = None
    assert same_weights(train(work=work).module, train().module)


def test_attributes_the_data_does_not_have():
    with pytest.raises(
        ConfigError,
        match=r"attributes: the data has no attribute 'glasses'; it has even, large, never",
    ):
        train(replace(CONFIG, attributes=("even", "glasses")))
    message = r"attributes: the data has no attribute 'all'; it has none: use "
    with pytest.raises(ConfigError, match=message):
        classes_of(CONFIG, split())
    message = "the target predicts attributes, and these images have none"
    with pytest.raises(ConfigError, match=message):
        targets_for(replace(target(), attributes=True), split().test)


def test_an_attribute_is_named_once():
    with pytest.raises(ConfigError, match=r"attributes: 'even' is given twice: name each once"):
        Training(attributes=("even", "large", "even"))


@pytest.mark.parametrize(
    "name", [name for name in defenses.names() if not defenses.get(name).takes_attributes]
)
def test_defenses_of_people_are_refused(name):
    message = rf"{name} defends a classifier of people, and target\.attributes asks for one of attr"
    with pytest.raises(ConfigError, match=message):
        train(chosen=[defenses.get(name)()])


# Defenses that support attributes, small enough for a test.
SMALL = {
    "adv_learn": {"decoder_width": 4, "head_start": 1, "public_batch": 8},
    "disco": {"decoder_width": 4, "pruner_width": 4, "head_start": 1, "public_batch": 8},
    "tiprdc": {"epochs": 1, "reader_width": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_defenses_of_features_support_attributes(name):
    assert defenses.get(name).takes_attributes
    made = train(replace(CONFIG, cut="stage2"), [defenses.get(name)(**SMALL[name])])
    assert made.classes == NAMES
    assert all(value == value for row in made.info["history"] for value in row.values())  # no NaN
    assert name in made.info["facts"]
