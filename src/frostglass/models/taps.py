"""Where to read a network: the head that makes the logits, and the layers its paper reads or else layers at even depths.

They are found by running the network on noise and watching its layers; the network is left as it was.
"""

import difflib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frostglass.core.errors import ModelError
from frostglass.core.types import Shape
from frostglass.models.base import MODEL_ERRORS, first_line, inner, noise_images, probe
from frostglass.runtime.freezing import frozen

IMAGES = 4
THIRDS = 3
STEPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # the layers that depth is counted in


class Tapped(nn.Sequential):
    """Layers in a row that know which of them their paper reads: `published_taps`, an attribute that any network may carry."""

    def __init__(self, layers: OrderedDict[str, nn.Module], published_taps: tuple[str, ...] = ()):
        super().__init__(layers)
        self.published_taps = published_taps


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
        return (
            self.value is not None
            and self.value.shape == logits.shape
            and torch.equal(self.value.float(), logits.float())
        )


def find_head(module: nn.Module, image_shape: Shape) -> str:
    """The name of the last linear layer: the one whose output is the module's output.

    A convolution counts where its output is one pixel, as in networks that end in 1x1 convolutions.
    """
    calls, logits = trace(module, image_shape)
    linear = [call for call in calls if isinstance(call.layer, STEPS)]
    runs = Counter(call.name for call in calls)
    for call in reversed(linear):
        if (
            call.name
            and call.is_logits(logits)
            and runs[call.name] == 1
            and _one_row_an_image(call.input_shape)
        ):
            return call.name
    found = ", ".join(f"{call.name} {call.shape}" for call in linear[-4:]) or "none"
    raise ModelError(
        f"no linear layer of {type(inner(module)).__name__} puts out its logits {tuple(logits.shape)}; the last ones it runs: {found}: "
        'name the layer whose input is the feature with head="name"'
    )


def find_taps(module: nn.Module, image_shape: Shape, count: int | None = None) -> tuple[str, ...]:
    """The layers to read, in order of execution: the network's `published_taps`, or `count` layers at even depths (three if not given).

    The last of those at even depths is just before the head; they are fewer when the network is shallow. Depth is counted in convolutions and linear layers. Near each wanted depth a stage is taken before a block, and a block before a
    single layer. A network with nothing before its head has no taps.
    """
    if count is None and (published := _published(module)):
        check_layers(module, image_shape, taps=published)
        return published
    count = THIRDS if count is None else count
    calls, logits = trace(module, image_shape)
    runs = Counter(call.name for call in calls)
    hidden = [call for call in calls if call.name and not call.is_logits(logits)]
    depth = max((call.steps for call in hidden if isinstance(call.layer, STEPS)), default=0)
    # Turned around, because of several layers at one depth `min` takes the first: the last to finish, after the activation.
    readable = [
        call
        for call in reversed(hidden)
        if 0 < call.steps <= depth and runs[call.name] == 1 and _one_row_an_image(call.shape)
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
    """Those of the named layers whose output depends on a weight that learns: what lies before the first such weight never changes."""
    check_layers(module, image_shape, taps=names)
    learning = [weight for weight in module.parameters() if weight.requires_grad]
    layers = dict(module.named_modules())
    live: set[str] = set()

    def watch(name: str):
        # Noted at once: a later layer that adds to the output in place would make it depend on its own weights too.
        return lambda layer, args, output: live.add(name) if output.requires_grad else None

    handles = [layers[name].register_forward_hook(watch(name)) for name in names]
    try:
        with frozen(module), torch.enable_grad():
            for weight in learning:
                weight.requires_grad_(True)
            module(noise_images(module, image_shape, IMAGES))
    except MODEL_ERRORS as error:
        raise ModelError(
            f"{type(inner(module)).__name__} cannot be run with gradients: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return tuple(name for name in names if name in live)


def check_layers(
    module: nn.Module, image_shape: Shape, *, head: str | None = None, taps: tuple[str, ...] = ()
) -> None:
    """Refuse layers that cannot be read: unknown, not run exactly once, a tap without a tensor to show, a head not fed one row an image."""
    asked = [*taps, *([] if head is None else [head])]
    known = [name for name, _ in module.named_modules() if name]
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else "named_modules() lists them"
            )
            raise ModelError(f"{type(inner(module)).__name__} has no layer named {name!r}: {hint}")
    calls = trace(module, image_shape)[0] if asked else []
    runs = Counter(call.name for call in calls)
    for name in asked:
        if runs[name] != 1:
            raise ModelError(
                f"the layer {name!r} runs {runs[name]} times for one batch: name one that runs once"
            )
    for call in calls:
        if call.name in taps and call.shape is None:
            raise ModelError(
                f"the layer {call.name!r} does not put out a tensor: name one that does"
            )
        if call.name == head and not _one_row_an_image(call.input_shape):
            raise ModelError(
                f"the head {head!r} takes in {call.input_shape} for {IMAGES} images: name a layer that is given one row an image"
            )


def trace(module: nn.Module, image_shape: Shape) -> tuple[list[Call], Tensor]:
    """Every run of every layer on a few noise images, in the order they finish, and the logits."""
    with _watched(module) as calls:
        logits = probe(module, noise_images(module, image_shape, IMAGES))
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(inner(module)).__name__} puts out a {type(logits).__name__}: expected a tensor of logits"
        )
    return calls, logits.clone()


def _published(module: nn.Module) -> tuple[str, ...]:
    """The names of the published taps, as seen from outside a `Preprocess`."""
    names = getattr(inner(module), "published_taps", ())
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"published_taps of {type(inner(module)).__name__} must be a tuple of layer names, got {names!r}"
        )
    return names if inner(module) is module else tuple(f"net.{name}" for name in names)


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[Call]]:
    calls: list[Call] = []
    steps = 0

    def watch(name: str):
        def note(layer: nn.Module, args: tuple, output: object) -> None:
            nonlocal steps
            steps += isinstance(layer, STEPS)
            value = None
            if (
                isinstance(output, Tensor)
                and output.ndim > 1
                and output.numel() == output.shape[0] * output.shape[1]
            ):
                value = output.flatten(1).clone()  # a later layer may work in place
            calls.append(
                Call(name, layer, _shape(args[0] if args else None), _shape(output), value, steps)
            )

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
    holds_steps = any(
        isinstance(part, STEPS) for part in call.layer.modules() if part is not call.layer
    )
    return not holds_steps, call.name.count(".")
