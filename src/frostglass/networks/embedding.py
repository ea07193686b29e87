"""What makes two pictures the same person: directions in the penultimate features of a network that tells people apart."""

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.types import Images, Target
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

CENTRE = 1000  # public pictures whose mean feature is the origin
CHUNK = 128


def public_centre(embedder: Target, public: Images) -> Tensor:
    """The mean feature (F,) of public pictures, spread evenly over the set: without it all features point much the same way."""
    chosen = torch.linspace(0, len(public) - 1, min(CENTRE, len(public))).long()
    return torch.cat(
        [_features(embedder, public.floats(index)) for index in chosen.split(CHUNK)]
    ).mean(0)


def embed(embedder: Target, images: Tensor, centre: Tensor) -> Tensor:
    """Embeddings (N, F) of length 1, seen from `centre`; the cosine of two says how much two pictures show one person."""
    return F.normalize(
        torch.cat([_features(embedder, part) for part in images.split(CHUNK)]) - centre, dim=1
    )


def _features(embedder: Target, images: Tensor) -> Tensor:
    with frozen(embedder.module), torch.no_grad():
        return embedder.outputs(images.to(device_of(embedder.module)))[1]
