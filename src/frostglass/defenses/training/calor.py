"""CALoR: confidence adaptation and a low-rank compressed head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.defenses.base import Batch, Defense, Part, Stage, Term, TrainingProgress, defenses
from frostglass.defenses.strengths import Range, Real, Whole
from frostglass.defenses.training._heads import linear_head, with_head
from frostglass.runtime.seeding import seeded

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
}


def confidence_adaptation(logits: Tensor, labels: Tensor, a: float, b: float) -> Tensor:
    """Return a · p_y^b · ln p_y, averaged over the batch; its minimum is at p_y = exp(-1/b).

    Computed in log space, so it is finite for all finite logits.
    """
    log_p = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    return (a * (b * log_p).exp() * log_p).mean()


class LowRankHead(nn.Module):
    """A head that sees `rank` directions: logits = expand(activation(compress(norm(features))))."""

    replaces_head = True

    def __init__(
        self,
        features: int,
        rank: int,
        classes: int,
        *,
        activation: str,
        gain: float,
        pre_norm: bool,
    ):
        super().__init__()
        self.norm = nn.BatchNorm1d(features) if pre_norm else nn.Identity()
        self.compress = nn.Linear(features, rank)
        self.activation = ACTIVATIONS[activation]()
        self.expand = nn.Linear(rank, classes)
        with torch.no_grad():
            self.expand.weight.mul_(gain)

    def forward(self, features: Tensor) -> Tensor:
        return self.expand(self.activation(self.compress(self.norm(features.flatten(1)))))


@defenses.register
@parameters
class Calor(Defense):
    """Confidence adaptation and a low-rank head: less certainty, through a narrow bottleneck.

    Head: logits = C_B tanh(C_A φ) with C_A of `rank` rows. Loss: cross-entropy first, then
    L = a · p_y^b · ln p_y, whose minimum is at p_y = exp(-1/b) (0.8825 for b = 8) and which ignores
    misclassified samples; hence the first stage.

    Use: a classifier that may lose accuracy; needs no other people's images. In our trials it cost
        2 points with 40 people and 9 with 300, and left 55 and 66 % recognised instead of 88 and
        94 %.
    Cost: an epoch takes 1.01 times as long (a small `cnn`).
    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814.
    Differs: the paper does not say when the loss changes; `switch` is our choice. `gain` multiplies
        the initial C_B: after a tanh the logits are bounded by its weights, so with the usual
        initialisation they start small, and so does every gradient that reaches the backbone.
        Trained from scratch (faces, 40 people, 16 epochs, rank 10, no adaptation) that costs ten
        points of accuracy: 81.5 % at gain 1, 91.7 % at gain 6, 95.8 % with the plain head.
        `pre_norm` (a batch norm before C_A, found in MIBench) also helps at gain 1 (89.4 %); it is
        false by default, as in the paper.

    Args:
        rank: width of the bottleneck, at most the number of features and of classes; 0 leaves the
            head as it is. Published: 30 for IR-152 at 64 pixels, 50 and
            32 for ResNet-152 at 224 from MS-Celeb-1M and from ImageNet.
        activation: tanh (published), or identity, relu, sigmoid for its ablation.
        a: scale of the adapted loss, published 1; 0 keeps cross-entropy to the end (the paper's
            LoR ablation).
        b: sharpness, published 8; the loss aims at the confidence exp(-1/b).
        switch: share of the epochs trained with cross-entropy before the loss changes.
        gain: factor on the initial weights after the activation; 1 is the library's
            initialisation.
        pre_norm: batch norm before the compression.
        warmup: epochs with the ordinary head and cross-entropy before the low-rank head is
            inserted; the paper uses 50 where the backbone comes from ImageNet, because tanh slows
            training from a distant start.
    """

    rank: Annotated[int, Field(ge=0)] = 30
    activation: Literal["tanh", "identity", "relu", "sigmoid"] = "tanh"
    a: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    b: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    switch: Annotated[float, Field(ge=0, le=1)] = 0.75
    gain: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6.0
    pre_norm: bool = False
    warmup: Annotated[int, Field(ge=0)] = 0

    title = "CALoR"
    disabled: ClassVar = {"rank": 0, "a": 0.0}
    adaptive: ClassVar = ("margin", "aimed", "straight")

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"rank": Whole(2, min(64, classes), log=True), "b": Real(2, 32, log=True)}

    def brief(self) -> Self:
        # At full strength from the first epoch.
        return replace(self, switch=0.0, warmup=min(self.warmup, 1))

    def replaces(self) -> frozenset[Part]:
        parts: dict[Part, float] = {
            "head": self.rank,
            "classification loss": self.a,
            "starting weights": self.warmup,
        }
        return frozenset(part for part, strength in parts.items() if strength)

    def non_gradient_leakage(self) -> str | None:
        return "warms up on private images" if self.warmup else None

    def stage(self) -> Stage | None:
        return Stage("private", {"epochs": self.warmup}) if self.warmup else None

    def prepare(self, target: Target, *, seed: int) -> Target:
        if not self.rank:
            return target
        classes, features = linear_head(target, self.name).weight.shape
        if self.rank > min(classes, features):
            raise ConfigError(
                f"calor.rank must be at most {min(classes, features)} here "
                f"({features} features, {classes} classes), got {self.rank}"
            )
        with seeded(seed, "calor", "head"):
            head = LowRankHead(
                features,
                self.rank,
                classes,
                activation=self.activation,
                gain=self.gain,
                pre_norm=self.pre_norm,
            )
        return with_head(target, head, "expand")

    def adapting(self, progress: TrainingProgress) -> bool:
        """Whether the second stage has begun."""
        return bool(self.a) and progress.fraction >= self.switch

    def losses(self, batch: Batch) -> dict[str, Term]:
        if not self.a:
            return {}
        if not self.adapting(batch.progress):
            return {"cross_entropy": Term(1.0, F.cross_entropy(batch.logits, batch.labels))}
        loss = confidence_adaptation(batch.logits, batch.labels, self.a, self.b)
        return {"confidence_adaptation": Term(1.0, loss)}

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        return not self.a or self.adapting(progress)
