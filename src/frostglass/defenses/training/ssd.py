"""SSD: the scores that a model returns are changed before they leave it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.parameters import parameters
from frostglass.core.pixels import per_image
from frostglass.core.types import Images, Split, Target
from frostglass.defenses.base import Defense, Part, defenses
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training.mid import noise_of
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

SMALLEST = 1e-12  # least probability in a class's mean answer, which scores are divided by
SHIELD = "shield"


def water_filling(scores: Tensor, goal: Tensor, distance: Tensor) -> Tensor:
    """Return the p nearest to `goal` (N, K) by KL(p ‖ goal) with |p - scores|₁ at most `distance`.

    p is `scores` limited to between a and b times the goal: what a adds to the smallest ratios, and
    what b takes from the largest, is half of the distance (N,) each. A goal that is near enough is
    returned itself.
    """
    least, most = _level(scores, goal, distance / 2), -_level(-scores, goal, distance / 2)
    near = ((scores - goal).abs().sum(1) <= distance)[:, None]
    limited = scores.maximum(least[:, None] * goal).minimum(most[:, None] * goal)
    return torch.where(near, goal, limited)


def _level(heights: Tensor, widths: Tensor, volume: Tensor) -> Tensor:
    """Return w with Σ max(w · widths - heights, 0) = volume for each row.

    Like water that fills vessels from the lowest on.
    """
    ratios, order = (heights / widths).sort(1)
    high, wide = (part.gather(1, order).cumsum(1) for part in (heights, widths))
    # The volume below each next rim decides how many vessels the water reaches.
    needed = ratios[:, 1:] * wide[:, :-1] - high[:, :-1]
    reached = (needed <= volume[:, None]).sum(1, keepdim=True)
    return (volume + high.gather(1, reached)[:, 0]) / wide.gather(1, reached)[:, 0]


class Shield(nn.Module):
    """Holds the mean answer of each class (K, K), and changes scores by it once they are known.

    It is no layer: called as one, it returns its input.
    """

    means: Tensor

    def __init__(self, classes: int, temperature: float, distortion: float):
        super().__init__()
        self.temperature, self.distortion = temperature, distortion
        self.register_buffer("means", torch.zeros(classes, classes))

    def forward(self, logits: Tensor) -> Tensor:
        return logits

    def answers(self, scores: Tensor, draw: int) -> Tensor:
        """Return the scores (N, K) that leave the model; `draw` numbers the random choices."""
        if not self.means.any():  # not known before the end of training
            return scores
        uniform = torch.special.ndtr(noise_of(scores, draw).double()).clamp(1e-12, 1 - 1e-12)
        gumbel = -(-uniform.log()).log()  # its largest sum with logits is a draw of their softmax
        chosen = (scores / self.temperature + gumbel).argmax(1)
        entropy = -torch.special.xlogy(scores, scores).sum(1)
        goal = self.means[chosen].to(scores)
        return water_filling(scores, goal, self.distortion * entropy)


@defenses.register
@parameters
class Ssd(Defense):
    """Stealthy shield: scores are moved towards the mean answer of their class before they leave.

    For scores f of an image, a class y is drawn from softmax(f / T), and p is returned, which
    minimises KL(p ‖ q_y) with |p - f|₁ ≤ ε H(f): q_y is the mean of f over held-out images of y,
    H the entropy. That lowers the conditional mutual information I(X; Ŷ | Y), what answers tell of
    an image beyond its class. It changes what an attacker with scores or labels sees. One who has
    the weights computes f, so that views with gradients are not changed: audit it with attacks
    that need scores (`mirror_genetic`) or labels (`brepmi`). The accuracy of the target is that of
    the changed answers.

    Use: only answers leave, and the network must stay as it is. Limit queries: in our trials an
        attacker who asked eight times recognised 56 % behind it, instead of 29 %.
    Cost: none in training; a look-up for each answer.
    Paper: Zhuang et al., Stealthy Shield Defense: A Conditional Mutual Information-Based Approach
        against Black-Box Model Inversion Attacks, ICLR 2025.
    Differs: the draw is a function of the scores' bits instead of a new one at every query, so that
        an audit gives the same result in any batch, and asking again tells nothing more (the paper
        proposes this against attackers who repeat queries); `ModelView.averaged` gives other
        draws. Means are over the validation images, as published, and those of a class without any
        are the mean over the images that are called so, or of all.

    Args:
        temperature: T, published 0.1; larger changes more labels.
        distortion: ε, published 0.35, 0.5, 0.8 and 1.5; 0 disables the defense.
    """

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    distortion: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5

    title = "SSD"
    disabled: ClassVar = {"distortion": 0.0}
    adaptive: ClassVar = ("repeated",)

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"distortion": Real(0.1, 2.0)}

    def replaces(self) -> frozenset[Part]:
        return frozenset({"answers"}) if self.distortion else frozenset()

    def non_gradient_leakage(self) -> str | None:
        return "keeps mean scores of validation images" if self.distortion else None

    def prepare(self, target: Target, *, seed: int) -> Target:
        if self.distortion:
            shield = Shield(len(target.classes), self.temperature, self.distortion)
            target.module.add_module(SHIELD, shield.to(device_of(target.module)))
        return target

    def complete(self, target: Target, split: Split) -> None:
        if self.distortion and not split.validation.pixels.is_meta:
            shield = target.module.get_submodule(SHIELD)
            assert isinstance(shield, Shield)
            scores = scores_of(target, split.validation)
            means = class_means(scores, split.validation.labels).clamp_min(SMALLEST)
            shield.means.copy_(means / means.sum(1, keepdim=True))

    def measurements(self, target: Target, split: Split, *, seed: int) -> dict[str, Any]:
        if not self.distortion or split.test.pixels.is_meta:
            return {}
        shield = target.module.get_submodule(SHIELD)
        assert isinstance(shield, Shield)
        scores, labels = scores_of(target, split.test), split.test.labels
        changed = shield.cpu().answers(scores, 0)
        shield.to(device_of(target.module))
        return {
            "accuracy_unchanged": (scores.argmax(1) == labels).double().mean().item(),
            "accuracy_changed": (changed.argmax(1) == labels).double().mean().item(),
            "mean_distance": (changed - scores).abs().sum(1).mean().item(),
        }


def scores_of(target: Target, images: Images) -> Tensor:
    """Return the probabilities that the network computes, on the CPU."""
    device = device_of(target.module)

    def scores(rows: Tensor) -> Tensor:
        return target.module(images.floats(rows).to(device)).softmax(1).cpu()

    with frozen(target.module), torch.no_grad():
        return per_image(scores, torch.arange(len(images)), images.shape)


def class_means(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean scores of the images of each class, (K, K)."""
    means = []
    for label in range(scores.shape[1]):
        own = scores[labels == label]
        if not len(own):
            own = scores[scores.argmax(1) == label]
        means.append((own if len(own) else scores).mean(0))
    return torch.stack(means)
