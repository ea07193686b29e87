"""Networks from elsewhere: an ONNX graph, a TorchScript archive, or a function of the user's."""

import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostglass.core.errors import ConfigError, FrostglassError, ModelError
from frostglass.core.special_files import refuse_special
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.models.build import source as code_of
from frostglass.models.build import users_factory
from frostglass.models.checkpoint import load_weights
from frostglass.runtime.seeding import seeded

FILES = ("onnx", "torchscript")
OPSET = 17  # the newest ONNX operator set that onnx2torch supports almost completely


def split_source(source: str) -> tuple[str, str]:
    """Split at the colon: "onnx" or "torchscript" and a path, or a module and a function."""
    kind, _, place = source.partition(":")
    if not kind or not place:
        likely = {".onnx": "onnx", ".pt": "torchscript"}.get(Path(source).suffix)
        hint = f": did you mean {likely}:{source}?" if likely else ""
        raise ValueError(
            f"source: expected onnx:FILE, torchscript:FILE or MODULE:FUNCTION, got {source!r}{hint}"
        )
    return kind, place


def check_trust(source: str, *, trust: bool) -> None:
    """Refuse a TorchScript archive that the user does not trust: reading it can run its code."""
    kind, place = split_source(source)
    if kind == "torchscript" and not trust:
        raise ValueError(
            f"source: {place} is a program, and reading it can write files: export the network as "
            "ONNX, or say that you trust its author, by trust = true (--trust with --prior)"
        )


def files_of(source: str, weights: str | None) -> list[Path]:
    """List the files of a network: of its graph, or the code of its function and its weights."""
    kind, place = split_source(source)
    if kind not in FILES:
        return [Path(path) for path in (code_of(source), weights) if path]
    path = Path(place)
    if kind == "torchscript" or not path.is_file():
        return [path]  # reading reports a missing file
    return [path, *_outside(path, _read_onnx(path, whole=False))]


def _outside(path: Path, model: Any) -> list[Path]:
    """List the files beside an ONNX file that hold its tensors; refuse pipes and devices."""
    names = {
        entry.value
        for part in (model.graph, *model.functions)
        for tensor in _tensors(part)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files = [path.parent / name for name in sorted(names)]
    for file in files:
        refuse_special(file)
    return files


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield every tensor of a graph or function: weights, and those in attributes of nodes."""
    yield from getattr(graph, "initializer", ())
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.initializer:
                    yield from _tensors(inner)


def load_network(source: str, weights: str | None = None) -> nn.Module:
    """Return the network of a source in evaluation mode and single precision."""
    kind, place = split_source(source)
    if kind in FILES and not Path(place).is_file():
        name = "ONNX" if kind == "onnx" else "TorchScript"
        raise ConfigError(f"no file at {place}: give the path of the generator's {name} file")
    readers = {"onnx": _onnx, "torchscript": _torchscript}
    network = readers[kind](Path(place)) if kind in readers else _called(source)
    if weights:
        load_weights(network, weights)
    return network.float().eval()


def _called(source: str) -> nn.Module:
    function = users_factory(*split_source(source))
    if needed := [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]:
        raise ConfigError(
            f"{source} is called without arguments, and wants {', '.join(needed)}: give them "
            "defaults"
        )
    try:
        with seeded(0, "generator", source):
            network = function()
    except FrostglassError:
        raise
    except (*MODEL_ERRORS, OSError) as error:
        raise ModelError(f"{source} failed: {first_line(error)}") from error
    if not isinstance(network, nn.Module):
        raise ModelError(f"{source} gave a {type(network).__name__}: expected a torch.nn.Module")
    return network


def _torchscript(path: Path) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # TorchScript's deprecation: see docs
            network = torch.jit.load(path, map_location="cpu")
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{path} is not a TorchScript archive ({first_line(error).partition('. ')[0]}): save "
            "one with torch.jit.trace or torch.jit.script, not with torch.save"
        ) from error
    if not all(hasattr(part, "training") for part in network.modules()):
        raise ModelError(
            f"{path} was frozen (torch.jit.freeze), so its weights cannot be moved or counted: "
            "save it before freezing"
        )
    return network


def onnx_packages() -> tuple[Any, Any]:
    """Import onnx and onnx2torch on demand: the extra may be missing."""
    try:
        import onnx
        import onnx.shape_inference
        import onnx.version_converter
        import onnx2torch
    except ImportError as error:
        raise ConfigError(
            f"ONNX files need onnx and onnx2torch ({first_line(error)}): install them with "
            "`pip install 'frostglass[onnx]'`"
        ) from error
    return onnx, onnx2torch


def _read_onnx(path: Path, *, whole: bool = True) -> Any:
    onnx, _ = onnx_packages()
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
        if whole:
            _outside(path, model)
            onnx.load_external_data_for_model(model, str(path.parent))
        return model
    except FrostglassError:
        raise
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{path} is not a whole ONNX file: {first_line(error)}") from error


def onnx_input(path: Path) -> tuple[int, ...] | None:
    """Return the shape of one input as an ONNX file states it; None if it is not complete."""
    inputs = _inputs(_read_onnx(path, whole=False).graph)
    dimensions = inputs[0].type.tensor_type.shape.dim if inputs else ()
    sides = tuple(dimension.dim_value for dimension in dimensions)[1:]
    return sides if sides and all(sides) else None


def _inputs(graph: Any) -> list[Any]:
    """List a graph's inputs without its weights, which old files list there too."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def _onnx(path: Path) -> nn.Module:
    graph = _read_onnx(path)
    for what, values in (("takes", _inputs(graph.graph)), ("gives", graph.graph.output)):
        if len(values) != 1:
            names = ", ".join(value.name for value in values) or "nothing"
            raise ModelError(
                f"{path} {what} {len(values)} tensors ({names}): export a network that takes "
                "latents alone and gives images alone"
            )
    try:
        return _converted(graph)
    except NotImplementedError as error:
        opset = max((one.version for one in graph.opset_import if not one.domain), default=0)
        if opset <= OPSET:
            raise ModelError(
                f"{path} has an operator that onnx2torch does not know: {first_line(error)}"
            ) from error
        return _converted_down(path, graph, opset, first_line(error))
    except _conversion_errors() as error:
        raise ModelError(f"onnx2torch cannot read {path}: {first_line(error)}") from error


def _conversion_errors() -> tuple[type[Exception], ...]:
    """Return what onnx and onnx2torch raise for graphs that are damaged or unknown to them."""
    onnx, _ = onnx_packages()
    own = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError)
    return (*MODEL_ERRORS, *own, onnx.version_converter.ConvertError)


