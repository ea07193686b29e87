"""What the newer defenses do to networks trained on the embedded faces."""

import pytest
import torch

from frostglass.core.types import Images
from frostglass.defenses.training.midre import Midre
from frostglass.defenses.training.rolss import Rolss
from frostglass.defenses.training.ssd import Ssd, class_means, scores_of
from frostglass.defenses.training.trap_mid import TrapMid
from frostglass.training.loop import accuracy
from frostglass.training.settings import Training
from slow_faces import few_people, trained
from worlds import rng

pytestmark = pytest.mark.slow
RECIPE = {"epochs": 16, "lr": 3e-3, "weight_decay": 1e-3}
CNN = Training(model="cnn", options={"width": 16}, **RECIPE)
RESIDUAL = Training(model="resnet", options={"width": 8, "depth": 1}, **RECIPE)


@pytest.fixture(scope="module")
def split():
    return few_people(20, 40)


@pytest.fixture(scope="module")
def plain(split):
    return trained(CNN, split)


def half_erased(images):
    changes = Midre(low=0.5, high=0.5).changes(len(images), images.shape, rng())
    pixels = (255 * changes.apply(images.floats())).round().byte()
    return Images(pixels, images.labels, images.names, images.sources)


def test_a_network_that_saw_erased_faces_recognises_them(split, plain):
    defended = trained(CNN, split, Midre(low=0.1, high=0.6))
    hidden = half_erased(split.test)
    assert accuracy(defended, hidden) > accuracy(plain, hidden) + 0.1
    assert accuracy(defended, split.test) > 0.7


def test_a_network_without_last_shortcuts_learns_its_task(split):
    whole, without = trained(RESIDUAL, split), trained(RESIDUAL, split, Rolss())
    assert without.info["accuracy"]["test"] > whole.info["accuracy"]["test"] - 0.15
    assert without.info["parameters"] < whole.info["parameters"]


def test_trapdoors_that_can_be_seen_work_on_strangers(split):
    defended = trained(CNN, split, TrapMid(alpha=0.3, discriminator=False, step=0.05))
    facts = defended.info["facts"]["trap_mid"]
    assert facts["trapdoor_success"] > 0.6
    assert facts["without_trigger"] < 0.25
    assert defended.info["accuracy"]["test"] > 0.6


def test_changed_answers_tell_less_of_an_image_beyond_its_class(split, plain):
    """KL from the answer for an image to the mean answer of its class, which SSD is to lower.

    The median falls. The mean need not: an image that is drawn into another class ends farther off.
    """
    defended = trained(CNN, split, Ssd(distortion=1.0))
    scores, labels = scores_of(defended, split.test), split.test.labels
    changed = defended.view("scores").scores(split.test.floats())

    def information(answers):
        means = class_means(answers, labels)[labels]
        return (torch.special.xlogy(answers, answers) - torch.special.xlogy(answers, means)).sum(1)

    assert information(changed).median() < 0.5 * information(scores).median()
    facts = defended.info["facts"]["ssd"]
    assert facts["accuracy_changed"] > facts["accuracy_unchanged"] - 0.1
    assert facts["accuracy_unchanged"] == plain.info["accuracy"]["test"]  # the same training
