"""Whether two images show the same person, by an embedder that was trained on public people."""

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.views import batch_invariant
from frostglass.networks.embedding import public_centre


class Likeness:
    """Embeddings of length 1 relative to the mean of public images; cosines compare people.

    The target's own features would not do: it is trained to bring the people of one class together.
    """

    def __init__(self, assets: Assets):
        if assets.embedder is None:
            raise ConfigError("an embedder is needed, got none: pass Assets(embedder=...)")
        self.embedder = assets.embedder
        self.centre = public_centre(assets.embedder, assets.require_public())

    def embed(self, images: Tensor) -> Tensor:
        """Return embeddings (N, F), differentiable with respect to the images."""
        return F.normalize(self.embedder.outputs(images)[1] - self.centre, dim=1)

    def embed_rows(self, images: Tensor) -> Tensor:
        """Return embeddings without gradients; an image's depends on no other image."""
        return batch_invariant(self.embed, images)


def people_among(cosines: Tensor, least: float) -> Tensor:
    """Group images into people by average linkage; return the number of each one's person (N,).

    Two groups are joined while the mean of their cosines (N, N) is at least `least`.
    """
    if len(cosines) < 2:
        return torch.zeros(len(cosines), dtype=torch.long)
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import

    above = torch.triu_indices(len(cosines), len(cosines), 1)
    distances = (1 - cosines.double().cpu())[above[0], above[1]].clamp(min=0)
    tree = linkage(distances.numpy(), "average")
    return torch.from_numpy(fcluster(tree, 1 - least, "distance")).long() - 1
