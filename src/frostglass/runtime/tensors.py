"""Seeds, threads and the promise to leave the caller's networks as they were."""

import hashlib

import torch
from torch import Tensor, nn


def weights_digest(module: nn.Module) -> bytes:
    """A hash of a network's weights and buffers by their names."""
    total = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        total.update(name.encode())
        total.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return total.digest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as named tensors, so that a checkpoint needs no pickle."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}/{name}": torch.as_tensor(value)
        for index, slots in state.items()
        for name, value in slots.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        index, name = path.split("/", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under longer names: several networks share one checkpoint file."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def under_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors `with_prefix` put under `prefix`, by their own names."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in tensors.items()
        if name.startswith(f"{prefix}.")
    }
