"""Defenses that put another head in the place of the last linear layer."""

from dataclasses import replace

from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Target


def linear_head(target: Target, defense: str) -> nn.Linear:
    """The last layer, which must be linear for a defense to replace it."""
    head = target.module.get_submodule(target.head)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{defense} replaces a linear head; {target.head!r} is a {type(head).__name__}: choose a model that ends in a linear layer"
        )
    return head


def with_head(target: Target, head: nn.Module, last: str) -> Target:
    """The target with another head in place; `last` names the layer inside it that makes the logits."""
    parent, _, name = target.head.rpartition(".")
    setattr(target.module.get_submodule(parent), name, head)
    return replace(target, head=f"{target.head}.{last}")


def head_block(target: Target) -> str:
    """The name of the whole head: the last linear layer, or the replacement it is part of."""
    parts = target.head.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts))]
    return next(
        (
            name
            for name in above
            if getattr(target.module.get_submodule(name), "replaces_head", False)
        ),
        target.head,
    )
