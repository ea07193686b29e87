"""Distance to the nearest private picture of the attacked person."""

import torch
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, metrics, nearest, outputs


@metrics.register
@parameters
class Distance:
    """How near is a reconstruction to a real picture of the person? Column `distance`: L2 to the nearest private training picture of the
    attacked class among the first evaluator's penultimate features; `distance_squared` is what PPA and the KNN-distance code report.
    """

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        private = evidence.split.train
        _, known = outputs(evidence.evaluators[0], private)
        _, rebuilt = evidence.evaluator_outputs[0]
        labels = evidence.found.labels.repeat_interleave(evidence.found.images.shape[1])
        distance = torch.empty(len(labels))
        for label in labels.unique().tolist():
            distance[labels == label] = nearest(
                rebuilt[labels == label], known[private.labels == label]
            )
        return {
            "distance": evidence.table(distance),
            "distance_squared": evidence.table(distance**2),
        }
