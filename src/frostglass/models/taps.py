"""Detect the head that computes the logits, and the layers to read (the taps).

The network runs on noise while hooks record its layers; it is left unchanged.
"""

import difflib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from frostglass.core.errors import ModelError
from frostglass.core.types import Shape
from frostglass.models.base import MODEL_ERRORS, class_name, first_line, inner, noise_images, probe
from frostglass.runtime.freezing import frozen

IMAGES = 4
THIRDS = 3
STEPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # the layers that depth is counted in
Hook = Callable[[nn.Module, Any, Any], None]


class Tapped(nn.Sequential):
    """A sequence of layers with the `published_taps` of its paper.

    Any network may have the attribute `published_taps`.
    """

    def __init__(
        self, layers: OrderedDict[str, nn.Module], published_taps: tuple[str, ...] = ()
    ) -> None:
        super().__init__(layers)
        self.published_taps = published_taps


@dataclass(frozen=True)
class Call:
    """One run of one layer: shapes of its first input and output, and its depth in `steps`.

    A shape is None for anything but a tensor. `value` is the output if it could be the logits: one
    vector per image. `steps` counts the convolutions and linear layers that have run.
    """

    name: str
    layer: nn.Module
    input_shape: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    value: Tensor | None
    steps: int

    def is_logits(self, logits: Tensor) -> bool:
        return (
            self.value is not None
            and self.value.shape == logits.shape
            and torch.equal(self.value.float(), logits.float())
        )


def find_head(module: nn.Module, image_shape: Shape) -> str:
    """Return the name of the last linear layer: the one whose output is the module's output.

    A convolution counts if its output is one pixel, as in networks that end in 1x1 convolutions.
    """
    calls, logits = trace(module, image_shape)
    linear = [call for call in calls if isinstance(call.layer, STEPS)]
    runs = Counter(call.name for call in calls)
    for call in reversed(linear):
        once = runs[call.name] == 1 and _one_row_per_image(call.input_shape)
        if call.name and call.is_logits(logits) and once:
            return call.name
    last = ", ".join(f"{call.name} {call.shape}" for call in linear[-4:]) or "none"
    raise ModelError(
        f"no linear layer of {class_name(module)} returns its logits {tuple(logits.shape)}; the "
        f'last ones it runs: {last}: name the layer whose input is the feature with head="name"'
    )


def find_taps(module: nn.Module, image_shape: Shape, count: int | None = None) -> tuple[str, ...]:
    """Return the layers to read: the `published_taps`, or `count` (3) layers at even depths.

    They are in order of execution. The last of those at even depths is just before the head; a
    shallow network has fewer, and one with nothing before its head has none. Depth is counted in
    convolutions and linear layers. Near each depth, a stage is preferred to a block, and a block
    to a single layer.
    """
    if count is None and (published := _published(module)):
        check_layers(module, image_shape, taps=published)
        return published
    count = THIRDS if count is None else count
    calls, logits = trace(module, image_shape)
    runs = Counter(call.name for call in calls)
    hidden = [call for call in calls if call.name and not call.is_logits(logits)]
    depth = max((call.steps for call in hidden if isinstance(call.layer, STEPS)), default=0)
    # Reversed, because `min` takes the first of several layers at one depth, which is then the
    # last to finish, after the activation.
    readable = [
        call
        for call in reversed(hidden)
        if 0 < call.steps <= depth and runs[call.name] == 1 and _one_row_per_image(call.shape)
    ]
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


def live_taps(module: nn.Module, image_shape: Shape, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named layers whose output depends on a weight that learns."""
    check_layers(module, image_shape, taps=names)
    learning = [weight for weight in module.parameters() if weight.requires_grad]
    layers = dict(module.named_modules())
    live: set[str] = set()

    def watch(name: str) -> Hook:
        # Recorded at once: a later layer that adds to the output in place would make it depend on
        # its own weights too.
        def record(layer: nn.Module, args: Any, output: Any) -> None:
            if output.requires_grad:
                live.add(name)

        return record

    handles = [layers[name].register_forward_hook(watch(name)) for name in names]
    try:
        with frozen(module), torch.enable_grad():
            for weight in learning:
                weight.requires_grad_(True)
            module(noise_images(module, image_shape, IMAGES))
    except MODEL_ERRORS as error:
        raise ModelError(
            f"{class_name(module)} cannot be run with gradients: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return tuple(name for name in names if name in live)


def check_layers(
    module: nn.Module, image_shape: Shape, *, head: str | None = None, taps: tuple[str, ...] = ()
) -> None:
    """Refuse layers that cannot be read.

    A layer must exist and run exactly once, a tap must return a tensor, and the head must get one
    row per image.
    """
    names = [*taps, *([] if head is None else [head])]
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            close = " or ".join(map(repr, difflib.get_close_matches(name, known, 3, 0.4)))
            hint = f"did you mean {close}?" if close else "named_modules() lists them"
            raise ModelError(f"{class_name(module)} has no layer named {name!r}: {hint}")
    calls = trace(module, image_shape)[0] if names else []
    runs = Counter(call.name for call in calls)
    for name in names:
        if runs[name] != 1:
            raise ModelError(
                f"the layer {name!r} runs {runs[name]} times for one batch: name one that runs once"
            )
    for call in calls:
        if call.name in taps and call.shape is None:
            raise ModelError(f"the layer {call.name!r} does not return a tensor: name another one")
        if call.name == head and not _one_row_per_image(call.input_shape):
            raise ModelError(
                f"the head {head!r} gets {call.input_shape} for {IMAGES} images: name a layer that "
                "gets one row per image"
            )


def trace(module: nn.Module, image_shape: Shape) -> tuple[list[Call], Tensor]:
    """Return every run of every layer on noise images, in the order they finish, and the logits."""
    with _watched(module) as calls:
        logits = probe(module, noise_images(module, image_shape, IMAGES))
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{class_name(module)} returns a {type(logits).__name__}: expected a tensor of logits"
        )
    return calls, logits.clone()


def _published(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the published taps, as seen from outside a `Preprocess`."""
    names = getattr(inner(module), "published_taps", ())  # any network may have it
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"published_taps of {class_name(module)} must be a tuple of layer names, got {names!r}"
        )
    return names if inner(module) is module else tuple(f"net.{name}" for name in names)


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[Call]]:
    calls: list[Call] = []
    steps = 0

    def watch(name: str) -> Hook:
        def record(layer: nn.Module, args: Any, output: Any) -> None:
            nonlocal steps
            steps += isinstance(layer, STEPS)
            shape, value = _shape(output), None
            if shape and len(shape) > 1 and output.numel() == shape[0] * shape[1]:
                value = output.flatten(1).clone()  # a later layer may work in place
            calls.append(Call(name, layer, _shape(args[0] if args else None), shape, value, steps))

        return record

    # TorchScript takes no hooks: what runs inside of it is not seen.
    seen = [(n, each) for n, each in module.named_modules() if not isinstance(each, ScriptModule)]
    handles = [layer.register_forward_hook(watch(name)) for name, layer in seen]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _one_row_per_image(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) > 1 and shape[0] == IMAGES


def _rank(call: Call) -> tuple[bool, int]:
    """Sort stages before blocks before single layers."""
    parts = (part for part in call.layer.modules() if part is not call.layer)
    return not any(isinstance(part, STEPS) for part in parts), call.name.count(".")
