"""The Fréchet distance between two sets of features (FID, if they are an Inception network's)."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return ‖m₁ - m₂‖² + Tr(C₁ + C₂ - 2(C₁C₂)^½) of means and covariances of features.

    Features are (N, F) and (M, F). Tr (C₁C₂)^½ is the sum of the roots of the eigenvalues of
    C₁^½ C₂ C₁^½, which is symmetric. All is computed in double precision.

    Paper: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017,
    arXiv 1706.08500.
    """
    if (
        first.ndim != 2
        or second.ndim != 2
        or first.shape[1] != second.shape[1]
        or min(len(first), len(second)) < 2
    ):
        raise DataError(
            "expected features (N, F) and (M, F) of at least 2 images each, got "
            f"{tuple(first.shape)} and {tuple(second.shape)}"
        )
    first, second = first.double(), second.double()
    cov1, cov2 = (features.T.cov().reshape(first.shape[1], -1) for features in (first, second))
    values, vectors = torch.linalg.eigh(cov1)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    shift = (first.mean(0) - second.mean(0)).square().sum()
    return (shift + cov1.trace() + cov2.trace() - 2 * shared).item()
