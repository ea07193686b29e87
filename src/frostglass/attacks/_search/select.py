"""The selection among candidates; it may use the target, never an evaluator."""

from torch import Tensor


def best(score: Tensor, keep: int, *columns: Tensor) -> list[Tensor]:
    """Return, of each column (I, K, ...), the `keep` entries per row with the highest score."""
    order = score.argsort(dim=1, descending=True, stable=True)[:, :keep]
    rows = order.new_tensor(range(len(order)))[:, None]
    return [column[rows, order] for column in columns]
