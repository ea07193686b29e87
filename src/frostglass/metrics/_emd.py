"""The exact earth mover's distance between two sets of images."""

import math

import torch
from torch import Tensor

from frostglass.core.errors import DataError, RunError

MAX_PAIRS = 5000  # pairs; matching so many takes ten seconds and 400 MB


def emd(first: Tensor, second: Tensor) -> float:
    """Return W₁ of two sets: the least mean L2 distance over all pairings of their samples.

    Samples are images (N, ...) or embeddings (N, F) and are flattened. Sets of N and M samples are
    repeated to their least common multiple, which must be at most 5000; this does not change the
    distributions. Matrix products find the pairs but are inaccurate near zero, so the distances of
    the pairs are recomputed.
    """
    if min(len(first), len(second)) < 1 or first.shape[1:] != second.shape[1:]:
        raise DataError(
            f"expected two sets of one shape, got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    size = math.lcm(len(first), len(second))
    if size > MAX_PAIRS:
        raise DataError(
            f"expected at most {MAX_PAIRS} pairs, got {size} for sets of {len(first)} and "
            f"{len(second)}. Use fewer samples, and equally many in both sets."
        )
    first, second = (samples.flatten(1).double().cpu() for samples in (first, second))
    if not (first.isfinite().all() and second.isfinite().all()):
        raise RunError("images or embeddings are not finite: their distance is undefined")
    from scipy.optimize import linear_sum_assignment  # slow to import

    rows, columns = (torch.arange(size) % len(samples) for samples in (first, second))
    cost = torch.cdist(first, second)[rows][:, columns]
    if cost.is_meta:  # a dry run has no values to match
        return cost.mean().item()
    left, right = (torch.from_numpy(index) for index in linear_sum_assignment(cost.numpy()))
    return (first[rows[left]] - second[columns[right]]).norm(dim=1).mean().item()


def pii_terms(
    reconstructions: Tensor, originals: Tensor, draws: Tensor, other_draws: Tensor
) -> dict[str, float]:
    """Return the computable terms of Crafter's privacy index (ε-PII), as earth mover's distances.

    All four sets hold equally many images or embeddings.

    `reconstructions` is the index: their distance to draws of the prior. A small value means that
    they look like anyone. `floor` is the distance of draws to other draws, which is not 0 for
    finite samples and falls as they grow: the index is small if it is close to `floor`. `originals`
    is the distance of true images to draws, which a perfect attack would reach. `error` is that of
    reconstructions to true images. `bound`, `originals` minus the index but at least 0, is what
    `error` cannot fall below, by the triangle inequality.

    The index ignores whom an image shows: if `originals` is itself close to `floor` (a good
    prior), a perfect attack looks as private as none. Images blurred towards the mean come out
    below `floor`, because they are closer to every draw than draws are to each other.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
    Deep Models, NDSS 2024, arXiv 2401.07205.

    Differs: The paper estimates this distance with a critic while it protects. Ours is exact for
    the samples, and only for them. It does not cover the distance between the distributions behind
    the samples, or the reconstructions of attacks that were not run, the best attacker's included.
    The bound is the triangle inequality of W₁.
    """
    sizes = [len(samples) for samples in (reconstructions, originals, draws, other_draws)]
    if len(set(sizes)) > 1:
        raise DataError(
            "expected as many reconstructions, originals, draws and other draws, because distances "
            f"depend on the number, got {', '.join(map(str, sizes))}"
        )
    index, reach = emd(reconstructions, draws), emd(originals, draws)
    return {
        "reconstructions": index,
        "floor": emd(draws, other_draws),
        "originals": reach,
        "error": emd(reconstructions, originals),
        "bound": max(0.0, reach - index),
    }
