"""Trials that decide whether networks may be run in a faster form."""

import torch
from torch import Tensor, nn

from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.device import device_of
from frostglass.runtime.folding import folded
from frostglass.runtime.layout import takes_channels_last
from frostglass.runtime.seeding import generator_for

# Tolerance between a network and its folded copy, relative to the largest output: more than the
# rounding of a deep network in float32, less than the error of a misplaced layer.
ROUNDING = 1e-4


def any_layout(view: ModelView, prior: Prior) -> list[nn.Module]:
    """Return all networks, or none if one of them fails on images with channels last."""
    networks = [view.module, *prior.modules]

    def trial() -> list[Tensor]:
        return _outputs(view, prior, torch.channels_last)

    return networks if takes_channels_last(trial, *networks) else []


def unchanged_when_folded(view: ModelView, prior: Prior) -> list[nn.Module]:
    """Return all networks, or none if folding batch norms changes the output of one of them.

    Checked empirically: some models index into their Sequentials.
    """
    networks = [view.module, *prior.modules]
    plain = _outputs(view, prior)
    with folded(*networks):
        pairs = zip(_outputs(view, prior), plain, strict=True)
        unchanged = all(
            (output - usual).abs().max() <= ROUNDING * usual.abs().max() for output, usual in pairs
        )
    return networks if unchanged else []


def _outputs(
    view: ModelView, prior: Prior, layout: torch.memory_format = torch.contiguous_format
) -> list[Tensor]:
    """Return every network's output for two fixed random inputs; not counted as queries."""
    rng, device = generator_for(0, "trial"), device_of(view.module)
    with torch.no_grad():
        images = prior.images(prior.draw(rng, rng), torch.zeros(2, dtype=torch.long, device=device))
        noise = torch.rand(2, *view.image_shape, generator=rng).to(device)
        seen = view.module(noise.contiguous(memory_format=layout))
        return [images, *(network(images) for network in prior.modules[1:]), seen]
