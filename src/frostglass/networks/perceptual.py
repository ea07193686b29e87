"""Perceptual distance: comparing images by the layer outputs of a network instead of by pixels."""

import torch
from torch import Tensor

from frostglass.core.types import Target
from frostglass.runtime.hooks import capture


def perceptual_distance(network: Target, first: Tensor, second: Tensor) -> Tensor:
    """Return the mean over taps of the normalised squared difference of their outputs, (N,).

    Each tap's difference is divided by the mean square of its output for `second`, so that early
    and late layers have the same weight at any scale. Differentiable. The caller sets the
    network's mode and weights.
    """
    with capture(network.module, network.taps) as seen:
        network.module(network.fit(first))
        ours = dict(seen)
        with torch.set_grad_enabled(second.requires_grad):
            network.module(network.fit(second))
        theirs = dict(seen)
    parts = [
        (ours[name] - theirs[name]).square().flatten(1).mean(1)
        / theirs[name].detach().square().flatten(1).mean(1).clamp(min=1e-12)
        for name in network.taps
    ]
    return torch.stack(parts).mean(0)
