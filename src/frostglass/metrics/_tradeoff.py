"""What a defense gains for what it costs: ΔAttAcc / ΔAcc."""

from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.metrics._stats import interval_over_seeds


def drop_ratio(
    undefended: Tensor, defended: Tensor, accuracy: float, defended_accuracy: float
) -> tuple[float, float, float] | None:
    """Return the drop of attack accuracy over that of the model's own accuracy, with its interval.

    `undefended` and `defended` (S, I) are the attack accuracies of the same attack on the same
    people with S seeds; they are compared person by person. The ratio is how many points of attack
    accuracy one point of accuracy buys. None if the defense costs no accuracy: the ratio is then
    undefined, not infinite. The interval is over people and seeds, and takes the two accuracies as
    exact: below a cost of a few points the ratio means little.

    Paper: Ho et al., Model Inversion Robustness: Can Transfer Learning Help? (TL-DMI), CVPR 2024,
    arXiv 2405.05588, where it is called Δ.
    """
    if undefended.shape != defended.shape or undefended.ndim != 2 or not undefended.numel():
        raise DataError(
            "expected attack accuracies (seeds, people) of one shape, got "
            f"{tuple(undefended.shape)} and {tuple(defended.shape)}"
        )
    cost = accuracy - defended_accuracy
    if cost <= 0:
        return None
    gain = undefended.double() - defended.double()
    low, high = interval_over_seeds(gain)
    return gain.mean().item() / cost, low / cost, high / cost
