"""Weights on disk: written as safetensors, read strictly, and never unpickled.

A checkpoint that does not match its network exactly is refused: half-loaded weights make a model look safe when it is merely broken.
"""

import json
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError  # only the name of the refusal; reading goes through torch's restricted reader
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frostglass.errors import CheckpointError
from frostglass.models.base import first_line, inner
from frostglass.models.taps import check_layers
from frostglass.types import Target

WEIGHTS, DESCRIPTION = "weights.safetensors", "target.json"
NESTS = ("state_dict", "model", "model_state_dict")
# What torch.load was seen to raise for files with bytes cut off or changed.
DAMAGE = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, EOFError, OSError, struct.error)


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Write the module's weights and buffers as safetensors, under the names they have inside a `Preprocess`.

    Tied tensors are written once under each of their names. The same weights always give the same bytes.
    """
    path = Path(path)
    state = _state(module)
    _check_finite(state, f"{type(inner(module)).__name__} cannot be saved")
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {path.name}: there is no folder {str(path.parent)!r}")
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in state.items()}, path)


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Copy the weights of a checkpoint into the module; every name and shape must match, or nothing is changed.

    Takes safetensors, and files of `torch.save` that hold tensors only; the content decides, not the suffix. A state dict may stand alone
    or under "state_dict", "model" or "model_state_dict" (what stands beside it is not read). A "module." that all names begin with
    comes from `DataParallel` and is dropped. Floating point values are converted to the module's precision.
    """
    path = Path(path)
    net = inner(module)
    own = _state(module)
    given = _read(path)
    if all(name.startswith("module.") for name in given) and not all(name.startswith("module.") for name in own):
        given = {name.removeprefix("module."): value for name, value in given.items()}
    title = f"{path.name} does not fit {type(net).__name__}"
    _check_match(own, given, title)
    given = {name: value.to(own[name].dtype) for name, value in given.items()}
    _check_finite(given, f"{path.name} cannot be used")
    _check_ties(own, given, title)
    net.load_state_dict(given)


def save_target(target: Target, folder: str | Path) -> None:
    """Write a target's weights and description into an existing folder.

    `target.info["build"]` must hold the recipe of the network: name, options, mean, std and the defenses that changed its layers.
    """
    folder = Path(folder)
    if "build" not in target.info:
        raise CheckpointError('a target without a recipe in info["build"] could not be loaded again: add it before saving')
    try:
        text = json.dumps(
            {
                "classes": target.classes,
                "image_shape": target.image_shape,
                "head": target.head,
                "taps": target.taps,
                "info": dict(target.info),
            },
            indent=1,
            sort_keys=True,
            allow_nan=False,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a target's info must be plain finite values: {first_line(error)}") from error
    save_weights(target.module, folder / WEIGHTS)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def load_target(folder: str | Path, rebuild: Callable[[dict[str, Any]], nn.Module]) -> Target:
    """The target that `save_target` wrote, in evaluation mode.

    `rebuild` makes the network, with any weights, from the recipe in info["build"], to which `classes` (their number) and `image_shape`
    are added: it calls `build` and then lets each defense replace the layers it replaced.
    """
    folder = Path(folder)
    try:
        text = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        classes, shape, info = tuple(text["classes"]), tuple(text["image_shape"]), text["info"]
        head, taps, recipe = text["head"], tuple(text["taps"]), info["build"]
    except FileNotFoundError as error:
        raise CheckpointError(f"no target in {str(folder)!r}: {DESCRIPTION} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{DESCRIPTION} in {str(folder)!r} is damaged: {type(error).__name__} {first_line(error)}") from error
    module = rebuild({**recipe, "classes": len(classes), "image_shape": shape})
    load_weights(module, folder / WEIGHTS)
    check_layers(module, shape, head=head, taps=taps)
    return Target(module=module.eval(), classes=classes, image_shape=shape, head=head, taps=taps, info=info)


def _state(module: nn.Module) -> dict[str, Tensor]:
    state = inner(module).state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{type(inner(module)).__name__} keeps something else than a tensor in its state ({_few(odd)}): it cannot be stored"
        )
    return state


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint file at {str(path)!r}")
    with path.open("rb") as file:
        start = file.read(9)
    if not start:
        raise CheckpointError(f"{path.name} is empty")
    if start[8:9] == b"{":  # eight bytes of length, then a JSON header
        return _read_safetensors(path)
    if start.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, or the older bare format
        return _unnest(_read_torch(path), path)
    raise CheckpointError(f"{path.name} is neither safetensors nor a file of torch.save")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is damaged or cut short: {first_line(error)}") from error


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:  # of a path, torch.load would believe the suffix
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of pickle protocols that it is about to refuse
                return torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path.name} holds more than tensors or is damaged; unpickling could run any code: re-save its weights as safetensors"
            ) from error
        except DAMAGE as error:
            raise CheckpointError(f"{path.name} is damaged, cut short or no state dict of torch.save: {first_line(error)}") from error


