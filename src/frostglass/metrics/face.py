"""How similar two faces are to a network that distinguishes people."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.pixels import per_image
from frostglass.core.types import Images, Target
from frostglass.metrics.base import Evidence, Metric, metrics
from frostglass.networks.embedding import embed, public_centre


@metrics.register
@parameters
class Face(Metric):
    """Is it still the same face?

    Column `face_similarity`: the cosine between the embedding of the 8-bit reconstruction and its
    reference. In a feature audit the reference is the true image that was attacked. In a model
    audit there is no single true image: the column is the mean cosine to the person's private
    training images.

    Column `similarity`: the same, except for attacks that reconstruct embeddings. For those it is
    the cosine between the reconstructed embedding itself and the true one.

    An embedding is the direction of the embedder's penultimate feature relative to the mean of
    public images. Read the value between the mean cosine of two photos of different people and
    that of two photos of one person: `reference_similarities` computes both.

    Use: how alike the faces are, where yes or no says too little; required on features.
    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented
    Representations, AAAI 2020, arXiv 1911.10143.

    Differs: The paper's embedder is OpenFace, and it does not say that features are centred. Ours
    is whatever network is given, so the paper's figures (0.551 without a defense, 0.515 with it)
    are on another scale.
    """

    title: ClassVar[str] = "Face similarity"

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"embedder"})

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        embedder = evidence.embedder
        if embedder is None:
            raise ConfigError(
                "face needs a network that distinguishes people, got none: pass embedder=..."
            )
        centre = public_centre(embedder, evidence.split.public)
        references = _references(evidence, embedder, centre)
        embeddings = embed(embedder, evidence.images, centre)
        similarity = (embeddings * evidence.per_candidate(references)).sum(1).cpu()
        columns = dict.fromkeys(("face_similarity", "similarity"), evidence.table(similarity))
        if evidence.embeds:
            latents = evidence.reconstructions.latents
            columns["similarity"] = feature_similarity(latents, references.cpu())
        return columns


def _references(evidence: Evidence, embedder: Target, centre: Tensor) -> Tensor:
    """Embeddings of each person's true images (I, P, F), or (I, 1, F) means of training images.

    The product with a mean of unit vectors is the mean cosine to them.
    """
    images, train = evidence.victims, evidence.split.train
    if images is not None:
        return embed(embedder, images.flatten(0, 1), centre).unflatten(0, images.shape[:2])
    means = [
        embed(embedder, train.floats(train.labels == label), centre).mean(0, keepdim=True)
        for label in evidence.reconstructions.labels.tolist()
    ]
    return torch.stack(means)


def feature_similarity(latents: Tensor, embeddings: Tensor) -> Tensor:
    """Return cosines (I, K) of reconstructed embeddings (I, K, F) and true ones (I, P, F).

    The `mapper` attack leaves embeddings in `latents`. Of a person's K candidates the first K / P
    belong to the first image, and so on. Latents of other attacks are no embeddings, which their
    shape does not show: call this only for attacks that embed.

    Paper: Xiao et al., AAAI 2020, arXiv 1911.10143, "feature similarity" (0.835 without a defense,
    0.574 with it, on its own embedder).
    """
    people, candidates, size = latents.shape if latents.ndim == 3 else (0, 0, 0)
    if (
        not people
        or embeddings.ndim != 3
        or (len(embeddings), embeddings.shape[2]) != (people, size)
        or candidates % embeddings.shape[1]
    ):
        raise DataError(
            "expected latents (I, K, F) and embeddings (I, P, F) with K a multiple of P, got "
            f"{tuple(latents.shape)} and {tuple(embeddings.shape)}: only the latents of an attack "
            "that reconstructs embeddings can be compared"
        )
    repeated = embeddings.repeat_interleave(candidates // embeddings.shape[1], 1)
    return F.cosine_similarity(latents, repeated, dim=2)


def reference_similarities(embedder: Target, images: Images, public: Images) -> dict[str, float]:
    """Return the scale of face similarities: mean cosines within one person and between people.

    `same_person` is the mean over people with at least two photos of the mean over their pairs.
    `different_people` is the mean over pairs of people of the mean over pairs of their photos, so
    that all people have the same weight. `people` counts those in the second mean, `with_several`
    those in the first. Computed from sums: Σᵢ≠ⱼ eᵢ·eⱼ = ‖Σ e‖² - Σ‖e‖².
    """
    unknown = int((images.labels < 0).sum())
    if not len(images) or unknown:
        raise DataError(
            f"expected images of known people, got {len(images)} images, {unknown} without a label"
        )
    centre = public_centre(embedder, public)
    index = torch.arange(len(images))
    embeddings = per_image(
        lambda rows: embed(embedder, images.floats(rows), centre).cpu(), index, images.shape
    ).double()
    _, people = images.labels.unique(return_inverse=True)
    count = people.bincount().double()
    several = count > 1
    if len(count) < 2 or not several.any():
        raise DataError(
            "expected at least 2 people, and 2 photos of one of them, got "
            f"{len(images)} images of {len(count)} people. Add images."
        )
    size = embeddings.shape[1]
    total = torch.zeros(len(count), size, dtype=torch.double).index_add_(0, people, embeddings)
    squares = embeddings.square().sum(1)
    squares = torch.zeros(len(count), dtype=torch.double).index_add_(0, people, squares)
    same = ((total.square().sum(1) - squares) / (count * (count - 1)))[several].mean()
    means = total / count[:, None]
    pairs = len(count) * (len(count) - 1)
    different = (means.sum(0).square().sum() - means.square().sum()) / pairs
    return {
        "same_person": same.item(),
        "different_people": different.item(),
        "people": len(count),
        "with_several": int(several.sum()),
    }
