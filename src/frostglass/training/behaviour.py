"""How a module behaves: does it leave training mode, and do its outputs depend on images alone?"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from frostglass.core.types import Images
from frostglass.models.base import class_name
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

ROWS = 8  # images in each half of the batches that are compared
NOISE = 1e-5  # relative difference of two evaluations, above which a model is not deterministic
DEPENDS = 1e-3  # relative difference in another batch, above which rows depend on one another


def mode_problem(module: nn.Module) -> str:
    """Say which layers stay in training mode after `eval()`, or ""."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        parts = module.named_modules()
        names = [name or class_name(module) for name, part in parts if part.training]
    finally:
        for part, training in modes:
            part.training = training
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} stays in training mode after eval(), and an audit attacks the model in "
        "evaluation mode: let train() and eval() set the mode of every layer"
    )


def batch_problem(module: nn.Module, parts: Sequence[Images]) -> str:
    """Say that the outputs for an image depend on the other images of its batch, or ""."""
    images = _few(parts).to(device_of(module))
    first, others = images[: len(images) // 2], images[len(images) // 2 :]
    # Batches of one shape use the same kernels; the other images differ clearly.
    one, again, other = _evaluated(
        module, *(torch.cat([first, rest]) for rest in (others, others, 1 - others))
    )
    if _difference(one, again) > NOISE:  # a noisy model; its own warning says so
        return ""
    if (found := _difference(one[: len(first)], other[: len(first)])) <= DEPENDS:
        return ""
    return (
        f"the outputs for an image change by {found:.1%} with the other images of its batch: use "
        "running statistics in normalisation layers (track_running_stats, evaluation mode)"
    )


def noise_warning(module: nn.Module, parts: Sequence[Images]) -> str:
    """Say that two evaluations of the same images differ, or ""."""
    images = _few(parts).to(device_of(module))
    one, again = _evaluated(module, images, images)
    if (found := _difference(one, again)) <= NOISE:
        return ""
    return (
        f"the model is not deterministic: two evaluations of the same images differ by {found:.1%}."
        " If that is dropout, let it follow self.training; if it is a defense, an attacker averages"
        " it: set attack.samples"
    )


def _few(parts: Sequence[Images]) -> Tensor:
    """Return some images, evenly from the first part that has enough of them."""
    part = next((part for part in parts if len(part) >= 2 * ROWS), max(parts, key=len))
    index = torch.linspace(0, len(part) - 1, min(len(part), 2 * ROWS)).long()
    return part.floats(index)


def _evaluated(module: nn.Module, *batches: Tensor) -> list[Tensor]:
    with frozen(module), torch.no_grad():
        return [module(batch).double() for batch in batches]


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest output."""
    return ((one - other).abs().max() / one.abs().max().clamp(min=1e-12)).item()
