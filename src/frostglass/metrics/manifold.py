"""Distance to real pictures of other people: does a reconstruction still look like a picture of anybody?"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, metrics, nearest, outputs


@metrics.register
@parameters
class Manifold:
    """Is a reconstruction still a face? Column `manifold`: L2 to the nearest public picture among the first evaluator's features.

    Compare it with the same column of prior-only draws: far above it, the attack has left the world of real pictures and an evaluator's
    verdict on it means little.

    Args:
        pictures: how many public pictures to compare with, spread evenly over the set.
    """

    pictures: Annotated[int, Field(ge=1)] = 2000

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        public = evidence.split.public
        spread = torch.linspace(0, len(public) - 1, min(self.pictures, len(public))).long()
        _, known = outputs(evidence.evaluators[0], public.floats(spread))
        return {"manifold": evidence.table(nearest(evidence.evaluator_outputs[0][1], known))}
