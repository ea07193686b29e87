"""Context managers that read or change the layers of a network during its forward passes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class ReplacesHead(Protocol):
    """A layer that a defense put in place of the head."""

    replaces_head: bool


@runtime_checkable
class SeparatesUnits(Protocol):
    """A head with several units for each class, which returns all of them if `separate`."""

    units_per_class: int
    separate: bool


@runtime_checkable
class NumbersDraws(Protocol):
    """A layer with noise, which depends on the number of its `draw`."""

    draw: int


@runtime_checkable
class ChangesAnswers(Protocol):
    """A part of a network that changes its scores before they are returned to a client."""

    def answers(self, scores: Tensor, draw: int) -> Tensor: ...


def answered(module: nn.Module, logits: Tensor, draw: int = 0) -> Tensor:
    """Return the scores (N, K) that a network gives away, by the draw of this number.

    They are the probabilities of its logits, unless a part of it changes them.
    """
    scores = logits.softmax(1)
    for part in module.modules():
        if isinstance(part, ChangesAnswers):
            scores = part.answers(scores, draw)
    return scores


def changes_answers(module: nn.Module) -> bool:
    return any(isinstance(part, ChangesAnswers) for part in module.modules())


@contextmanager
def capture(
    module: nn.Module, names: tuple[str, ...], *, inputs: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs (or `inputs`) of the named sub-modules in forward passes of the block."""
    values: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in names:

            def keep(_: nn.Module, args: Any, output: Any = None, name: str = name) -> None:
                values[name] = args[0] if inputs else output

            part = module.get_submodule(name)
            register = part.register_forward_pre_hook if inputs else part.register_forward_hook
            hooks.enter_context(register(keep))
        yield values


class _Reached(BaseException):
    """Ends a forward pass at the layer that was asked for."""


def output_of(module: nn.Module, name: str, images: Tensor) -> Tensor:
    """Return the output of a sub-module for images; what comes after it is not computed."""

    def stop(_: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(output)
        raise _Reached

    outputs: list[Tensor] = []
    with module.get_submodule(name).register_forward_hook(stop), suppress(_Reached):
        module(images)
    return outputs[0]


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
    saturating = (nn.Tanh, nn.Sigmoid) if heads else nn.Tanh
    with ExitStack() as hooks:
        for part in (part for scope in heads or [module] for part in scope.modules()):
            if isinstance(part, saturating):
                hooks.enter_context(part.register_forward_hook(linear_backwards))
        yield


@contextmanager
def noise_drawn(module: nn.Module, number: int) -> Iterator[None]:
    """Let layers that number their noise use the draw of this number inside the block."""
    parts = (part for part in module.modules() if isinstance(part, NumbersDraws))
    before = [(part, part.draw) for part in parts if isinstance(part.draw, int)]
    try:
        for part, _ in before:
            part.draw = number
        yield
    finally:
        for part, draw in before:
            part.draw = draw
