"""The layers of a target that have weights, and squared gradients of these."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from frostglass.core.errors import ModelError
from frostglass.core.types import Target
from frostglass.models.taps import STEPS, trace
from frostglass.runtime.freezing import frozen


def weighted_layers(target: Target) -> dict[str, nn.Module]:
    """Return the convolutions and linear layers in the order in which they run."""
    calls, _ = trace(target.module, target.image_shape)
    layers: dict[str, nn.Module] = {
        call.name: call.layer for call in calls if isinstance(call.layer, STEPS)
    }
    if not layers:
        raise ModelError("expected a network with convolutions or linear layers, got none of them")
    return layers


@contextmanager
def differentiable(target: Target, layers: dict[str, nn.Module]) -> Iterator[list[Tensor]]:
    """Freeze the target but for the weights of some layers, which get gradients in the block."""
    with frozen(target.module):
        weights: list[Tensor] = [layer.weight for layer in layers.values()]  # type: ignore[misc]
        for weight in weights:
            weight.requires_grad_(True)
        yield weights


def squared_gradients(value: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the mean squared gradient of a value over the weights of each layer, (L,)."""
    slopes = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    return torch.stack(
        [
            torch.zeros((), dtype=torch.double)
            if slope is None
            else slope.detach().double().square().mean().cpu()
            for slope in slopes
        ]
    )
