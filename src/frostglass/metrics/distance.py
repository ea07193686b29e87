"""Distance to the nearest private image of the attacked person."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, Metric, metrics, nearest, outputs


@metrics.register
@parameters
class Distance(Metric):
    """How close is a reconstruction to a real image of the person?

    Column `distance`: L2 to the nearest private training image of the attacked class among the
    first evaluator's penultimate features. Column `distance_squared`: its square, which PPA and
    the KNN-distance code report.
    """

    title: ClassVar[str] = "KNN distance"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        private, labels = evidence.split.train, evidence.labels
        _, features = evidence.evaluator_outputs[0]
        distance = torch.empty(len(labels))
        for label in labels.unique().tolist():
            own = labels == label
            # Person by person: the features of all private images may be more than memory holds.
            of_person = private.at((private.labels == label).nonzero().flatten())
            _, known = outputs(evidence.evaluators[0], of_person)
            distance[own] = nearest(features[own], known)
        table = evidence.table(distance)
        return {"distance": table, "distance_squared": table**2}
