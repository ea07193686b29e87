"""Split inference: cut a network at a layer into a part for the device and one for the server."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from frostglass.core.errors import ModelError
from frostglass.core.pixels import RowsInOne
from frostglass.core.types import Halves, Shape, Target
from frostglass.models.base import MODEL_ERRORS, Preprocess, class_name, noise_images, probe
from frostglass.models.taps import check_layers, find_head, trace
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

HEAD = "head"  # names the last layer of every network, whatever it is called there
IMAGES = 2
AT_ONCE = 128  # images encoded together
SQUARE: Shape = (1, 1, 1)  # stands for images whose height is their width
ASLEEP = 0.01  # below it are all numbers of a layer that does nothing yet
ROUNDING = 1e-4  # of the largest logit: the halves may round differently from the whole


def encoded(encoder: nn.Module, images: Tensor) -> Tensor:
    """Return the plain features (N, ...) of images (N, C, H, W), on the encoder's device."""
    device, features = device_of(encoder), RowsInOne(len(images))
    with frozen(encoder), torch.no_grad():
        for part in images.split(AT_ONCE):
            features.add(encoder(part.to(device)))
    return features.tensor


def cut(module: nn.Module, tap: str, image_shape: Shape) -> Halves:
    """Cut a network behind the layer `tap`, and check on noise that the halves equal the whole.

    Each half has only the layers it runs, if the network can be traced; otherwise both contain the
    whole network. A layer that a skip connection passes by cannot be cut: the server would need
    more than the feature.
    """
    tap = _tap(module, tap, image_shape)
    check_layers(module, image_shape, taps=(tap,))
    tried = _awake(module)
    encoder, rest, features = _tried(tried, tap, image_shape)
    if tried is not module:
        encoder, rest = _halved(module, tap, image_shape)
    return Halves(encoder, rest, image_shape, tuple(features.shape[1:]), tap)


def _halved(module: nn.Module, tap: str, image_shape: Shape) -> tuple[nn.Module, nn.Module]:
    return _traced(module, tap) or (_Until(module, tap), _From(module, tap, image_shape))


def _tried(module: nn.Module, tap: str, image_shape: Shape) -> tuple[nn.Module, nn.Module, Tensor]:
    """Cut a network; return both halves, and features of noise if these compute what it does."""
    images = noise_images(module, image_shape, IMAGES)
    encoder, rest = _halved(module, tap, image_shape)
    features = probe(encoder, images)
    if features.ndim < 2 or len(features) != IMAGES:
        raise ModelError(
            f"the layer {tap!r} returns {tuple(features.shape)} for {IMAGES} images: cut behind a "
            "layer that returns one feature per image"
        )
    whole, joined = probe(module, images), probe(rest, features)
    if isinstance(rest, _From):
        rest.blank = images.flip(0)  # with the same features, other images must change nothing
        if not _close(probe(rest, features), joined):
            raise ModelError(
                f"a cut at {tap!r} splits a skip connection: later layers of {class_name(module)} "
                "also read what comes before it; cut behind the block that contains it"
            )
        rest.blank = None
    if not _close(joined, whole):
        raise ModelError(
            f"{class_name(module)} cut at {tap!r} does not compute what the whole network does: "
            "cut it behind another layer"
        )
    return encoder, rest, features


def _awake(module: nn.Module) -> nn.Module:
    """Return a network, or a copy in which no layer multiplies by nearly 0.

    Residual blocks often begin so, and do nothing: cuts inside of them would seem to be right.
    """
    asleep = [
        name
        for name, parameter in module.named_parameters()
        if parameter.numel() and not name.endswith("bias") and not parameter.abs().max() >= ASLEEP
    ]
    if asleep:
        module = copy.deepcopy(module)
        with torch.no_grad():
            for name in asleep:
                weight = module.get_parameter(name)
                weight.fill_(1 / weight[0].numel() if weight.ndim else 1)  # a mean, of no large sum
    return module


def check_later(target: Target, given: str) -> None:
    """Refuse a target that is not cut behind the layer `given`."""
    layer = _tap(target.module, given, target.image_shape)
    check_layers(target.module, target.image_shape, taps=(layer,))
    finished = [call.name for call in trace(target.module, target.image_shape)[0]]
    if finished.index(target.cut) <= finished.index(layer):
        raise _not_later(target, given)


def check_moved(target: Target, given: str) -> None:
    """Refuse a later cut whose feature is the one behind the layer `given`.

    A stage ends after its last block, with the same output.
    """
    check_later(target, given)
    module, shape = _awake(target.module), target.image_shape
    images = noise_images(module, shape, IMAGES)
    one, other = (probe(cut(module, layer, shape).encoder, images) for layer in (given, target.cut))
    if one.shape == other.shape and _close(one, other):
        raise _not_later(target, given)


def _not_later(target: Target, given: str) -> ModelError:
    return ModelError(
        f"features must leave behind a layer after {given!r} (target.cut), got "
        f"{target.cut!r}: name a later layer, or change target.cut"
    )


