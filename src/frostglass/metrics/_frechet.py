"""The Fréchet distance between two sets of features (FID, if they are an Inception network's)."""

import torch
from torch import Tensor

from frostglass.metrics._features import check_features

CHUNK = 4096  # rows that are converted to double precision together
PANEL = 256  # rows of a covariance that are computed together, from its diagonal on


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return ‖m₁ - m₂‖² + Tr(C₁ + C₂ - 2(C₁C₂)^½) of means and covariances of features.

    Features are (N, F) and (M, F). Tr (C₁C₂)^½ is the sum of the roots of the eigenvalues of
    R C₂ Rᵀ, which is symmetric, for any R with RᵀR = C₁. Of few images, it is the sum of the
    singular values of X₁X₂ᵀ / √((N - 1)(M - 1)), with centred features X, and no covariance is
    needed. All is computed in double precision, and memory grows with F², not with a copy of the
    features.

    With fewer images than features, a covariance is singular; the formula still holds, and its
    value is the distance of the two samples' Gaussians on the subspace they span. It is too large
    for what the samples stand for, the more so the fewer they are: compare only values of equally
    many images.

    Paper: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017,
    arXiv 1706.08500.
    """
    check_features(first, second, least=2)
    of_sets = _of_few if max(len(first), len(second)) <= first.shape[1] else _of_many
    return of_sets(first, second)


def _of_many(first: Tensor, second: Tensor) -> float:
    """Return the distance by F × F covariances."""
    (mean1, cov1), (mean2, cov2) = _moments(first), _moments(second)
    root = _root(cov1)
    shared = torch.linalg.eigvalsh(root @ cov2 @ root.T).clamp(min=0).sqrt().sum()
    shift = (mean1 - mean2).square().sum()
    return (shift + cov1.trace() + cov2.trace() - 2 * shared).item()


def _of_few(first: Tensor, second: Tensor) -> float:
    """Return the distance by the N × M products of features."""
    means = [features.mean(0, dtype=torch.double) for features in (first, second)]
    one, two = (
        (features - mean) / (len(features) - 1) ** 0.5
        for features, mean in zip((first, second), means, strict=True)
    )
    shared = torch.linalg.svdvals(one @ two.T).sum()
    shift = (means[0] - means[1]).square().sum()
    return (shift + one.square().sum() + two.square().sum() - 2 * shared).item()


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
