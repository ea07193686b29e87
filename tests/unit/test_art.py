"""Our adversarial examples against those of the Adversarial Robustness Toolbox, if installed."""

import numpy
import pytest
import torch

from frostglass.core.types import Images
from frostglass.robustness import Bim, Fgsm, Pgd, Victims
from frostglass.runtime.freezing import frozen
from frostglass.testing import tiny_split
from frostglass.training.loop import train_target
from frostglass.training.settings import Training

pytest.importorskip("art")

from art.attacks.evasion import (
    BasicIterativeMethod,
    FastGradientMethod,
    ProjectedGradientDescentPyTorch,
)
from art.estimators.classification import PyTorchClassifier

EPSILON, STEP, STEPS = 8 / 255, 2 / 255, 10
TRAINING = Training(model="cnn", options={"width": 8}, epochs=6, batch=16, lr=5e-3)
OURS = {"fgsm": Fgsm, "bim": Bim}


@pytest.fixture(scope="module")
def world():
    """A trained model, and correctly classified images with the classes to aim at."""
    split = tiny_split(images=24)
    target = train_target(TRAINING, split)
    images: Images = split.test
    goals = (images.labels + 1) % 4
    chosen = Victims(images.floats(), images.labels, goals, torch.arange(len(images)))
    classifier = PyTorchClassifier(
        target.module, torch.nn.CrossEntropyLoss(), images.shape, 4, clip_values=(0.0, 1.0)
    )
    return target, chosen, classifier


def theirs(name, classifier, targeted):
    settings = {"eps": EPSILON, "targeted": targeted, "batch_size": 64}
    if name == "fgsm":
        return FastGradientMethod(classifier, **settings)
    settings |= {"eps_step": STEP, "max_iter": STEPS, "verbose": False}
    return BasicIterativeMethod(classifier, **settings)


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("name", ["fgsm", "bim"])
def test_the_same_images(name, targeted, world):
    """Where the sign of a gradient is not decided by rounding, images are the same."""
    target, chosen, classifier = world
    method = OURS[name](targeted=targeted)
    goals = chosen.goals if targeted else None
    victims = Victims(chosen.images, chosen.labels, goals, chosen.numbers)
    with frozen(target.module):
        ours = method.perturb(target.view({"labels", "gradients"}), victims, seed=0)
    aims = numpy.eye(4, dtype="float32")[(goals if targeted else chosen.labels).numpy()]
    art = torch.from_numpy(theirs(name, classifier, targeted).generate(chosen.images.numpy(), aims))
    same = ((ours - art).abs() < 1e-6).double().mean().item()
    print(f"{name}, targeted {targeted}: {same:.4%} of values are the same")
    assert same > 0.99
    with frozen(target.module), torch.no_grad():
        said = [target.module(each).argmax(1) for each in (ours, art)]
    assert (said[0] == said[1]).double().mean() > 0.9


@pytest.mark.parametrize("targeted", [False, True])
def test_random_starts_succeed_equally_often(targeted, world):
    """Random starts differ; both must succeed on the same share of images, within one in eight."""
    target, chosen, classifier = world
    goals = chosen.goals if targeted else None
    victims = Victims(chosen.images, chosen.labels, goals, chosen.numbers)
    with frozen(target.module):
        ours = Pgd(targeted=targeted).perturb(target.view({"labels", "gradients"}), victims, seed=0)
    attack = ProjectedGradientDescentPyTorch(
        classifier, eps=EPSILON, eps_step=STEP, max_iter=STEPS, num_random_init=1,
        targeted=targeted, verbose=False,
    )  # fmt: skip
    aims = numpy.eye(4, dtype="float32")[(goals if targeted else chosen.labels).numpy()]
    art = torch.from_numpy(attack.generate(chosen.images.numpy(), aims))
    with frozen(target.module), torch.no_grad():
        said = [target.module(each).argmax(1) for each in (ours, art)]
    hits = [
        ((each == goals) if targeted else (each != chosen.labels)).double().mean().item()
        for each in said
    ]
    print(f"pgd, targeted {targeted}: success {hits[0]:.3f}, ART {hits[1]:.3f}")
    assert hits[0] == pytest.approx(hits[1], abs=1 / 8)
