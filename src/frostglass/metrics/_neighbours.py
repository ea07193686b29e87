"""Nearest neighbours among many features, and the measures that are built on them."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.metrics._features import check_features

CHUNK = 1024  # queries compared together
REFERENCES = 8192  # references compared together: a block of distances stays in the cache


def nearest(queries: Tensor, references: Tensor) -> Tensor:
    """Return the Euclidean distance from each query (Q, F) to its nearest reference (R, F).

    The nearest minimises ‖r‖²/2 - q·r, which needs one matrix product and no root. Products are
    inaccurate near zero, so the distance of the nearest is recomputed. Memory grows with the
    inputs, never with Q · R.
    """
    check_features(queries, references)
    centre = references.mean(0)  # large common parts would cost digits
    blocks = [block - centre for block in references.split(REFERENCES)]
    halves = [block.square().sum(1) / 2 for block in blocks]
    distances = []
    for part in queries.split(CHUNK):
        moved = part - centre
        best = part.new_full((len(part),), torch.inf)
        index = torch.zeros(len(part), dtype=torch.long, device=part.device)
        for number, (block, half) in enumerate(zip(blocks, halves, strict=True)):
            values, places = torch.addmm(half, moved, block.T, alpha=-1).min(1)
            closer = values < best
            best = torch.where(closer, values, best)
            index = torch.where(closer, places + number * REFERENCES, index)
        distances.append((part - references[index]).norm(dim=1))
    return torch.cat(distances)


def radii(features: Tensor, neighbours: int) -> Tensor:
    """Return the distance of each feature (N, F) to its `neighbours`-th nearest other one."""
    if len(features) <= neighbours:
        raise DataError(
            f"expected more than {neighbours} features for {neighbours} neighbours, got "
            f"{len(features)}"
        )
    kept = [
        _exact(part, features).topk(neighbours + 1, largest=False).values[:, -1]
        for part in features.split(CHUNK)
    ]
    return torch.cat(kept)


def prdc(real: Tensor, fake: Tensor, neighbours: int) -> dict[str, Tensor]:
    """Return improved precision and recall, density and coverage of features (R, F) and (N, F).

    With B(a) the ball around a that reaches its k-th nearest neighbour in its own set:
    precision (N,) is 1 if a fake lies in any B(real); density (N,) the number of B(real) it lies
    in, divided by k; recall (R,) is 1 if a real one lies in any B(fake); coverage (R,) is 1 if
    B(real) holds any fake. Their means are the four measures.

    Paper: Kynkäänniemi et al., Improved Precision and Recall Metric for Assessing Generative
    Models, NeurIPS 2019, arXiv 1904.06991; Naeem et al., Reliable Fidelity and Diversity Metrics
    for Generative Models, ICML 2020, arXiv 2002.09797.
    """
    check_features(fake, real)
    real_radii, fake_radii = radii(real, neighbours), radii(fake, neighbours)
    inside, reached, recalled = [], torch.zeros(len(real)), torch.zeros(len(real))
    for part, own in zip(fake.split(CHUNK), fake_radii.split(CHUNK), strict=True):
        distance = _exact(part, real)
        within = distance <= real_radii
        inside.append(within.sum(1))
        reached += within.sum(0).cpu()
        recalled += (distance <= own[:, None]).sum(0).cpu()
    count = torch.cat(inside).cpu()
    return {
        "precision": (count > 0).float(),
        "recall": (recalled > 0).float(),
        "density": count / neighbours,
        "coverage": (reached > 0).float(),
    }


def _exact(first: Tensor, second: Tensor) -> Tensor:
    """Return all distances in double precision: a copy must be at distance 0."""
    first, second = first.double(), second.double()
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
