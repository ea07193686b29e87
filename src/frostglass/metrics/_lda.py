"""How far apart people stay among embeddings, compared with how much each varies."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError, RunError

ROUNDING = 1e-20  # of the spread between people, below which that within is nothing but rounding


def lda_score(embeddings: Tensor, groups: Tensor) -> float:
    """tr(Sb) / tr(Sw) of embeddings (N, F) in groups (N,): Sb = Σ_c n_c (m_c - m)(m_c - m)ᵀ, Sw = Σ_c Σ_{i in c} (e_i - m_c)(e_i - m_c)ᵀ.

    On embeddings of reconstructions, grouped by person: the larger, the better they tell people apart, and the more has leaked. Groups drawn by lot do not get 0 but
    about `lda_chance`, so compare with that.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations, AAAI 2020, arXiv 1911.10143, Table 3.

    Differs: The paper prints Sb/Sw for five of six layers and Sw/Sb for the last (FC: 2.58 and 1.49, where its own variances give 0.39 and 0.67); here it is always Sb/Sw.
    How it scales the two variances is not stated; ours share their scale, which drops out.
    """
    if embeddings.ndim != 2 or groups.shape != embeddings.shape[:1]:
        raise DataError(
            f"expected embeddings (N, F) and groups (N,), got {tuple(embeddings.shape)} and {tuple(groups.shape)}"
        )
    _, index, count = groups.unique(return_inverse=True, return_counts=True)
    if not 1 < len(count) < len(groups):
        raise DataError(
            f"{len(groups)} embeddings of {len(count)} people have no spread between and within people: give at least two people, one of them with two"
        )
    found = embeddings.double()
    means = (
        torch.zeros(len(count), found.shape[1], dtype=torch.double).index_add_(0, index, found)
        / count[:, None]
    )
    between = (count[:, None] * (means - found.mean(0)).square()).sum()
    within = (found - means[index]).square().sum()
    if not bool(within > ROUNDING * between):  # also if something is not finite
        raise RunError(
            "the embeddings of each person do not differ, or some are not finite: an LDA score cannot be told"
        )
    return (between / within).item()


def lda_chance(groups: Tensor) -> float:
    """What `lda_score` comes to if groups (N,) are drawn by lot: (G - 1) / (N - G) for G groups, the ratio of the two expected traces, whatever the embeddings."""
    people = len(groups.unique())
    if not people < len(groups):
        raise DataError(
            f"{len(groups)} embeddings of {people} people have no spread within people: give one of them at least two"
        )
    return (people - 1) / (len(groups) - people)
