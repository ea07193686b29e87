"""Split inference: a network cut at a layer into the part that runs on the device and the part that runs on the server."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from frostglass.core.errors import ModelError
from frostglass.core.types import Halves, Shape, Target
from frostglass.models.base import MODEL_ERRORS, Preprocess, inner, noise_images, probe
from frostglass.models.taps import check_layers
from frostglass.runtime.freezing import frozen

IMAGES = 2
SQUARE: Shape = (1, 1, 1)  # stands for pictures that are as high as wide
ROUNDING = 1e-4  # of the largest logit: the two halves may round otherwise than the whole


def cut(module: nn.Module, tap: str, image_shape: Shape) -> Halves:
    """Cut a network behind the layer named `tap`; the two halves together are the whole, which is tried on noise.

    Each half has the layers it runs and no others, if the network's Python can be traced. One that cannot is carried whole on both sides. A layer that later ones
    are led around (by a skip connection) is no place to cut: the server would need more than the feature.
    """
    tap = layer_name(module, tap)
    check_layers(module, image_shape, taps=(tap,))
    images = noise_images(module, image_shape, IMAGES)
    encoder, rest = _traced(module, tap) or (_Until(module, tap), _From(module, tap, image_shape))
    features = probe(encoder, images)
    if features.ndim < 2 or len(features) != IMAGES:
        raise ModelError(
            f"the layer {tap!r} puts out {tuple(features.shape)} for {IMAGES} images: cut behind a layer that makes one feature an image"
        )
    whole, joined = probe(module, images), probe(rest, features)
    if isinstance(rest, _From):
        rest.blank = images.flip(
            0
        )  # other pictures in front of the same features must change nothing
        if not _alike(probe(rest, features), joined):
            raise ModelError(
                f"a cut at {tap!r} splits a skip connection: later layers of {type(inner(module)).__name__} also read what came before it; "
                "cut behind the block that holds it"
            )
        rest.blank = None
    if not _alike(joined, whole):
        raise ModelError(
            f"{type(inner(module)).__name__} cut at {tap!r} answers otherwise than the whole network: cut it behind another layer"
        )
    return Halves(encoder, rest, image_shape, tuple(features.shape[1:]), tap)


def halves(target: Target) -> Halves:
    """A target that is meant to be cut, cut."""
    if not target.cut:
        raise ModelError(
            "this target is not cut: name the layer behind which its features leave the device with target.cut"
        )
    return cut(target.module, target.cut, target.image_shape)


def channel_axis(feature_shape: tuple[int, ...], image_shape: Shape = SQUARE) -> int:
    """Which number of a feature's shape counts its channels: that of a vector (C,), the last of tokens (T, C), the first of maps (C, H, W).

    Some transformers keep the channels of maps last, (H, W, C). That is so where the first two numbers have the proportions of the picture and the last two
    have not; where all three are alike, channels come first.
    """
    if len(feature_shape) != 3:
        return 1 if len(feature_shape) == 2 else 0
    first, second, third = feature_shape
    _, high, wide = image_shape
    return 2 if first * wide == second * high and second * wide != third * high else 0


def layer_name(module: nn.Module, tap: str) -> str:
    """A layer's name as seen from outside a `Preprocess`, where it stands under `net`."""
    if not isinstance(tap, str):
        raise ModelError(
            f"expected the name of a layer to cut behind, got {tap!r}: named_modules() lists them"
        )
    known = dict(module.named_modules())
    return (
        f"net.{tap}"
        if tap not in known and isinstance(module, Preprocess) and f"net.{tap}" in known
        else tap
    )


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= ROUNDING * other.abs().max())


class _Tracer(fx.Tracer):
    """Looks into every module that is made of others, apart from the one to cut behind."""

    def __init__(self, tap: str):
        super().__init__()
        self.tap = tap

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name == self.tap
            or not any(m.children())
            or super().is_leaf_module(m, module_qualified_name)
        )


def _traced(module: nn.Module, tap: str) -> tuple[nn.Module, nn.Module] | None:
    """Both halves as graphs; None if the network cannot be traced, or if its second half reads more than the feature."""
    try:
        with frozen(module):  # what a network does in evaluation is what stays in the graphs
            first, second = (_Tracer(tap).trace(module) for _ in range(2))
    except (*MODEL_ERRORS, NameError, fx.proxy.TraceError):
        return None
    return (
        None
        if (ends := _ends(first, second, tap)) is None
        else _graphs(module, first, second, *ends)
    )


def _ends(first: fx.Graph, second: fx.Graph, tap: str) -> tuple[fx.Node, fx.Node] | None:
    found = [
        next(
            (node for node in graph.nodes if node.op == "call_module" and node.target == tap), None
        )
        for graph in (first, second)
    ]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _graphs(
    module: nn.Module, first: fx.Graph, second: fx.Graph, end: fx.Node, begin: fx.Node
) -> tuple[nn.Module, nn.Module] | None:
    for node in _outputs(first):
        first.erase_node(node)
    first.output(end)
    with second.inserting_before(begin):
        feature = second.placeholder("features")
        own = second.call_method(
            "clone", (feature,)
        )  # a layer that works in place must not write into what the caller holds
    begin.replace_all_uses_with(own)
    for graph in (first, second):
        graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    given = [node for node in second.nodes if node.op == "placeholder" and node is not feature]
    if any(node.users for node in given):
        return None
    for node in given:
        second.erase_node(node)
    return fx.GraphModule(module, first, "Encoder"), fx.GraphModule(module, second, "Rest")


def _outputs(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in list(graph.nodes) if node.op == "output")


class _Reached(Exception):
    """Ends a forward pass at the layer to cut behind."""


class _Until(nn.Module):
    """A network up to a layer, by running it and stopping there."""

    def __init__(self, whole: nn.Module, tap: str):
        super().__init__()
        self.whole = whole
        self.tap = tap

    def forward(self, images: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def stop(_: nn.Module, args: tuple, output: Any) -> None:
            seen.append(output)
            raise _Reached

        handle = self.whole.get_submodule(self.tap).register_forward_hook(stop)
        try:
            self.whole(images)
        except _Reached:
            pass
        finally:
            handle.remove()
        return seen[0]


class _From(nn.Module):
    """A network from a layer on, by running it on blank pictures and putting the features in their place."""

    def __init__(self, whole: nn.Module, tap: str, image_shape: Shape):
        super().__init__()
        self.whole = whole
        self.tap = tap
        self.image_shape = image_shape
        self.blank: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        handle = self.whole.get_submodule(self.tap).register_forward_hook(
            lambda *_: features.clone()
        )
        try:
            return self.whole(
                features.new_zeros(len(features), *self.image_shape)
                if self.blank is None
                else self.blank
            )
        finally:
            handle.remove()
