"""Seeds, threads and the promise to leave the caller's networks as they were."""

import ctypes
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Batch norms by the layers they can be folded into. A subclass may do more than its base, so only these very types count; what is parametrised is a subclass.
FOLDS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: nn.BatchNorm2d, nn.ConvTranspose2d: nn.BatchNorm2d, nn.Linear: nn.BatchNorm1d}

HEAP = (
    2**27
)  # bytes; with `keep_memory` the C library takes larger blocks from the system and gives them back at once, smaller ones from a heap it keeps
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # what glibc's mallopt calls M_MMAP_THRESHOLD and M_TRIM_THRESHOLD


def seed_for(base: int, *path: str | int) -> int:
    """A seed for one purpose, derived from the base seed and the purpose's path.

    Every random draw of the package comes from here, so no draw depends on the order in which work is done.
    """
    text = "/".join([str(base), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_for(base: int, *path: str | int) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(base, *path))


def default_device() -> torch.device:
    """Where networks live: FROSTGLASS_DEVICE if it is set, else a CUDA device if there is one, else the CPU."""
    return torch.device(os.environ.get("FROSTGLASS_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def living_on(device: torch.device) -> Iterator[None]:
    """Let networks live on a device inside the block, whatever there is else."""
    before = os.environ.get("FROSTGLASS_DEVICE")
    os.environ["FROSTGLASS_DEVICE"] = str(device)
    try:
        yield
    finally:
        if before is None:
            del os.environ["FROSTGLASS_DEVICE"]
        else:
            os.environ["FROSTGLASS_DEVICE"] = before


def keep_memory() -> None:
    """Let this process keep the memory it frees: every step of a search or a training asks for the same blocks again, and those of some
    size would else come from the system each time, page by page. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # Older versions refuse more than 32 MiB. The second setting alone would do harm: it fixes the first at its small default.
    if mallopt is not None and any(mallopt(MMAP_THRESHOLD, most) for most in (HEAP, 2**25)):
        mallopt(TRIM_THRESHOLD, 2**31 - 1)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are; the CPU for a module without any."""
    return next((tensor.device for tensor in module.state_dict().values()), torch.device("cpu"))


def weights_digest(module: nn.Module) -> bytes:
    """A hash of a network's weights and buffers by their names."""
    total = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.digest()


@contextmanager
def seeded(base: int, *path: str | int) -> Iterator[None]:
    """Run code that insists on torch's global generator (initialisers, dropout) under a derived seed; the caller's state survives."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed_for(base, *path))
        yield


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode and no weight gradients inside; modes, flags, gradients, buffers and global RNG as before afterwards, also after an exception."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    flags = [(p, p.requires_grad, p.grad) for module in modules for p in module.parameters()]
    buffers = [(b, b.clone()) for module in modules for b in module.buffers()]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            for part, _ in modes:
                part.training = False
            for parameter, _, _ in flags:
                parameter.requires_grad_(False)
            yield
        finally:
            for part, training in modes:
                part.training = training
            for parameter, requires_grad, grad in flags:
                parameter.requires_grad_(requires_grad)
                parameter.grad = grad
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextmanager
def channels_last(*modules: nn.Module) -> Iterator[None]:
    """Weights of convolutions laid out channel by channel inside the block, which is faster; the very tensors from before afterwards."""
    before = [(tensor, tensor.data) for module in modules for tensor in (*module.parameters(), *module.buffers()) if tensor.ndim == 4]
    try:
        for tensor, data in before:
            tensor.data = data.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


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


def _foldable(modules: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layers and their batch norms, with the function that does the work of both."""
    if any(isinstance(part, nn.DataParallel) for module in modules for part in module.modules()):
        return  # its replicas would go on calling the layers they are copies of
    places = Counter(id(part) for module in modules for _, part in module.named_modules(remove_duplicate=False))
    for row in (part for module in modules for part in module.modules()):
        if not isinstance(row, nn.Sequential) or type(row).forward is not nn.Sequential.forward or "forward" in vars(row):
            continue
        for layer, norm in itertools.pairwise(row):
            if places[id(layer)] == places[id(norm)] == 1 and _fit(layer, norm):
                weight, bias = _joined(layer, norm)
                if weight.isfinite().all() and bias.isfinite().all():  # a tiny variance can blow weights up that never met in one number
                    yield layer, norm, _both(layer, norm, weight, bias)


def _fit(layer: Any, norm: Any) -> bool:
    """Whether a batch norm is a fixed linear map that its layer can take over: evaluated, whole, frozen, of one kind of number on one device."""
    if type(layer) not in FOLDS or type(norm) is not FOLDS[type(layer)] or norm.training or not norm.track_running_stats:
        return False
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers or "forward" in vars(layer) or "forward" in vars(norm):
        return False  # a weight that is computed at each call, by pruning or by weight norm
    needed = (layer.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    tensors = [tensor for tensor in (*needed, layer.bias) if isinstance(tensor, Tensor)]
    if any(tensor is None for tensor in needed) or any(tensor.requires_grad for tensor in tensors):
        return False
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return bool(norm.num_features == outputs) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1


def _joined(layer: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias that do the work of both, in the layout of the layer's own."""
    with torch.no_grad():
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        bias = norm.bias - norm.running_mean * scale
        if layer.bias is not None:
            bias = bias + layer.bias * scale
        if isinstance(layer, nn.ConvTranspose2d):  # (inputs, outputs of a group, ...): each group of inputs has outputs of its own
            by_group = layer.weight.unflatten(0, (layer.groups, -1)) * scale.reshape(layer.groups, 1, -1, 1, 1)
            weight = by_group.flatten(0, 1)
            if layer.weight.is_contiguous(memory_format=torch.channels_last):
                weight = weight.contiguous(memory_format=torch.channels_last)
            return weight, bias
        return layer.weight * scale.reshape(-1, *[1] * (layer.weight.ndim - 1)), bias


def _apart(layer: Any, norm: Any, data: Tensor) -> bool:
    """Whether the two must work one after the other: somebody watches between them, or the data has other axes than a batch of rows or maps."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return data.ndim != layer.weight.ndim or any(getattr(part, kind) for part in (layer, norm) for kind in hooks)


def _both(layer: Any, norm: Any, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(data: Tensor) -> Tensor:
        if _apart(layer, norm, data):
            return type(layer).forward(layer, data)
        if isinstance(layer, nn.Linear):
            return F.linear(data, weight, bias)
        if isinstance(layer, nn.Conv2d):
            return layer._conv_forward(data, weight, bias)
        return F.conv_transpose2d(data, weight, bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)

    return forward


def _passing(layer: Any, norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda data: type(norm).forward(norm, data) if _apart(layer, norm, data) else data


@contextmanager
def capture(module: nn.Module, names: tuple[str, ...], *, inputs: bool = False) -> Iterator[dict[str, Tensor]]:
    """Collect what the named sub-modules put out (or, with `inputs`, take in) during forward passes inside the block."""
    seen: dict[str, Tensor] = {}
    parts = dict(module.named_modules())

    def keep_input(name: str):
        return lambda _, args: seen.__setitem__(name, args[0])

    def keep_output(name: str):
        return lambda _, args, output: seen.__setitem__(name, output)

    handles = [
        parts[name].register_forward_pre_hook(keep_input(name)) if inputs else parts[name].register_forward_hook(keep_output(name))
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
        return output.detach() + (args[0] - args[0].detach())  # adds zero: far out, x + (tanh x - x) would lose the digits of tanh x

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


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as named tensors, so that a checkpoint needs no pickle."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}/{name}": torch.as_tensor(value) for index, slots in state.items() for name, value in slots.items() if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        index, name = path.split("/", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under longer names: several networks share one checkpoint file."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def under_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors `with_prefix` put under `prefix`, by their own names."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
