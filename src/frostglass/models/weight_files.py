"""Read and write files of weights, and compare them with a network; nothing is unpickled."""

import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # raised by torch's restricted reader
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from frostglass.core.errors import CheckpointError
from frostglass.models.base import first_line

NESTS = ("state_dict", "model", "model_state_dict")
# What torch.load raises for damaged files.
DAMAGE = (
    *(RuntimeError, ValueError, TypeError, AssertionError, LookupError),
    *(AttributeError, EOFError, OSError, MemoryError, struct.error),
)


def write_state(state: Mapping[str, Tensor], path: Path, owner: str) -> None:
    """Write finite tensors as safetensors; equal tensors give equal bytes."""
    _check_finite(state, f"{owner} cannot be saved")
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {path.name}: there is no folder {str(path.parent)!r}")
    dense = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    save_file(dense, path)


def read_state(own: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, without the "module." of `DataParallel`."""
    state = _read(path)
    if _all_prefixed(state) and not _all_prefixed(own):
        return {name.removeprefix("module."): value for name, value in state.items()}
    return state


def shapes_in(path: Path) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a file; none if it is not safetensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    except (SafetensorError, OSError):
        return []  # reading it says why


def _all_prefixed(names: Mapping[str, Tensor]) -> bool:
    return all(name.startswith("module.") for name in names)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint file at {str(path)!r}")
    with path.open("rb") as file:
        start = file.read(9)
    if not start:
        raise CheckpointError(f"{path.name} is empty")
    if start[8:9] == b"{":  # eight bytes of length, then a JSON header
        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} is damaged: {first_line(error)}") from error
    if start.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, or the older format
        return _unnest(_read_torch(path), path)
    raise CheckpointError(f"{path.name} is neither safetensors nor a file of torch.save")


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:  # given a path, torch.load would rely on the suffix
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of protocols it refuses
                return torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path.name} holds more than tensors or is damaged; unpickling could run any "
                "code: re-save its weights as safetensors"
            ) from error
        except DAMAGE as error:
            raise CheckpointError(
                f"{path.name} is damaged or not a state dict of torch.save: {first_line(error)}"
            ) from error


def _unnest(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        nests = [nest for nest in NESTS if isinstance(content.get(nest), Mapping)]
        if len(nests) > 1:
            raise CheckpointError(
                f"{path.name} holds several state dicts ({', '.join(nests)}): save only the one "
                "to use"
            )
        content = content[nests[0]] if nests else content
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path.name} holds a {type(content).__name__} and no state dict")
    wrong = [
        str(name)
        for name, value in content.items()
        if not isinstance(value, Tensor) or not isinstance(name, str)
    ]
    if wrong:
        raise CheckpointError(
            f"{path.name} holds something else than named tensors ({few(wrong)}): save the plain "
            "state dict"
        )
    return dict(content)


def differences(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Describe in one line how names, shapes and dtypes differ; empty when they match."""
    both = [name for name in own if name in state]
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in both
        if own[name].shape != state[name].shape
    ]
    kinds = [
        f"{name} {state[name].dtype} for {own[name].dtype}"
        for name in both
        if not _same_kind(own[name], state[name])
    ]
    problems = [
        ([name for name in own if name not in state], "missing"),
        ([name for name in state if name not in own], "unexpected"),
        (shapes, "of another shape"),
        (kinds, "of another kind"),
    ]
    return ", ".join(f"{len(names)} {what} ({few(names)})" for names, what in problems if names)


def other_classes(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Describe a different number of classes; empty if the difference has another cause.

    A single layer that differs only in its rows is the head: no later layer depends on them.
    """
    if own.keys() != state.keys() or not all(_same_kind(own[name], state[name]) for name in own):
        return ""
    differ = [name for name in own if own[name].shape != state[name].shape]
    layers = {name.rpartition(".")[0] for name in differ}
    if len(layers) != 1 or any(own[name].shape[1:] != state[name].shape[1:] for name in differ):
        return ""
    vectors = [name for name in differ if own[name].ndim and state[name].ndim]
    rows = {(len(state[name]), len(own[name])) for name in vectors}
    if len(rows) != 1:
        return ""
    theirs, ours = rows.pop()
    return f"the checkpoint has {theirs} classes, the model {ours}"


def usable(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return tensors in the precision of the model's own; refuses what cannot be weights."""
    state = {name: value.to(own[name].dtype) for name, value in state.items()}
    _check_finite(state, f"{source} cannot be used")
    _check_ties(own, state, f"{source} cannot be used")
    return state


def few(names: list[str]) -> str:
    """List at most three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() == other.is_floating_point()


def _check_finite(state: Mapping[str, Tensor], title: str) -> None:
    broken = [name for name, value in state.items() if not value.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{title}: {len(broken)} of its tensors hold NaN or infinity ({few(broken)})"
        )


def _check_ties(own: Mapping[str, Tensor], state: Mapping[str, Tensor], title: str) -> None:
    first: dict[Any, str] = {}
    for name, value in own.items():
        if value.numel() == 0 or value.is_meta:  # all meta tensors have the same address
            continue
        twin = first.setdefault((value.device, value.data_ptr(), value.shape, value.stride()), name)
        if not torch.equal(state[name], state[twin]):
            raise CheckpointError(
                f"{title}: {twin} and {name} are one tensor in the model and differ in the "
                "checkpoint"
            )
