"""How well embeddings separate people, compared with how much each person varies."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError, RunError

ROUNDING = 1e-20  # of the variance between people; less variance within is only rounding


def lda_score(embeddings: Tensor, groups: Tensor) -> float:
    """Return tr(Sb) / tr(Sw) of embeddings (N, F) in groups (N,).

    Sb = Σ_c n_c (m_c - m)(m_c - m)ᵀ, Sw = Σ_c Σ_{i in c} (e_i - m_c)(e_i - m_c)ᵀ. On embeddings of
    reconstructions, grouped by person, a larger score means that they separate people better and
    that more has leaked. Random groups do not score 0 but about `lda_chance`: compare with that.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented
    Representations, AAAI 2020, arXiv 1911.10143, Table 3.

    Differs: The paper prints Sb/Sw for five of six layers and Sw/Sb for the last (FC: 2.58 and
    1.49, where its own variances give 0.39 and 0.67); here it is always Sb/Sw. How it scales the
    two variances is not stated; ours share their scale, which cancels.
    """
    if embeddings.ndim != 2 or groups.shape != embeddings.shape[:1]:
        raise DataError(
            f"expected embeddings (N, F) and groups (N,), got {tuple(embeddings.shape)} and "
            f"{tuple(groups.shape)}"
        )
    _, index, count = groups.unique(return_inverse=True, return_counts=True)
    if not 1 < len(count) < len(groups):
        raise DataError(
            "expected at least 2 people, and 2 embeddings of one of them, got "
            f"{len(groups)} embeddings of {len(count)} people"
        )
    embeddings = embeddings.double()
    sums = torch.zeros(len(count), embeddings.shape[1], dtype=torch.double)
    means = sums.index_add_(0, index, embeddings) / count[:, None]
    between = (count[:, None] * (means - embeddings.mean(0)).square()).sum()
    within = (embeddings - means[index]).square().sum()
    if not bool(within > ROUNDING * between):  # also if a value is not finite
        raise RunError(
            "the embeddings of each person do not differ, or some are not finite: the LDA score is "
            "undefined"
        )
    return (between / within).item()


def lda_chance(groups: Tensor) -> float:
    """Return the `lda_score` of random groups (N,): (G - 1) / (N - G) for G groups.

    This is the ratio of the two expected traces, for any embeddings.
    """
    people = len(groups.unique())
    if not people < len(groups):
        raise DataError(
            "expected at least 2 embeddings of one person, got "
            f"{len(groups)} embeddings of {people} people"
        )
    return (people - 1) / (len(groups) - people)
