"""How much two pictures show the same person, to a network that tells people apart."""

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.metrics.base import CHUNK, Evidence, metrics
from frostglass.networks.embedding import embed, public_centre


@metrics.register
@parameters
class Face:
    """Is it still the same face? Column `face_similarity`: the cosine between the embeddings of the rebuilt 8-bit picture and of the true one.

    An embedding is the direction of the embedder's penultimate feature, seen from the mean of public pictures. The number alone says little: read it between
    the mean cosine of two photos of different people and that of two photos of one person, which `reference_similarities` gives for the same embedder.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations, AAAI 2020, arXiv 1911.10143.

    Differs: The paper's embedder is OpenFace, and it does not say that features are centred; ours is whatever network is given, so the paper's figures (0.551 without a
    defense, 0.515 with it) are on another scale.
    """

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        if evidence.embedder is None:
            raise ConfigError(
                "face needs a network that tells people apart, and none is given: pass embedder=..."
            )
        victims = evidence.true_pictures
        centre = public_centre(evidence.embedder, evidence.split.public)
        true = embed(evidence.embedder, victims.flatten(0, 1), centre).unflatten(
            0, victims.shape[:2]
        )
        rebuilt = embed(evidence.embedder, evidence.pictures, centre)
        return {
            "face_similarity": evidence.table((rebuilt * evidence.handed_on(true)).sum(1).cpu())
        }


def feature_similarity(latents: Tensor, embeddings: Tensor) -> Tensor:
    """Cosine (I, K) between guessed embeddings (I, K, F), as the `mapper` attack leaves them in `latents`, and those of the true pictures, (I, P, F).

    Of a person's K guesses the first K / P belong to the first picture, and so on. The latents of other attacks are no embeddings, and nothing tells by
    their shape: only call this for those that are.

    Paper: Xiao et al., AAAI 2020, arXiv 1911.10143, "feature similarity" (0.835 without a defense, 0.574 with it, on its own embedder).
    """
    people, guesses, size = latents.shape if latents.ndim == 3 else (0, 0, 0)
    if (
        not people
        or embeddings.ndim != 3
        or (len(embeddings), embeddings.shape[2]) != (people, size)
        or guesses % embeddings.shape[1]
    ):
        raise DataError(
            f"expected guesses (I, K, F) and embeddings (I, P, F) with K a multiple of P, got {tuple(latents.shape)} and {tuple(embeddings.shape)}: "
            "only the latents of an attack that guesses embeddings can be compared"
        )
    return F.cosine_similarity(
        latents, embeddings.repeat_interleave(guesses // embeddings.shape[1], 1), dim=2
    )


def reference_similarities(embedder: Target, images: Images, public: Images) -> dict[str, float]:
    """The scale on which to read a face similarity: mean cosine of two photos of one person, and of photos of two people.

    `same_person` is the mean over people with at least two photos of the mean over their pairs, `different_people` the mean over pairs of people of the mean over
    pairs of their photos, so that everybody counts alike; `people` are in the second, `with_several` in the first. Computed from sums: Σᵢ≠ⱼ eᵢ·eⱼ = ‖Σ e‖² - Σ‖e‖².
    """
    if not len(images) or int(images.labels.min()) < 0:
        raise DataError(
            f"expected pictures whose people are known, got {int((images.labels < 0).sum())} of {len(images)} of nobody in particular"
        )
    centre = public_centre(embedder, public)
    found = torch.cat(
        [
            embed(embedder, images.floats(index), centre).cpu()
            for index in torch.arange(len(images)).split(CHUNK)
        ]
    ).double()
    _, people = images.labels.unique(return_inverse=True)
    count = people.bincount().double()
    several = count > 1
    if len(count) < 2 or not several.any():
        raise DataError(
            f"{len(images)} pictures of {len(count)} people have no two photos of one person and of two people: give at least two people, one of them with two photos"
        )
    total = torch.zeros(len(count), found.shape[1], dtype=torch.double).index_add_(0, people, found)
    lengths = torch.zeros(len(count), dtype=torch.double).index_add_(
        0, people, found.square().sum(1)
    )
    same = ((total.square().sum(1) - lengths) / (count * (count - 1)))[several].mean()
    means = total / count[:, None]
    different = (means.sum(0).square().sum() - means.square().sum()) / (
        len(count) * (len(count) - 1)
    )
    return {
        "same_person": same.item(),
        "different_people": different.item(),
        "people": len(count),
        "with_several": int(several.sum()),
    }
