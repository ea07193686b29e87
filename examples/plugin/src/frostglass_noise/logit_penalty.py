"""A defense from outside: keep logits small, so that confidence tells an attacker less."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from frostglass import Defense, parameters
from frostglass.defenses.base import Batch, Term


@parameters
class LogitPenalty(Defense):
    """Logit penalty: add the mean squared logit to the loss.

    L = CE + λ · mean(l²).

    Args:
        weight: λ; 0 disables the defense.
    """

    weight: Annotated[float, Field(ge=0)] = 0.01

    title: ClassVar[str] = "Logit penalty"
    disabled: ClassVar[Mapping[str, Any]] = {"weight": 0.0}

    def losses(self, batch: Batch) -> dict[str, Term]:
        if not self.weight:
            return {}
        return {"logit_penalty": Term(self.weight, batch.logits.square().mean())}
