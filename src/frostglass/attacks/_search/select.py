"""The selection among candidates; it may use the target and assets, never an evaluator."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """All images that were found for some people.

    `images` (I, K, C, H, W), `labels` (I,) the attacked classes, `score` (I, K) by which they are
    ranked unless an attack has its own order; -inf marks searches that broke off.
    """

    images: Tensor
    labels: Tensor
    score: Tensor


def by_score(candidates: Candidates) -> Tensor:
    """Return the order of each person's candidates (I, K), highest score first."""
    return candidates.score.argsort(dim=1, descending=True, stable=True)


def in_order(order: Tensor, column: Tensor) -> Tensor:
    """Return the entries (I, n, ...) of a column (I, K, ...) that `order` (I, n) names."""
    rows = order.new_tensor(range(len(order)))[:, None]
    return column[rows, order]
