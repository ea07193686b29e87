"""Fold batch norms into the layers before them, to save a pass over the data."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Batch norms by the layers they can be folded into. Exact types only: a subclass, such as a
# parametrised layer, may do more than its base.
FOLDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: nn.BatchNorm2d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.Linear: nn.BatchNorm1d,
}


@contextmanager
def folded(*modules: nn.Module) -> Iterator[None]:
    """Let layers include the batch norm that follows them in an nn.Sequential, inside the block.

    W' = s W and b' = s (b - mean) + shift with s = scale / √(variance + ε) replace both, and the
    batch norm returns its input. This holds for frozen layers that are used in one place; others
    are left alone. Only the `forward` of the two layers is replaced: modules, weights, buffers and
    `state_dict` stay the same. Where one of the two has a hook, both run as usual. A copy of a
    network that is made inside the block would call the original's layers.
    """
    pairs = list(_foldable(modules))
    try:
        for layer, norm, forward in pairs:
            vars(layer)["forward"] = forward
            vars(norm)["forward"] = _skipped(layer, norm)
        yield
    finally:
        for layer, norm, _ in pairs:
            for part in (layer, norm):
                vars(part).pop("forward", None)  # the method of the class is used again


def _foldable(
    modules: tuple[nn.Module, ...],
) -> Iterator[tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]]:
    """Yield layers and their batch norms, with the function that replaces both."""
    if any(isinstance(part, nn.DataParallel) for module in modules for part in module.modules()):
        return  # its replicas would call the layers they are copies of
    places = Counter(
        id(part) for module in modules for _, part in module.named_modules(remove_duplicate=False)
    )
    for row in (part for module in modules for part in module.modules()):
        if not isinstance(row, nn.Sequential) or not _own_forward(row, nn.Sequential):
            continue
        for layer, norm in itertools.pairwise(row):
            if places[id(layer)] == places[id(norm)] == 1 and _fit(layer, norm):
                weight, bias = _joined(layer, norm)
                # A tiny variance can make the product infinite, where the two layers are not.
                if weight.isfinite().all() and bias.isfinite().all():
                    yield layer, norm, _both(layer, norm, weight, bias)


def _own_forward(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Return whether a module runs the `forward` of the class."""
    return type(module).forward is cls.forward and "forward" not in vars(module)


def _fit(layer: Any, norm: Any) -> bool:
    """Return whether a batch norm is a fixed linear map that can be folded into its layer.

    It must be in evaluation mode, complete and frozen, with one dtype and device for both.
    """
    if type(norm) is not FOLDS.get(type(layer)) or norm.training or not norm.track_running_stats:
        return False
    if not _own_forward(layer, type(layer)) or not _own_forward(norm, type(norm)):
        return False
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers:
        return False  # pruning or weight norm computes the weight at each call
    needed = (layer.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    tensors = [tensor for tensor in (*needed, layer.bias) if isinstance(tensor, Tensor)]
    if any(tensor is None for tensor in needed) or any(tensor.requires_grad for tensor in tensors):
        return False
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    return bool(norm.num_features == outputs) and len(kinds) == 1


def _joined(layer: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and bias that replace both, in the layout of the layer's own."""
    with torch.no_grad():
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        bias = norm.bias - norm.running_mean * scale
        if layer.bias is not None:
            bias = bias + layer.bias * scale
        if isinstance(layer, nn.ConvTranspose2d):
            # (inputs, outputs of a group, ...): each group of inputs has its own outputs.
            grouped = layer.weight.unflatten(0, (layer.groups, -1))
            weight = (grouped * scale.reshape(layer.groups, 1, -1, 1, 1)).flatten(0, 1)
            if layer.weight.is_contiguous(memory_format=torch.channels_last):
                weight = weight.contiguous(memory_format=torch.channels_last)
            return weight, bias
        return layer.weight * scale.reshape(-1, *[1] * (layer.weight.ndim - 1)), bias


def _apart(layer: Any, norm: Any, data: Tensor) -> bool:
    """Return whether the two must run separately: one has a hook, or the data is not a batch."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(vars(part)[kind] for part in (layer, norm) for kind in kinds)
    return hooked or data.ndim != layer.weight.ndim


def _both(layer: Any, norm: Any, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(data: Tensor) -> Tensor:
        if _apart(layer, norm, data):
            return type(layer).forward(layer, data)
        if isinstance(layer, nn.Linear):
            return F.linear(data, weight, bias)
        if isinstance(layer, nn.Conv2d):
            return layer._conv_forward(data, weight, bias)
        shape = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return F.conv_transpose2d(data, weight, bias, *shape)

    return forward


def _skipped(layer: Any, norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda data: type(norm).forward(norm, data) if _apart(layer, norm, data) else data