def halves(target: Target) -> Halves:
    """Cut a target at its `cut`."""
    if not target.cut:
        raise ModelError(
            "this target is not cut: name the layer whose features leave the device with target.cut"
        )
    return cut(target.module, target.cut, target.image_shape)


def channel_axis(feature_shape: tuple[int, ...], image_shape: Shape = SQUARE) -> int:
    """Return the axis of the channels of a feature.

    It is that of a vector (C,), the last of tokens (T, C), and the first of maps (C, H, W). Some
    transformers use maps (H, W, C): if the first two sizes have the proportions of the image and
    the last two have not. If all three are equal, channels come first.
    """
    if len(feature_shape) != 3:
        return 1 if len(feature_shape) == 2 else 0
    first, second, third = feature_shape
    _, high, wide = image_shape
    return 2 if first * wide == second * high and second * wide != third * high else 0


def layer_name(module: nn.Module, tap: str) -> str:
    """Return a layer's name from outside a `Preprocess`, where it begins with `net.`."""
    if not isinstance(tap, str):
        raise ModelError(
            f"expected the name of a layer to cut behind, got {tap!r}: named_modules() lists them"
        )
    known = dict(module.named_modules())
    nested = tap not in known and isinstance(module, Preprocess) and f"net.{tap}" in known
    return f"net.{tap}" if nested else tap


def _tap(module: nn.Module, layer: str, image_shape: Shape) -> str:
    """Return the full name of a layer; "head" is the layer that returns the logits."""
    tap = layer_name(module, layer)
    if layer != HEAD:
        return tap
    calls, logits = trace(module, image_shape)
    named = [call for call in calls if call.name == tap]
    if named and named[-1].is_logits(logits):
        return tap
    last = find_head(module, image_shape)
    if named:
        raise ModelError(
            f"{HEAD!r} stands for the last layer, here {last!r}, and {class_name(module)} has "
            f"another layer of that name: cut at {last!r}, or rename that layer"
        )
    return last


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= ROUNDING * other.abs().max())


class _Tracer(fx.Tracer):
    """Traces into every module that has sub-modules, except the one to cut behind."""

    def __init__(self, tap: str) -> None:
        super().__init__()
        self.tap = tap

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name == self.tap
            or not any(m.children())
            or super().is_leaf_module(m, module_qualified_name)
        )


def _traced(module: nn.Module, tap: str) -> tuple[nn.Module, nn.Module] | None:
    """Return both halves as graphs; None if tracing fails or the second needs more inputs."""
    try:
        with frozen(module):  # the graphs keep what the network does in evaluation mode
            first, second = (_Tracer(tap).trace(module) for _ in range(2))
    except (*MODEL_ERRORS, NameError, fx.proxy.TraceError):
        return None
    end, begin = _node(first, tap), _node(second, tap)
    return None if end is None or begin is None else _graphs(module, first, second, end, begin)


def _node(graph: fx.Graph, tap: str) -> fx.Node | None:
    calls = (node for node in graph.nodes if node.op == "call_module")
    return next((node for node in calls if node.target == tap), None)


def _graphs(
    module: nn.Module, first: fx.Graph, second: fx.Graph, end: fx.Node, begin: fx.Node
) -> tuple[nn.Module, nn.Module] | None:
    for node in [node for node in first.nodes if node.op == "output"]:
        first.erase_node(node)
    first.output(end)
    with second.inserting_before(begin):
        feature = second.placeholder("features")
        # A layer that works in place must not write into the caller's tensor.
        copy = second.call_method("clone", (feature,))
    begin.replace_all_uses_with(copy)
    for graph in (first, second):
        graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    inputs = [node for node in second.nodes if node.op == "placeholder" and node is not feature]
    if any(node.users for node in inputs):
        return None
    for node in inputs:
        second.erase_node(node)
    return fx.GraphModule(module, first, "Encoder"), fx.GraphModule(module, second, "Rest")


class _Reached(Exception):
    """Ends a forward pass at the layer to cut behind."""


class _Until(nn.Module):
    """A network up to a layer: runs the whole and stops there."""

    def __init__(self, whole: nn.Module, tap: str) -> None:
        super().__init__()
        self.whole = whole
        self.tap = tap

    def forward(self, images: Tensor) -> Tensor:
        outputs: list[Tensor] = []

        def stop(_: nn.Module, args: Any, output: Tensor) -> None:
            outputs.append(output)
            raise _Reached

        handle = self.whole.get_submodule(self.tap).register_forward_hook(stop)
        try:
            self.whole(images)
        except _Reached:
            pass
        finally:
            handle.remove()
        return outputs[0]


class _From(nn.Module):
    """A network from a layer on: runs the whole on blank images and replaces the features."""

    def __init__(self, whole: nn.Module, tap: str, image_shape: Shape) -> None:
        super().__init__()
        self.whole = whole
        self.tap = tap
        self.image_shape = image_shape
        self.blank: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        blank = self.blank
        if blank is None:
            blank = features.new_zeros(len(features), *self.image_shape)
        layer = self.whole.get_submodule(self.tap)
        handle = layer.register_forward_hook(lambda *_: features.clone())
        try:
            return self.whole(blank)
        finally:
            handle.remove()
