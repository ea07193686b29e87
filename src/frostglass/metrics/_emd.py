"""How far one set of pictures is from another as a whole: the earth mover's distance, exactly."""

import math

import torch
from torch import Tensor

from frostglass.core.errors import DataError, RunError

LARGEST = 5000  # pairs; to match so many takes ten seconds and 400 MB


def emd(some: Tensor, others: Tensor) -> float:
    """The least mean L2 distance over all ways to pair two sets of pictures (N, ...) or embeddings (N, F), each flattened: W₁ of the two samples.

    Sets of N and M are repeated to their least common multiple, which changes nothing of what they are samples of, if that is at most 5000. The pairs are found from
    distances by matrix products, which are coarse near zero, so the distances of the pairs are computed again.
    """
    if min(len(some), len(others)) < 1 or some.shape[1:] != others.shape[1:]:
        raise DataError(
            f"expected two sets of one shape, got {tuple(some.shape)} and {tuple(others.shape)}"
        )
    size = math.lcm(len(some), len(others))
    if size > LARGEST:
        raise DataError(
            f"sets of {len(some)} and {len(others)} need {size} pairs, and at most {LARGEST} are matched: take fewer, and as many of the one as of the other"
        )
    one, other = (tensor.flatten(1).double().cpu() for tensor in (some, others))
    if not (one.isfinite().all() and other.isfinite().all()):
        raise RunError("some of the pictures or embeddings are not finite: no distance can be told")
    from scipy.optimize import linear_sum_assignment  # imported here: it takes a second

    rows, columns = (torch.arange(size) % len(tensor) for tensor in (one, other))
    cost = torch.cdist(one, other)[rows][:, columns]
    first, second = (torch.from_numpy(index) for index in linear_sum_assignment(cost.numpy()))
    return (one[rows[first]] - other[columns[second]]).norm(dim=1).mean().item()


def pii_terms(
    rebuilt: Tensor, originals: Tensor, draws: Tensor, other_draws: Tensor
) -> dict[str, float]:
    """Of Crafter's privacy index (ε-PII) what can be computed: earth mover's distances between four sets of as many pictures or embeddings each.

    `rebuilt`: reconstructions to draws of the prior, which is the index; the smaller, the more they look like anybody. `floor`: draws to other draws, which is not 0 for
    samples, and falls as they grow; `rebuilt` is small if it is near this. `originals`: true pictures to draws, which is what a perfect attack gets. The
    index does not ask whose a picture is: where `originals` is itself near `floor` (a good prior), a perfect attack looks as private as none. And
    pictures that are blurred towards the mean of all come out below `floor`, because they are nearer to every draw than draws are to each other.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on Deep Models, NDSS 2024, arXiv 2401.07205.

    Differs: The paper estimates this distance by a critic, while it protects; ours is exact for the samples, and for them alone. What cannot be computed, and
    is not claimed: the distance between the distributions behind the samples, the reconstructions of attacks that were not run (the best attacker's
    included), and any bound on an attacker's success that the paper's main text may draw from ε; ours follows its appendix and code.
    """
    sets = {"rebuilt": rebuilt, "originals": originals, "draws": draws, "other_draws": other_draws}
    if len({len(tensor) for tensor in sets.values()}) > 1:
        told = ", ".join(f"{len(tensor)} {name}" for name, tensor in sets.items())
        raise DataError(
            f"expected as many of each, because distances of samples depend on their size, got {told}"
        )
    return {
        "rebuilt": emd(rebuilt, draws),
        "floor": emd(draws, other_draws),
        "originals": emd(originals, draws),
    }
