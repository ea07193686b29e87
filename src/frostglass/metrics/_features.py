"""What features of two sets of images must fulfil to be compared."""

from torch import Tensor

from frostglass.core.errors import DataError

CHUNK = 4096  # rows that are looked at together


def check_features(first: Tensor, second: Tensor, least: int = 1) -> None:
    """Refuse features (N, F) and (M, F) of two widths, of too few images, or with NaN rows."""
    fit = first.ndim == second.ndim == 2 and first.shape[1] == second.shape[1]
    if not fit or min(len(first), len(second)) < least:
        raise DataError(
            f"expected features (N, F) and (M, F) of one width and of at least {least} images "
            f"each, got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    for features in (first, second):
        broken = sum(int((~part.isfinite()).any(1).sum()) for part in features.split(CHUNK))
        if broken:
            raise DataError(
                f"expected finite features, got NaN or infinity in {broken} of {len(features)} rows"
            )
