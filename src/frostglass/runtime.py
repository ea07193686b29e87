"""Seeds, threads and the promise to leave the caller's networks as they were."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are; the CPU for a module without any."""
    return next((tensor.device for tensor in module.state_dict().values()), torch.device("cpu"))


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
