"""How long the parts of an audit of features take on this machine: one real step of each kind, on networks of the right size that have learned nothing."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frostglass.attacks.features._learned import FITS, Learned
from frostglass.attacks.features.base import FeatureAttack
from frostglass.audit.feature_pipeline import Fitting
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Halves, Images, Shape, Target
from frostglass.core.views import FeatureView
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, Size, TrainingProgress
from frostglass.models.cut import halves
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.base import PriorMethod, identity_hashes
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work
from frostglass.training.build import untrained
from frostglass.training.loop import optimizer_of, train_epoch
from frostglass.training.settings import Training

FEW = 16  # pictures that a step is timed on, where it takes as long for each
LITTLE, MORE = 1, 4  # steps of a training that is timed as a whole, twice
VALIDATION = 1 / 3  # of a step: a pass without gradients over as many pictures


def timed(step: Callable[[], Any]) -> float:
    """Seconds of a step that has been taken before: the first one also makes room and plans."""
    with seeded(0, "time"):  # dropout
        step()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began


def blank_target(
    config: Training, defenses: Sequence[Defense], classes: int, shape: Shape
) -> Target:
    return untrained(config, tuple(map(str, range(classes))), shape, defenses, seed=0)


def blank_halves(
    config: Training, defenses: Sequence[Defense], classes: int, shape: Shape
) -> Halves:
    return halves(blank_target(config, defenses, classes, shape))


def blank_prior(method: PriorMethod, shape: Shape) -> Prior:
    """A prior of the right size: as it is read from its file, or with networks that have learned nothing."""
    if getattr(method, "ready", False):
        return method.read(shape)  # type: ignore[attr-defined]
    with seeded(0, "time"):
        generator, critic = method.networks(shape, 0)  # type: ignore[attr-defined]
    return Prior(
        generator=generator.eval(), critic=critic if critic is None else critic.eval(), latent=method.latent, image_shape=shape,  # type: ignore[attr-defined]
        seen_identities=identity_hashes([]),
    )  # fmt: skip


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator_for(0, "time", "noise"))


def looking_seconds(network: torch.nn.Module, shape: Shape) -> float:
    """Seconds for a picture to pass a network, without gradients."""
    images = noise(FEW, *shape)
    with frozen(network), torch.no_grad():
        return timed(lambda: network(images)) / FEW


def search_seconds(both: Halves, prior: Prior | None, critic: bool) -> float:
    """Seconds for a step with one picture along the gradient of its feature: of its latent, or of the picture itself where there is no prior."""
    start = noise(FEW, *([prior.latent] if prior else both.image_shape)).requires_grad_()

    def step() -> None:
        pictures = prior.images(start) if prior else start
        value = both.encoder(view.fit(pictures)).square().sum()
        torch.autograd.grad(
            value + prior.realism(pictures).sum() if prior and critic else value, start
        )

    view = FeatureView(both, torch.zeros(1, *both.feature_shape), ["encoder"])
    with frozen(both.encoder, *(prior.modules if prior else [])):
        return timed(step) / FEW


def lesson_seconds(
    lesson: Learned, both: Halves, perceptual: Target | None, embedding: int
) -> float:
    """Seconds for one step of a network that learns what features mean."""
    view, answer = (
        FeatureView(both, torch.zeros(1, *both.feature_shape), ["encode"]),
        (embedding,) if lesson.embeds else both.image_shape,
    )
    with seeded(0, "time"):
        student, _ = lesson.untaught(view, Assets(perceptual=perceptual), answer)
    features, answers = noise(lesson.batch, *both.feature_shape), noise(lesson.batch, *answer)
    with frozen(*([perceptual.module] if perceptual else [])):
        return timed(lambda: student.step(features, answers))


def schooling_seconds(
    lesson: Learned, public: int, step: float, encode: float, feature: Sequence[int]
) -> float:
    """Seconds for a whole lesson of so many public pictures, if a step of it and the encoding of a picture take so long."""
    sides = 2 if lesson.flips else 1
    rounds = (
        1 if 4 * math.prod(feature) * public * sides <= FITS else lesson.epochs / sides
    )  # features that are not kept are asked for again
    held = math.ceil(lesson.validation * public) / lesson.batch
    return (
        lesson.epochs * (lesson.steps_in(public) + VALIDATION * held) * step
        + rounds * sides * public * encode
    )


def amortizer_seconds(config: Amortizer, both: Halves, prior: Prior) -> float:
    """Seconds for one step of an amortizer's training; what it does once, before the first step, is left out."""

    def trained(steps: int) -> float:
        began = time.perf_counter()
        replace(config, steps=steps).train(
            Fitting(both.encoder, both.image_shape), prior, seed=0, work=Work.scratch()
        )
        return time.perf_counter() - began

    trained(LITTLE)
    little, more = trained(LITTLE), trained(MORE)
    return max(0.0, more - little) / (MORE - LITTLE)


def release_seconds(
    protection: Defense, both: Halves, prior: Prior | None, amortizer: Amortizer, pictures: int
) -> float:
    """Seconds for a protection to release the features of so many pictures."""
    amortizer_ = None
    if prior and "amortizer" in protection.needs:
        with seeded(0, "time"):
            amortizer_ = amortizer.network(both.feature_shape, prior.latent).eval()
    images = noise(min(FEW, pictures), *both.image_shape)
    pieces = protection.efforts(
        both.encoder, images, Assets(prior=prior, amortizer=amortizer_), pictures
    )
    return max(0.0, sum(often * timed(piece) for piece, often in pieces))


class _Plain:
    """What a training asks of its accelerator."""

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def defended_seconds(
    config: Training,
    defenses: Sequence[Defense],
    classes: int,
    shape: Shape,
    perceptual: Training | None,
    images: int,
) -> float:
    """Seconds for one batch of a training with defenses, whoever simulates an attacker included; a head start is left out."""
    target = blank_target(config, defenses, classes, shape)
    some, public = (
        _pictures(min(config.batch, images), classes, shape),
        _pictures(2 * config.batch, 1, shape),
    )
    judge = blank_target(perceptual, (), 2, shape) if perceptual else None
    compose.begin(defenses, target, some, seed=0)
    rule = compose.optimizer(
        defenses, target.module, optimizer_of(config, [weight for weight in target.module.parameters() if weight.requires_grad]),
        Size(images, config.batch, config.epochs),
    )  # fmt: skip
    names, progress = compose.taps(defenses, target), TrainingProgress(1, 2)
    opponents = compose.opponents(defenses, target, public, judge, seed=0)
    return timed(
        lambda: train_epoch(
            config,
            _Plain(),
            target.module,
            rule,
            target,
            some,
            defenses,
            names,
            progress,
            opponents,
            seed=0,
        )
    )


def _pictures(count: int, classes: int, shape: Shape) -> Images:
    """Noise that has every attribute, or none, or is of anybody."""
    labels = torch.arange(count) % classes
    names = tuple(map(str, range(classes)))
    return Images(
        (noise(count, *shape) * 255).to(torch.uint8), labels, names, ("",) * count,
        attributes=torch.arange(count)[:, None].repeat(1, classes) % 2 == 0, attribute_names=names,
    )  # fmt: skip


def student_of(attack: FeatureAttack) -> Learned | None:
    """The lesson of an attack, which is always that of one who learns."""
    lesson = attack.lesson
    assert lesson is None or isinstance(lesson, Learned)
    return lesson
