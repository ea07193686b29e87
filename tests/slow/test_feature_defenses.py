"""What protections of features do on the embedded faces, to decoders that they never met."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feature_worlds import mean_error, run, view_of
from frostglass.attacks.features.decoder import Decoder
from frostglass.core.assets import Assets
from frostglass.defenses.training.adv_learn import AdvLearn
from frostglass.defenses.training.disco import Disco
from frostglass.defenses.training.tiprdc import Tiprdc
from frostglass.models.cut import encoded, halves
from frostglass.training.settings import Training
from slow_faces import few_people, trained

pytestmark = pytest.mark.slow
PEOPLE = 12
CONFIG = Training(
    model="cnn",
    options={"width": 16},
    attributes=("all",),
    cut="stage1",
    epochs=10,
    lr=3e-3,
)
LATER = replace(CONFIG, cut="stage2")
RESIDUAL = replace(LATER, model="resnet", options={"width": 8, "depth": 1})
ATTACK = Decoder(epochs=8, batch=32, width=8)


@pytest.fixture(scope="module")
def split():
    return few_people(PEOPLE, 200)


@pytest.fixture(scope="module")
def plain(split):
    return trained(CONFIG, split)


def error_of(target, split, attack=ATTACK):
    """Return the error on held-out images of a decoder that saw public features alone."""
    images = split.test.floats()[:: len(split.test) // (2 * PEOPLE)]
    view = view_of(halves(target).encoder, images, attack.access)
    return mean_error(run(attack, view, Assets(split.public)), images)


def test_a_fresh_decoder_of_adv_learn_errs_more(split):
    """By 1.37 and 1.38 with two seeds; a first convolution can hardly forget, a later stage can."""
    defense = AdvLearn.variant("converging", pixel=40.0, decoder_width=8, pretrain=6)
    defended = trained(RESIDUAL, split, defense)
    assert error_of(defended, split) > 1.2 * error_of(trained(RESIDUAL, split), split)


def test_a_decoder_errs_more_on_pruned_channels_and_less_if_it_knows_them(split, plain):
    at_random = Disco(ratio=0.9, alpha=0.0, selection="random")
    for defense in (Disco(ratio=0.9, decoder_width=8, pruner_width=8), at_random):
        defended = trained(CONFIG, split, defense)
        blind = error_of(defended, split)
        assert blind > 1.5 * error_of(plain, split)
    assert error_of(defended, split, replace(ATTACK, unit_channels=True)) < 0.8 * blind


def surprise_of_a_reader(target, split):
    """Return the cross-entropy of a fresh reader of people, on features of held-out images."""
    torch.manual_seed(0)
    encoder = halves(target).encoder.eval()
    shown, held_out = (encoded(encoder, part.floats()) for part in (split.train, split.test))
    mean, std = shown.mean((0, 2, 3), keepdim=True), shown.std((0, 2, 3), keepdim=True)
    reader = nn.Sequential(
        nn.Conv2d(shown.shape[1], 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, PEOPLE),
    )
    optimizer = torch.optim.Adam(reader.parameters(), 3e-3)
    for _ in range(300):
        rows = torch.randperm(len(shown))[:32]
        loss = F.cross_entropy(reader((shown[rows] - mean) / std), split.train.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(reader.eval()((held_out - mean) / std), split.test.labels).item()


def test_a_fresh_reader_of_people_is_surprised_by_tiprdc(split):
    """By 1.8 and 2.1 with two seeds, at a larger weight than the published one."""
    defense = Tiprdc(weight=0.95, epochs=12, reader_width=16, lr=2e-3)
    defended, plain = trained(LATER, split, defense), trained(LATER, split)
    assert surprise_of_a_reader(defended, split) > 1.3 * surprise_of_a_reader(plain, split)
