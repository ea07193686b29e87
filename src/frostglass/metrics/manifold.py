"""Distance to real images of other people: is a reconstruction still a realistic image?"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.metrics._neighbours import nearest
from frostglass.metrics.base import Evidence, Metric, metrics, outputs


@metrics.register
@parameters
class Manifold(Metric):
    """Is a reconstruction still a face?

    Column `manifold`: L2 to the nearest public image among the first evaluator's features. Compare
    it with the same column of the prior-only baseline: far above it, the attack has left the
    distribution of real images, and an evaluator's answer means little.

    Use: in every audit: evaluators may be fooled by images that are no faces.

    Args:
        images: how many public images to compare with, spread evenly over the set.
    """

    title: ClassVar[str] = "Distance to real images"

    images: Annotated[int, Field(ge=1)] = 2000

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        public = evidence.split.public
        spread = torch.linspace(0, len(public) - 1, min(self.images, len(public))).long()
        _, known = outputs(evidence.evaluators[0], public.at(spread))
        return {"manifold": evidence.table(nearest(evidence.evaluator_outputs[0][1], known))}