def _converted(graph: Any) -> nn.Module:
    _, onnx2torch = onnx_packages()
    try:
        return onnx2torch.convert(_with_plain_names(graph))
    except NotImplementedError as error:
        if "BatchNorm operation" not in str(error):
            raise
        return onnx2torch.convert(_with_plain_names(_with_free_norms(graph)))


def _converted_down(path: Path, graph: Any, opset: int, missing: str) -> nn.Module:
    """Convert a graph with operators too new for onnx2torch, rewritten by onnx to older ones."""
    onnx, _ = onnx_packages()
    try:
        return _converted(onnx.version_converter.convert_version(graph, OPSET))
    except _conversion_errors() as error:
        raise ModelError(
            f"{path} uses ONNX operators of opset {opset}, which onnx2torch does not know "
            f"({missing}) and onnx cannot rewrite ({first_line(error)}): export it by "
            f"torch.onnx.export(..., dynamo=False, opset_version={OPSET}), or use torchscript: or "
            "MODULE:FUNCTION"
        ) from error


def _with_plain_names(graph: Any) -> Any:
    """Number the nodes: onnx2torch runs Python code with their names, which may hold anything."""
    for number, node in enumerate(graph.graph.node):
        node.name = f"node_{number}"
    return graph


def _with_free_norms(graph: Any) -> Any:
    """Let each batch norm take its scale from a node.

    onnx2torch then uses a batch norm for any number of axes, which a graph may leave open.
    """
    onnx, _ = onnx_packages()
    weights = {tensor.name for tensor in graph.graph.initializer}
    norms = [
        node
        for node in graph.graph.node
        if node.op_type == "BatchNormalization" and node.input[1] in weights
    ]
    for number, norm in enumerate(norms):
        passed = f"scale passed on {number}"
        graph.graph.node.insert(0, onnx.helper.make_node("Identity", [norm.input[1]], [passed]))
        norm.input[1] = passed
    return graph
