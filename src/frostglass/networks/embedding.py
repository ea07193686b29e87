"""Embeddings of people: directions of the penultimate features of a face recogniser."""

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.pixels import ByteImages, per_image
from frostglass.core.types import Images, Target
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

CENTRE = 1000  # public images whose mean feature is the origin


def public_centre(embedder: Target, public: Images) -> Tensor:
    """Return the mean feature (F,) of public images, spread evenly over the set.

    Without centring all features point in much the same direction. Images in which an embedder
    finds no face (NaN) do not count.
    """
    chosen = torch.linspace(0, len(public) - 1, min(CENTRE, len(public))).long()
    shape = public.shape
    features = per_image(lambda rows: _features(embedder, public.floats(rows)), chosen, shape)
    return features.nanmean(0)


def embed(embedder: Target, images: Tensor | ByteImages, centre: Tensor) -> Tensor:
    """Return embeddings (N, F) of length 1 relative to `centre`.

    The cosine of two embeddings says how likely two images show the same person.
    """
    index, shape = torch.arange(len(images)), images.shape[1:]
    features = per_image(lambda rows: _features(embedder, images[rows]), index, shape)
    return F.normalize(features - centre.to(features.device), dim=1)


def _features(embedder: Target, images: Tensor) -> Tensor:
    with frozen(embedder.module), torch.no_grad():
        return embedder.outputs(images.to(device_of(embedder.module)))[1]
