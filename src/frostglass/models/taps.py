"""Where to read a network: the head that makes the logits, and layers at even depths.

Both are found by running the network once on noise and watching its layers; the network is left as it was.
"""

import difflib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frostglass.errors import ModelError
from frostglass.models.base import inner, noise_images, probe
from frostglass.types import Shape

IMAGES = 4
STEPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # the layers that depth is counted in


@dataclass(frozen=True)
class Call:
    """One run of one layer: the shapes of its first input and its output, and how many convolutions and linear layers had run by then.

    A shape is None where something else than a tensor came. `value` holds the output where it could be the logits: one vector an image.
    """

    name: str
    layer: nn.Module
    input_shape: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    value: Tensor | None
    steps: int

    def is_logits(self, logits: Tensor) -> bool:
        return self.value is not None and self.value.shape == logits.shape and torch.equal(self.value.float(), logits.float())


def find_head(module: nn.Module, image_shape: Shape) -> str:
    """The name of the last linear layer: the one whose output is the module's output.

    A convolution counts where its output is one pixel, as in networks that end in 1x1 convolutions.
    """
    calls, logits = trace(module, image_shape)
    linear = [call for call in calls if isinstance(call.layer, STEPS)]
    runs = Counter(call.name for call in calls)
    for call in reversed(linear):
        if call.name and call.is_logits(logits) and runs[call.name] == 1 and _one_row_an_image(call.input_shape):
            return call.name
    found = ", ".join(f"{call.name} {call.shape}" for call in linear[-4:]) or "none"
    raise ModelError(
        f"no linear layer of {type(inner(module)).__name__} puts out its logits {tuple(logits.shape)}; the last ones it runs: {found}: "
        'name the layer whose input is the feature with head="name"'
    )


def find_taps(module: nn.Module, image_shape: Shape, count: int = 3) -> tuple[str, ...]:
    """Up to `count` layers at even depths, in order of execution, the last just before the head; fewer when the network is shallow.

    Depth is counted in convolutions and linear layers. Near each wanted depth a stage is taken before a block, and a block before a
    single layer. A network with nothing before its head has no taps.
    """
    calls, logits = trace(module, image_shape)
    runs = Counter(call.name for call in calls)
    hidden = [call for call in calls if call.name and not call.is_logits(logits)]
    depth = max((call.steps for call in hidden if isinstance(call.layer, STEPS)), default=0)
    # Turned around, because of several layers at one depth `min` takes the first: the last to finish, after the activation.
    readable = [call for call in reversed(hidden) if 0 < call.steps <= depth and runs[call.name] == 1 and _one_row_an_image(call.shape)]
    chosen: list[Call] = []
    for number in range(1, count + 1):
        goal, reach = depth * number / count, depth / (3 * count)
        later = [call for call in readable if not chosen or call.steps > chosen[-1].steps]
        near = [call for call in later if abs(call.steps - goal) <= reach]
        if near:
            chosen.append(min(near, key=lambda call: (*_rank(call), abs(call.steps - goal))))
        elif later:
            chosen.append(min(later, key=lambda call: (abs(call.steps - goal), *_rank(call))))
    return tuple(call.name for call in chosen)


def check_layers(module: nn.Module, image_shape: Shape, *, head: str | None = None, taps: tuple[str, ...] = ()) -> None:
    """Refuse layers that cannot be read: unknown, not run exactly once, a tap without a tensor to show, a head not fed one row an image."""
    asked = [*taps, *([] if head is None else [head])]
    known = [name for name, _ in module.named_modules() if name]
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "named_modules() lists them"
            raise ModelError(f"{type(inner(module)).__name__} has no layer named {name!r}: {hint}")
    calls = trace(module, image_shape)[0] if asked else []
    runs = Counter(call.name for call in calls)
    for name in asked:
        if runs[name] != 1:
            raise ModelError(f"the layer {name!r} runs {runs[name]} times for one batch: name one that runs once")
    for call in calls:
        if call.name in taps and call.shape is None:
            raise ModelError(f"the layer {call.name!r} does not put out a tensor: name one that does")
        if call.name == head and not _one_row_an_image(call.input_shape):
            raise ModelError(
                f"the head {head!r} takes in {call.input_shape} for {IMAGES} images: name a layer that is given one row an image"
            )


def trace(module: nn.Module, image_shape: Shape) -> tuple[list[Call], Tensor]:
    """Every run of every layer on a few noise images, in the order they finish, and the logits."""
    with _watched(module) as calls:
        logits = probe(module, noise_images(module, image_shape, IMAGES))
    if not isinstance(logits, Tensor):
        raise ModelError(f"{type(inner(module)).__name__} puts out a {type(logits).__name__}: expected a tensor of logits")
    return calls, logits.clone()


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[Call]]:
    calls: list[Call] = []
    steps = 0

    def watch(name: str):
        def note(layer: nn.Module, args: tuple, output: object) -> None:
            nonlocal steps
            steps += isinstance(layer, STEPS)
            value = None
            if isinstance(output, Tensor) and output.ndim > 1 and output.numel() == output.shape[0] * output.shape[1]:
                value = output.flatten(1).clone()  # a later layer may work in place
            calls.append(Call(name, layer, _shape(args[0] if args else None), _shape(output), value, steps))

        return note

    handles = [layer.register_forward_hook(watch(name)) for name, layer in module.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _one_row_an_image(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) > 1 and shape[0] == IMAGES


def _rank(call: Call) -> tuple[bool, int]:
    """Stages before blocks before single layers."""
    holds_steps = any(isinstance(part, STEPS) for part in call.layer.modules() if part is not call.layer)
    return not holds_steps, call.name.count(".")
