"""Distance to the centre of the attacked person's private images."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, Metric, metrics


@metrics.register
@parameters
class Centroid(Metric):
    """How close is a reconstruction to the mean of the person's private images?

    Column `centroid` = ‖f(x̂) - mean of f(x)‖₂ over the private training images x of the attacked
    person, with f the first evaluator's penultimate features. Column `centroid_squared`: its
    square. It is below the distance to the nearest image (`distance`) for reconstructions that are
    blurred towards the person's mean.

    Use: to compare with papers that report the distance to the mean feature.
    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135, "feature distance"
    (Feat Dist); BiDO and KED-MI report it too.
    """

    title: ClassVar[str] = "Distance to the class centre"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        centres = [
            evidence.private_features[own].double().mean(0) for _, _, own in evidence.by_person()
        ]
        features = evidence.table(evidence.features.double())
        table = (features - torch.stack(centres)[:, None]).norm(dim=2)
        return {"centroid": table, "centroid_squared": table**2}