def _unnest(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        nests = [nest for nest in NESTS if isinstance(content.get(nest), Mapping)]
        if len(nests) > 1:
            raise CheckpointError(f"{path.name} holds several state dicts ({', '.join(nests)}): save the one you mean alone")
        content = content[nests[0]] if nests else content
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path.name} holds a {type(content).__name__} and no state dict")
    odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor) or not isinstance(name, str)]
    if odd:
        raise CheckpointError(f"{path.name} holds something else than named tensors ({_few(odd)}): save the plain state dict")
    return dict(content)


def _check_match(own: dict[str, Tensor], given: dict[str, Tensor], title: str) -> None:
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    both = [name for name in own if name in given]
    shapes = [name for name in both if own[name].shape != given[name].shape]
    kinds = [name for name in both if own[name].is_floating_point() != given[name].is_floating_point()]
    rows = _rows(own, given, shapes)
    if rows and not (missing or unexpected or kinds):
        raise CheckpointError(f"{title}: the checkpoint has {rows[0]} classes, the model {rows[1]}")
    problems = [
        (missing, "missing"),
        (unexpected, "unexpected"),
        ([f"{name} {tuple(given[name].shape)} for {tuple(own[name].shape)}" for name in shapes], "of another shape"),
        ([f"{name} {given[name].dtype} for {own[name].dtype}" for name in kinds], "of another kind"),
    ]
    if any(names for names, _ in problems):
        raise CheckpointError(f"{title}: " + ", ".join(f"{len(names)} {what} ({_few(names)})" for names, what in problems if names))


def _rows(own: dict[str, Tensor], given: dict[str, Tensor], shapes: list[str]) -> tuple[int, int] | None:
    """The two row counts when a single layer differs, and only in its rows: no later layer minds, so it is the head."""
    if len({name.rpartition(".")[0] for name in shapes}) != 1 or any(own[name].shape[1:] != given[name].shape[1:] for name in shapes):
        return None
    rows = {(len(given[name]), len(own[name])) for name in shapes if own[name].ndim and given[name].ndim}
    return rows.pop() if len(rows) == 1 else None


def _check_finite(state: dict[str, Tensor], title: str) -> None:
    broken = [name for name, value in state.items() if not value.isfinite().all()]
    if broken:
        raise CheckpointError(f"{title}: {len(broken)} of its tensors hold NaN or infinity ({_few(broken)})")


def _check_ties(own: dict[str, Tensor], given: dict[str, Tensor], title: str) -> None:
    first: dict[tuple, str] = {}
    for name, value in own.items():
        if value.numel() == 0:
            continue
        twin = first.setdefault((value.device, value.data_ptr(), value.shape, value.stride()), name)
        if not torch.equal(given[name], given[twin]):
            raise CheckpointError(f"{title}: {twin} and {name} are one tensor in the model and differ in the checkpoint")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
