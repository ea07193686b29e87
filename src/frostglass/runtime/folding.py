"""Seeds, threads and the promise to leave the caller's networks as they were."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Batch norms by the layers they can be folded into. A subclass may do more than its base, so only these very types count; what is parametrised is a subclass.
FOLDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: nn.BatchNorm2d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.Linear: nn.BatchNorm1d,
}


@contextmanager
def folded(*modules: nn.Module) -> Iterator[None]:
    """Inside the block a layer also does the work of the batch norm that follows it in an nn.Sequential, in one pass over the data where there were two.

    W' = s W and b' = s (b - mean) + shift with s = scale / √(variance + ε) stand for both, and the batch norm passes on what it gets. That holds for
    frozen layers that are used in one place; others are left alone. Only what the two layers do when called is exchanged: modules, weights and
    buffers stay where they are, and so does `state_dict`. While somebody watches one of the two through a hook, both do their own work. A copy of a network that is
    made inside the block would go on calling the original's layers.
    """
    pairs = list(_foldable(modules))
    try:
        for layer, norm, together in pairs:
            layer.forward = together  # type: ignore[method-assign]
            norm.forward = _passing(layer, norm)  # type: ignore[method-assign]
        yield
    finally:
        for layer, norm, _ in pairs:
            for part in (layer, norm):
                vars(part).pop("forward", None)  # the class's own is found again


def _foldable(
    modules: tuple[nn.Module, ...],
) -> Iterator[tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layers and their batch norms, with the function that does the work of both."""
    if any(isinstance(part, nn.DataParallel) for module in modules for part in module.modules()):
        return  # its replicas would go on calling the layers they are copies of
    places = Counter(
        id(part) for module in modules for _, part in module.named_modules(remove_duplicate=False)
    )
    for row in (part for module in modules for part in module.modules()):
        if (
            not isinstance(row, nn.Sequential)
            or type(row).forward is not nn.Sequential.forward
            or "forward" in vars(row)
        ):
            continue
        for layer, norm in itertools.pairwise(row):
            if places[id(layer)] == places[id(norm)] == 1 and _fit(layer, norm):
                weight, bias = _joined(layer, norm)
                if (
                    weight.isfinite().all() and bias.isfinite().all()
                ):  # a tiny variance can blow weights up that never met in one number
                    yield layer, norm, _both(layer, norm, weight, bias)


def _fit(layer: Any, norm: Any) -> bool:
    """Whether a batch norm is a fixed linear map that its layer can take over: evaluated, whole, frozen, of one kind of number on one device."""
    if (
        type(layer) not in FOLDS
        or type(norm) is not FOLDS[type(layer)]
        or norm.training
        or not norm.track_running_stats
    ):
        return False
    if (
        set(layer._parameters) != {"weight", "bias"}
        or layer._buffers
        or "forward" in vars(layer)
        or "forward" in vars(norm)
    ):
        return False  # a weight that is computed at each call, by pruning or by weight norm
    needed = (layer.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    tensors = [tensor for tensor in (*needed, layer.bias) if isinstance(tensor, Tensor)]
    if any(tensor is None for tensor in needed) or any(tensor.requires_grad for tensor in tensors):
        return False
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return (
        bool(norm.num_features == outputs)
        and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
    )


def _joined(layer: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias that do the work of both, in the layout of the layer's own."""
    with torch.no_grad():
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        bias = norm.bias - norm.running_mean * scale
        if layer.bias is not None:
            bias = bias + layer.bias * scale
        if isinstance(
            layer, nn.ConvTranspose2d
        ):  # (inputs, outputs of a group, ...): each group of inputs has outputs of its own
            by_group = layer.weight.unflatten(0, (layer.groups, -1)) * scale.reshape(
                layer.groups, 1, -1, 1, 1
            )
            weight = by_group.flatten(0, 1)
            if layer.weight.is_contiguous(memory_format=torch.channels_last):
                weight = weight.contiguous(memory_format=torch.channels_last)
            return weight, bias
        return layer.weight * scale.reshape(-1, *[1] * (layer.weight.ndim - 1)), bias


def _apart(layer: Any, norm: Any, data: Tensor) -> bool:
    """Whether the two must work one after the other: somebody watches between them, or the data has other axes than a batch of rows or maps."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return data.ndim != layer.weight.ndim or any(
        getattr(part, kind) for part in (layer, norm) for kind in hooks
    )


def _both(layer: Any, norm: Any, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(data: Tensor) -> Tensor:
        if _apart(layer, norm, data):
            return type(layer).forward(layer, data)
        if isinstance(layer, nn.Linear):
            return F.linear(data, weight, bias)
        if isinstance(layer, nn.Conv2d):
            return layer._conv_forward(data, weight, bias)
        return F.conv_transpose2d(
            data,
            weight,
            bias,
            layer.stride,
            layer.padding,
            layer.output_padding,
            layer.groups,
            layer.dilation,
        )

    return forward


def _passing(layer: Any, norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda data: type(norm).forward(norm, data) if _apart(layer, norm, data) else data
