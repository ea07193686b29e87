"""How far apart two sets of pictures are as a whole: the Fréchet distance of their features (FID, where those are an Inception network's)."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError


def frechet_distance(some: Tensor, others: Tensor) -> float:
    """‖m₁ - m₂‖² + Tr(C₁ + C₂ - 2(C₁C₂)^½) of the means and covariances of features (N, F) and (M, F).

    Tr (C₁C₂)^½ is the sum of the roots of the eigenvalues of C₁^½ C₂ C₁^½, which is symmetric; all in double precision.

    Paper: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017, arXiv 1706.08500.
    """
    if (
        some.ndim != 2
        or others.ndim != 2
        or some.shape[1] != others.shape[1]
        or min(len(some), len(others)) < 2
    ):
        raise DataError(
            f"expected features (N, F) and (M, F) of at least 2 pictures each, got {tuple(some.shape)} and {tuple(others.shape)}"
        )
    some, others = some.double(), others.double()
    first, second = (
        some.T.cov().reshape(some.shape[1], -1),
        others.T.cov().reshape(some.shape[1], -1),
    )
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return (
        (some.mean(0) - others.mean(0)).square().sum() + first.trace() + second.trace() - 2 * shared
    ).item()
