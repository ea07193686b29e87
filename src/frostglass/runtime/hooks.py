"""Seeds, threads and the promise to leave the caller's networks as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def capture(
    module: nn.Module, names: tuple[str, ...], *, inputs: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Collect what the named sub-modules put out (or, with `inputs`, take in) during forward passes inside the block."""
    seen: dict[str, Tensor] = {}
    parts = dict(module.named_modules())

    def keep_input(name: str):
        return lambda _, args: seen.__setitem__(name, args[0])

    def keep_output(name: str):
        return lambda _, args, output: seen.__setitem__(name, output)

    handles = [
        parts[name].register_forward_pre_hook(keep_input(name))
        if inputs
        else parts[name].register_forward_hook(keep_output(name))
        for name in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def straight_through(module: nn.Module) -> Iterator[None]:
    """Let gradients pass saturating layers as if they were the identity inside the block; the values stay exactly the same.

    Those are the tanh and sigmoid layers of a head that a defense put in, or where there is none every tanh: sigmoids elsewhere are gates.
    """

    def linear_backwards(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.detach() + (
            args[0] - args[0].detach()
        )  # adds zero: far out, x + (tanh x - x) would lose the digits of tanh x

    heads = [part for part in module.modules() if getattr(part, "replaces_head", False)]
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
    """Let layers that number their noise by `draw` use the draw of this number inside the block."""
    noisy = [part for part in module.modules() if isinstance(getattr(part, "draw", None), int)]
    before = [part.draw for part in noisy]
    try:
        for part in noisy:
            part.draw = number  # type: ignore[assignment]
        yield
    finally:
        for part, draw in zip(noisy, before, strict=True):
            part.draw = draw
