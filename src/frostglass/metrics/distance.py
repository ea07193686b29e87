"""Distance to the nearest private image of the attacked person."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.evaluators.verifier import NO_FACE, Verifier
from frostglass.metrics._neighbours import nearest
from frostglass.metrics.base import Evidence, Metric, metrics
from frostglass.networks.embedding import embed


@metrics.register
@parameters
class Distance(Metric):
    """How close is a reconstruction to a real image of the person?

    Column `distance` = min over x of ‖f(x̂) - f(x)‖₂, over the private training images x of the
    attacked person, with f the first evaluator's penultimate features: the KNN distance, or δ_eval.
    Column `distance_squared`: its square, which PPA and the KNN-distance code report.

    If an embedder is among the evaluators: columns `face_distance` and `face_distance_squared`,
    the same among the embeddings of the first one, which have length 1: δ_face. It never saw the
    private people. An image in which it finds no face has the largest distance, 2.

    Use: to compare with papers that report KNN or feature distances.
    Paper: Zhang et al., GMI, CVPR 2020, arXiv 1911.07135 (KNN distance); Struppek et al., Plug &
    Play Attacks, ICML 2022, arXiv 2201.12179 (δ_eval, δ_face).

    Differs: CALoR's text calls δ an ℓ2 distance, and the code behind it squares. δ_face of the
    papers is FaceNet's; ours is of whatever embedder is given.
    """

    title: ClassVar[str] = "KNN distance"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        features, distance = evidence.features, torch.empty(len(evidence.labels))
        for _, mine, own in evidence.by_person():
            distance[mine] = nearest(features[mine], evidence.private_features[own])
        table = evidence.table(distance)
        columns = {"distance": table, "distance_squared": table**2}
        for evaluator, verifier in zip(evidence.evaluators, evidence.enrolled, strict=True):
            if not evaluator.classes:
                squared = evidence.table(_face_distance(evidence, evaluator, verifier))
                faces = {"face_distance": squared.sqrt(), "face_distance_squared": squared}
                return columns | faces
        return columns


def _face_distance(evidence: Evidence, embedder: Target, verifier: Verifier) -> Tensor:
    """Return the squared distance to the nearest enrolled image of the person, 2 - 2 cos."""
    embeddings = embed(embedder, evidence.images, verifier.centre).cpu()
    cosine = torch.empty(len(embeddings))
    for place, mine, _ in evidence.by_person():
        label = evidence.reconstructions.labels[place]
        own = verifier.references[verifier.labels == label]
        cosine[mine] = (embeddings[mine] @ own.T).amax(1)
    if embedder.info.get("detects"):
        cosine = cosine.nan_to_num(nan=NO_FACE)
    return (2 - 2 * cosine).clamp(min=0)
