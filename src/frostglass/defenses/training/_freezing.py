"""Layers that a defense has frozen for the whole training."""

from collections.abc import Iterable, Iterator

from torch import nn

MARK = "frozen_layer"


def mark_frozen(layers: Iterable[nn.Module]) -> None:
    """Remember that a defense froze these layers."""
    for layer in layers:
        vars(layer)[MARK] = True


def frozen_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Return the layers that `mark_frozen` marked."""
    return (layer for layer in module.modules() if MARK in vars(layer))
