"""Replacement of the last linear layer by another head."""

from dataclasses import replace

from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.runtime.hooks import ReplacesHead


def linear_head(target: Target, defense: str) -> nn.Linear:
    """Return the last layer, which must be linear for a defense to replace it."""
    head = target.module.get_submodule(target.head)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{defense} replaces a linear head; {target.head!r} is a {type(head).__name__}: "
            "choose a model that ends in a linear layer"
        )
    return head


def with_head(target: Target, head: nn.Module, last: str) -> Target:
    """Replace the target's head; `last` names the layer inside it that computes the logits."""
    parent, _, name = target.head.rpartition(".")
    setattr(target.module.get_submodule(parent), name, head)
    return replace(target, head=f"{target.head}.{last}")


def head_block(target: Target) -> str:
    """Return the name of the whole head: the last linear layer, or the replacement around it."""
    parts = target.head.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        block = target.module.get_submodule(name)
        if isinstance(block, ReplacesHead) and block.replaces_head:
            return name
    return target.head
