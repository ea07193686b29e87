"""Run the networks of a search in a faster form, where trials show that it changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from frostglass.attacks.base import View
from frostglass.core.prior import Prior
from frostglass.runtime.device import device_of
from frostglass.runtime.folding import folded
from frostglass.runtime.layout import channels_last, takes_channels_last
from frostglass.runtime.seeding import generator_for

# Tolerance between a network and its folded copy, relative to the largest output: more than the
# rounding of a deep network in float32, less than the error of a misplaced layer.
ROUNDING = 1e-4


@contextmanager
def fast_search(view: View, prior: Prior | None = None) -> Iterator[None]:
    """Run frozen networks channels last and with folded batch norms inside the block."""
    with (
        channels_last(*any_layout(view, prior)),
        folded(*unchanged_when_folded(view, prior)),
    ):
        yield


def any_layout(view: View, prior: Prior | None) -> list[nn.Module]:
    """Return all networks, or none if one of them fails on images with channels last."""
    networks = _networks(view, prior)

    def trial() -> list[Tensor]:
        return _outputs(view, prior, torch.channels_last)

    return networks if takes_channels_last(trial, *networks) else []


def unchanged_when_folded(view: View, prior: Prior | None) -> list[nn.Module]:
    """Return all networks, or none if folding batch norms changes the output of one of them.

    Checked empirically: some models index into their Sequentials.
    """
    networks = _networks(view, prior)
    plain = _outputs(view, prior)
    with folded(*networks):
        pairs = zip(_outputs(view, prior), plain, strict=True)
        unchanged = all(
            (output - usual).abs().max() <= ROUNDING * usual.abs().max() for output, usual in pairs
        )
    return networks if unchanged else []


def _networks(view: View, prior: Prior | None) -> list[nn.Module]:
    return [view.module, *(prior.modules if prior else ())]


def _outputs(
    view: View, prior: Prior | None, layout: torch.memory_format = torch.contiguous_format
) -> list[Tensor]:
    """Return every network's output for two fixed random inputs; not counted as queries."""
    rng, device, made = generator_for(0, "trial"), device_of(view.module), []
    with torch.no_grad():
        if prior:
            labels = torch.zeros(2, dtype=torch.long, device=device)
            images = prior.images(prior.draw(rng, rng), labels)
            made = [images, *(network(images) for network in prior.modules[1:])]
        noise = torch.rand(2, *view.image_shape, generator=rng).to(device)
        return [*made, view.module(noise.contiguous(memory_format=layout))]
