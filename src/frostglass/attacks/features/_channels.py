"""Channels up to their size: for a device that weakens channels, as Disco does."""

import torch
from torch import Tensor

from frostglass.attacks.base import View
from frostglass.core.types import Shape
from frostglass.core.views import FeatureView
from frostglass.models.cut import SQUARE, channel_axis

SMALLEST = 1e-37  # about the least number of single precision


def channel_gaps(features: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared distance of each channel from the wanted one, both at length 1, (N,).

    Channels of the wanted feature that are zero say nothing, and do not count.
    """
    axis = 1 + channel_axis(tuple(wanted.shape[1:]))
    shown, aims = (each.movedim(axis, 1).flatten(2) for each in (features, wanted))
    counted = aims.abs().amax(2) >= SMALLEST
    distances = (_at_length_one(shown, 2) - _at_length_one(aims, 2)).square().sum(2)
    return (distances * counted).sum(1) / counted.sum(1).clamp(min=1)


def channels_at_length_one(features: Tensor, image_shape: Shape = SQUARE) -> Tensor:
    """Divide each channel of each feature (N, ...) by its norm; those that are zero stay so."""
    channels = 1 + channel_axis(tuple(features.shape[1:]), image_shape)
    return _at_length_one(features, [n for n in range(1, features.ndim) if n != channels])


def _at_length_one(channels: Tensor, axes: int | list[int]) -> Tensor:
    # Squares of what a mask left may be too small for single precision: largest numbers first.
    largest = channels.detach().abs().amax(axes, keepdim=True)
    channels = channels / largest.where(largest >= SMALLEST, 1)
    # At least 1 unless zero.
    return channels / torch.linalg.vector_norm(channels, dim=axes, keepdim=True).clamp(min=1)


def channel_problems(view: View, setting: str) -> list[str]:
    """Describe features whose channels are single numbers, which are nothing but a size."""
    shape = view.feature_shape if isinstance(view, FeatureView) else ()
    if len(shape) != 1:
        return []
    return [
        f"{setting} needs channels of several numbers, got vectors of {shape[0]} numbers. Leave it "
        "out, or cut after an earlier layer."
    ]
