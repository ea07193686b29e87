"""Named tensors: hashes of weights, optimizer states, and prefixes of names."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

Part = nn.Module | torch.optim.Optimizer


def weights_digest(module: nn.Module) -> bytes:
    """Return a hash of a network's weights and buffers by their names."""
    return tensors_digest(module.state_dict())


def tensors_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a hash of the names and bytes of tensors, in their order."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        total.update(flat.view(torch.uint8).numpy().data)
    return total.digest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as named tensors, so that a checkpoint needs no pickle."""
    return {
        f"{index}/{name}": torch.as_tensor(value)
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned, in the memory layout of the weights.

    An optimizer keeps its state in that layout, and the layout decides how a step is rounded.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        index, name = path.split("/", 1)
        weight = weights[int(index)]
        if value.shape == weight.shape:
            value = torch.empty_like(weight, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def pack(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Return the states of networks and optimizers, so that they share one checkpoint file."""
    states = {
        name: part.state_dict() if isinstance(part, nn.Module) else optimizer_tensors(part)
        for name, part in parts.items()
    }
    return {f"{name}.{key}": value for name in states for key, value in states[name].items()}


def unpack(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `pack` returned."""
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            part.load_state_dict(under_prefix(name, tensors))
        else:
            restore_optimizer(part, under_prefix(name, tensors))


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefix the names of tensors."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def under_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `with_prefix` put under `prefix`, by their own names."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in tensors.items()
        if name.startswith(f"{prefix}.")
    }
