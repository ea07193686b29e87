"""What an attack keeps of what it found; it may ask the target, never an evaluator."""

from torch import Tensor


def best(score: Tensor, keep: int, *columns: Tensor) -> list[Tensor]:
    """For each identity (row) the `keep` candidates with the highest score; applied to each of `columns` (I, K, ...)."""
    order = score.argsort(dim=1, descending=True, stable=True)[:, :keep]
    rows = order.new_tensor(range(len(order)))[:, None]
    return [column[rows, order] for column in columns]
