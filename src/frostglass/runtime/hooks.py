"""Context managers that read or change the layers of a network during its forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class ReplacesHead(Protocol):
    """A layer that a defense put in place of the head."""

    replaces_head: bool


@runtime_checkable
class NumbersDraws(Protocol):
    """A layer with noise, which depends on the number of its `draw`."""

    draw: int


@contextmanager
def capture(
    module: nn.Module, names: tuple[str, ...], *, inputs: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs (or `inputs`) of the named sub-modules in forward passes of the block."""
    values: dict[str, Tensor] = {}
    parts = dict(module.named_modules())
    handles = []
    for name in names:

        def keep(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            values[name] = output

        def keep_input(_: nn.Module, args: Any, name: str = name) -> None:
            values[name] = args[0]

        if inputs:
            handles.append(parts[name].register_forward_pre_hook(keep_input))
        else:
            handles.append(parts[name].register_forward_hook(keep))
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def straight_through(module: nn.Module) -> Iterator[None]:
    """Let gradients pass saturating layers unchanged inside the block; values stay the same.

    These are the tanh and sigmoid layers of a head that a defense put in. Without such a head they
    are all tanh layers: sigmoids elsewhere are gates.
    """

    def linear_backwards(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Adds zero. x + (tanh x - x) would lose the digits of tanh x for large x.
        return output.detach() + (args[0] - args[0].detach())

    heads: list[nn.Module] = [
        part for part in module.modules() if isinstance(part, ReplacesHead) and part.replaces_head
    ]
    saturating = [
        part
        for scope in heads or [module]
        for part in scope.modules()
        if isinstance(part, nn.Tanh) or (heads and isinstance(part, nn.Sigmoid))
    ]
    handles = [part.register_forward_hook(linear_backwards) for part in saturating]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def noise_drawn(module: nn.Module, number: int) -> Iterator[None]:
    """Let layers that number their noise use the draw of this number inside the block."""
    parts = (part for part in module.modules() if isinstance(part, NumbersDraws))
    noisy = [part for part in parts if isinstance(part.draw, int)]
    before = [part.draw for part in noisy]
    try:
        for part in noisy:
            part.draw = number
        yield
    finally:
        for part, draw in zip(noisy, before, strict=True):
            part.draw = draw
