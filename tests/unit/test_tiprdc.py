"""TIPRDC: the extractor's training, and that it is frozen while the task is trained."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.defenses.base import Batch, Stage, TrainingProgress, TrainingSize
from frostglass.defenses.compose import conflicts, problems
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.defenses.training.tiprdc import (
    InformationCritic,
    Tiprdc,
    capped_cross_entropy,
    shared_information,
)
from frostglass.defenses.training.transfer import Transfer
from frostglass.models.cut import halves
from frostglass.networks.decoder import standardised
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import seed_for, seeded
from frostglass.training.build import untrained
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import KilledError, MemoryWork, NoWork, images, same_weights, split, target

CUT = "2"
TINY = {"epochs": 3, "reader_width": 2, "lr": 1e-3}
CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3, cut="stage2")
SIZE = TrainingSize(48, 16, 4)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def batch_of(model, seed=0):
    pixels = images(8, 4, seed=seed)
    with seeded(5), capture(model.module, (CUT,)) as tapped:
        logits = model.module(pixels.floats())
    return Batch(pixels.floats(), pixels.labels, logits, dict(tapped), TrainingProgress(0, 3))


def test_cross_entropy_counts_up_to_a_guess():
    labels = torch.tensor([0, 1, 2, 3])
    assert capped_cross_entropy(torch.zeros(4, 10), labels).item() == pytest.approx(math.log(10))
    logits = 4 * noise(4, 10)
    slow = [
        min(math.log(10), -logits[row].log_softmax(0)[label].item())
        for row, label in enumerate(labels.tolist())
    ]
    assert 1 <= slow.count(math.log(10)) < 4  # some capped, some not
    assert capped_cross_entropy(logits, labels).item() == pytest.approx(sum(slow) / 4)
    wrong = torch.tensor([[-50.0, 50.0]], requires_grad=True)  # sure, and mistaken
    capped_cross_entropy(wrong, torch.tensor([0])).backward()
    assert not wrong.grad.any()


def test_shared_information_oracles():
    assert shared_information(torch.zeros(3), torch.zeros(3)).item() == pytest.approx(
        -2 * math.log(2)
    )  # independent
    assert shared_information(
        torch.full((3,), 50.0), torch.full((3,), -50.0)
    ).item() == pytest.approx(0.0, abs=1e-6)  # fully dependent
    together, apart = noise(5), noise(5, seed=1)
    slow = (
        sum(-math.log(1 + math.exp(-t)) for t in together.tolist()) / 5
        - sum(math.log(1 + math.exp(t)) for t in apart.tolist()) / 5
    )
    assert shared_information(together, apart).item() == pytest.approx(slow)


def test_gradients():
    labels = torch.tensor([0, 1, 2])
    assert torch.autograd.gradcheck(
        lambda logits: capped_cross_entropy(logits, labels), (3 * noise(3, 4)).requires_grad_()
    )
    assert torch.autograd.gradcheck(
        shared_information, (noise(4).requires_grad_(), noise(4, seed=1).requires_grad_())
    )


def test_negative_pairs_are_the_neighbours_images():
    with seeded(0):
        critic = InformationCritic((3, 8, 8), (5,), 4, width=2).eval()
    pixels, features, people = (
        torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        noise(4, 5).float(),
        torch.arange(4),
    )
    neighbours = torch.stack([pixels[3], pixels[0], pixels[1], pixels[2]])
    slow = shared_information(
        critic(pixels, features, people), critic(neighbours, features, people)
    )
    torch.testing.assert_close(critic.information(pixels, features, people), slow)


def test_the_extractors_terms():
    model = replace(target(), cut=CUT)
    opponent = Tiprdc(weight=0.6, extracting=True, **TINY).opponent(
        model, split().public, None, seed=0
    )
    batch = batch_of(model)
    terms = opponent.losses(batch)
    features = standardised(batch.tapped[CUT])
    assert {name: term.weight for name, term in terms.items()} == {
        "identity": -0.6,
        "information": pytest.approx(-0.4),
    }
    assert torch.equal(
        terms["identity"].value, capped_cross_entropy(opponent.who(features), batch.labels)
    )
    assert torch.equal(
        terms["information"].value,
        opponent.critic.information(batch.images, features, batch.labels),
    )
    before = {name: tensor.clone() for name, tensor in opponent.tensors().items()}
    sum(term.weight * term.value for term in terms.values()).backward()
    assert model.module[0].weight.grad.abs().sum() > 0
    assert model.module[6].weight.grad is None
    assert all(
        weight.grad is None
        for network in (opponent.who, opponent.critic)
        for weight in network.parameters()
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in opponent.tensors().items())


def test_readers_train_on_the_batch_of_the_last_step():
    model = replace(target(), cut=CUT)
    one, reference = (
        Tiprdc(extracting=True, weight_decay=0.01, **TINY).opponent(
            model, split().public, None, seed=3
        )
        for _ in range(2)
    )
    assert same_weights(one.who, reference.who)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    one.turn(TrainingProgress(0, 3), 0)  # nothing to learn from yet
    assert same_weights(one.who, reference.who)
    batch = batch_of(model)
    model.module.load_state_dict(before)
    one.losses(batch)
    one.turn(TrainingProgress(0, 3), 1)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items()
    )
    assert all(part.training for part in model.module.modules())

    model.module.eval()
    with torch.no_grad():
        features = standardised(model.module[:3](batch.images))
    for network, loss in (
        (reference.who, lambda: F.cross_entropy(reference.who(features), batch.labels)),
        (
            reference.critic,
            lambda: -reference.critic.information(batch.images, features, batch.labels),
        ),
    ):
        network.train().requires_grad_(True)
        rule = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=0.01)
        loss().backward()
        rule.step()
    assert same_weights(one.who, reference.who)
    assert same_weights(one.critic, reference.critic)


def test_the_first_stage_trains_the_extractor_and_nothing_else():
    """Weight decay does not reach the layers after the cut, and the last epoch is kept."""
    early = Tiprdc(extracting=True, **TINY)
    config = replace(CONFIG, epochs=3, keep="last", weight_decay=0.1)
    model = train_target(config, split(), [early], seed=0, work=NoWork())
    fresh = untrained(config, split().classes, (3, 16, 16), [early], seed=0)
    parts, begun = halves(model), halves(fresh)
    assert all(
        torch.equal(a, b)
        for a, b in zip(parts.rest.parameters(), begun.rest.parameters(), strict=True)
    )
    assert not any(
        torch.equal(a, b)
        for a, b in zip(parts.encoder.parameters(), begun.encoder.parameters(), strict=True)
    )
    assert set(model.info["history"][0]) == {
        "identity",
        "information",
        "logit_norm",
        "train_accuracy",
        "validation_accuracy",
    }
    assert all(
        -0.66 * math.log(4) - 1e-6 <= row["identity"] <= 0 for row in model.info["history"]
    )  # bounded


def test_the_second_training_leaves_the_extractor_unchanged():
    defense = Tiprdc(**TINY)
    before = train_target(
        replace(CONFIG, epochs=3, keep="last"),
        split(),
        [replace(defense, extracting=True)],
        seed=seed_for(0, "stage"),
        work=NoWork(),
    )
    model = train_target(CONFIG, split(), [defense], seed=0, work=NoWork())
    assert same_weights(
        halves(model).encoder, halves(before).encoder
    )  # its batch norms' statistics too
    assert not same_weights(halves(model).rest, halves(before).rest)
    assert model.info["first_stage"]["epochs"] == 3
    assert model.info["facts"] == {"tiprdc": {"cut": "stage2"}}
    assert "identity" not in model.info["history"][0]
    learning = {
        name.split(".")[0]
        for name, weight in model.module.named_parameters()
        if weight.requires_grad
    }
    assert learning == {"stage3", "stage4", "head"}


def described(part):
    marks = torch.stack([part.labels % 2 == 0, part.labels > 1], 1)
    return replace(part, attributes=marks, attribute_names=("even", "large"))


def test_the_extractor_is_trained_on_people_also_for_attributes():
    plain = split()
    data = replace(
        plain,
        train=described(plain.train),
        validation=described(plain.validation),
        test=described(plain.test),
    )
    model = train_target(
        replace(CONFIG, attributes=("large",)), data, [Tiprdc(**TINY)], seed=0, work=NoWork()
    )
    assert model.classes == ("large",)
    assert model.info["first_stage"]["classes"] == 4


@pytest.mark.parametrize("died_after", [1, 2])
def test_an_interrupted_extraction_resumes_to_the_same_bytes(died_after):
    def train(work):
        return train_target(
            replace(CONFIG, keep="last"),
            split(),
            [Tiprdc(extracting=True, **TINY)],
            seed=0,
            work=work,
        )

    whole, work = train(NoWork()), MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        train(work)
    work.left = None
    resumed = train(work)
    assert same_weights(whole.module, resumed.module)
    assert whole.info == resumed.info


def test_its_first_stage():
    defense = Tiprdc(epochs=7)
    assert defense.stage() == Stage("private", {"epochs": 7, "attributes": (), "keep": "last"})
    early = defense.during_stage()
    assert early == Tiprdc(epochs=7, extracting=True)
    assert early.stage() is None
    assert early.replaces() == {"training of the encoder", "classification loss"}
    assert defense.replaces() == {"training of the encoder", "starting weights"}
    nothing = Tiprdc(**Tiprdc.disabled)
    assert nothing.during_stage() is None
    assert nothing.prepare(target(), seed=0).module[0].weight.requires_grad


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, pixels):
        maps = self.first(pixels)
        return self.head((maps.relu() if maps.mean() > 0 else maps.tanh()).mean((2, 3)))


def test_what_it_refuses():
    assert problems([Tiprdc()], target(), SIZE) == [
        "tiprdc: needs to know where the network is cut: set target.cut"
    ]
    assert problems([Tiprdc(extracting=True)], target(), SIZE) == [
        "tiprdc: needs to know where the network is cut: set target.cut"
    ]
    odd = Target(
        module=Branching(),
        classes=tuple("abcde"),
        image_shape=(3, 16, 16),
        head="head",
        cut="first",
    )
    assert Tiprdc().prepare(odd, seed=0) is odd
    (problem,) = problems([Tiprdc()], odd, SIZE)
    assert problem == (
        "tiprdc: the layers before first share weights with those after it, so they cannot be "
        "frozen alone: choose another layer or model"
    )
    attributes = replace(target(), cut=CUT, attributes=True)
    assert problems([Tiprdc(extracting=True)], attributes, SIZE) == [
        "tiprdc: its extractor is trained on people: leave target.attributes out"
    ]
    with pytest.raises(ConfigError, match="extracting needs epochs above 0: raise epochs"):
        Tiprdc(epochs=0, extracting=True)
    (reason,) = conflicts([Tiprdc(), Dpsgd()])
    assert reason.startswith(
        "tiprdc trains its extractor on private images first, where dpsgd adds no noise"
    )
    (reason,) = conflicts([Tiprdc(), Transfer()])
    assert reason.startswith("tiprdc and transfer both replace the starting weights")


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": -1},
        {"weight": 1.1},
        {"lr": 0.0},
        {"weight_decay": float("nan")},
        {"reader_width": 0},
    ],
)
def test_bad_parameters(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Tiprdc(**bad)
