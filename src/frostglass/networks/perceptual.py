"""How alike two pictures look to a network: by the outputs of its layers instead of by their pixels."""

import torch
from torch import Tensor

from frostglass.core.types import Target
from frostglass.runtime.hooks import capture


def perceptual_distance(judge: Target, one: Tensor, other: Tensor) -> Tensor:
    """Mean over the judge's taps of the mean squared difference of their outputs, each in units of the layer's own mean square; (N,), differentiable.

    The judge's mode and weights are the caller's business. The units make early and late layers count alike, whatever their scale.
    """
    with capture(judge.module, judge.taps) as seen:
        judge.module(judge.fit(one))
        ours = dict(seen)
        with torch.no_grad() if not other.requires_grad else torch.enable_grad():
            judge.module(judge.fit(other))
        theirs = dict(seen)
    parts = [
        (ours[name] - theirs[name]).square().flatten(1).mean(1)
        / theirs[name].detach().square().flatten(1).mean(1).clamp(min=1e-12)
        for name in judge.taps
    ]
    return torch.stack(parts).mean(0)
