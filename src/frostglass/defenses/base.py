"""A defense is a set of optional hooks into training; every hook does nothing unless a defense overrides it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from frostglass.registry import Registry
from frostglass.types import Target

defenses = Registry("defense", "frostglass.defenses")

Part = Literal["head", "classification loss"]


@dataclass(frozen=True)
class Moment:
    """Where training stands: epoch 0 is the first of `epochs`."""

    epoch: int
    epochs: int

    @property
    def progress(self) -> float:
        """Share of the epochs already finished, in [0, 1)."""
        return self.epoch / self.epochs


@dataclass(frozen=True)
class Batch:
    """What a loss may look at: images in [0, 1], labels, logits, the outputs of tapped layers by name, and the moment."""

    images: Tensor
    labels: Tensor
    logits: Tensor
    tapped: Mapping[str, Tensor]
    moment: Moment


@dataclass(frozen=True)
class Term:
    """One named part of the objective; the loss is the sum of weight × value over all of them."""

    weight: float
    value: Tensor


class Defense:
    """Base of all defenses: parameters are fields, hooks are methods, and `off` holds the parameters at which it does nothing at all."""

    name: ClassVar[str]
    off: ClassVar[Mapping[str, Any]]

    def replaces(self) -> frozenset[Part]:
        """What this defense takes over from plain training; two defenses must not replace the same part."""
        return frozenset()

    def taps(self, target: Target) -> tuple[str, ...]:
        """Names of the layers whose outputs `losses` wants to see."""
        return ()

    def prepare(self, target: Target, *, seed: int) -> Target:
        """Change the freshly built network before training (and again, the same way, before loading its weights)."""
        return target

    def losses(self, batch: Batch) -> dict[str, Term]:
        """Named terms to add to the objective."""
        return {}

    def settled(self, moment: Moment) -> bool:
        """Whether the defense is at full strength; only epochs at which all are settled may be selected as the result."""
        return True
