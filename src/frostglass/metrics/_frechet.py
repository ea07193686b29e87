"""The Fréchet distance between two sets of features (FID, if they are an Inception network's)."""

import torch
from torch import Tensor

from frostglass.metrics._features import check_features

CHUNK = 4096  # rows that are converted to double precision together
PANEL = 256  # rows of a covariance that are computed together, from its diagonal on


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return ‖m₁ - m₂‖² + Tr(C₁ + C₂ - 2(C₁C₂)^½) of means and covariances of features.

    Features are (N, F) and (M, F). Tr (C₁C₂)^½ is the sum of the roots of the eigenvalues of
    R C₂ Rᵀ, which is symmetric, for any R with RᵀR = C₁. All is computed in double precision, and
    memory grows with F², not with a copy of the features.

    With fewer images than features, a covariance is singular; the formula still holds, and its
    value is the distance of the two samples' Gaussians on the subspace they span. It is too large
    for what the samples stand for, the more so the fewer they are: compare only values of equally
    many images.

    Paper: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017,
    arXiv 1706.08500.
    """
    check_features(first, second, least=2)
    (mean1, cov1), (mean2, cov2) = _moments(first), _moments(second)
    root = _root(cov1)
    product = root @ cov2 @ root.T
    shared = torch.linalg.eigvalsh(product).clamp(min=0).sqrt().sum()
    shift = (mean1 - mean2).square().sum()
    return (shift + cov1.trace() + cov2.trace() - 2 * shared).item()


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance (N - 1) in double precision."""
    mean = features.mean(0, dtype=torch.double)
    scatter = torch.zeros(len(mean), len(mean), dtype=torch.double, device=features.device)
    for part in features.split(CHUNK):
        centred = part.double() - mean
        for first in range(0, len(mean), PANEL):  # only above the diagonal: half of the work
            panel = slice(first, first + PANEL)
            scatter[panel, first:].addmm_(centred[:, panel].T, centred[:, first:])
    return mean, (scatter.triu() + scatter.triu(1).T) / (len(features) - 1)


def _root(covariance: Tensor) -> Tensor:
    """Return R with RᵀR = C: by Cholesky, or if C is singular, by its eigenvectors."""
    factor, failed = torch.linalg.cholesky_ex(covariance, upper=True)
    if not int(failed):
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return values.clamp(min=0).sqrt()[:, None] * vectors.T
