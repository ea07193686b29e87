"""Weights on disk: written as safetensors, read strictly, and never unpickled.

A checkpoint that does not match its network exactly is refused: half-loaded weights make a model look safe when it is merely broken.
"""

import json
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import (
    UnpicklingError,  # only the name of the refusal; reading goes through torch's restricted reader
)
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frostglass.core.errors import CheckpointError
from frostglass.core.registry import nearest
from frostglass.core.types import Target
from frostglass.models.architectures._ir import IR, from_face_evolve
from frostglass.models.base import Preprocess, first_line, inner
from frostglass.models.taps import check_layers

WEIGHTS, DESCRIPTION = "weights.safetensors", "target.json"
NESTS = ("state_dict", "model", "model_state_dict")
# What torch.load was seen to raise for files with bytes cut off or changed.
DAMAGE = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    LookupError,
    AttributeError,
    EOFError,
    OSError,
    struct.error,
)


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Write the module's weights and buffers as safetensors, under the names they have inside a `Preprocess`.

    Tied tensors are written once under each of their names. The same weights always give the same bytes.
    """
    path = Path(path)
    state = _state(module)
    _check_finite(state, f"{type(inner(module)).__name__} cannot be saved")
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {path.name}: there is no folder {str(path.parent)!r}")
    save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}, path
    )


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Copy the weights of a checkpoint into the module; every name and shape must match, or nothing is changed.

    Takes safetensors, and files of `torch.save` that hold tensors only; the content decides, not the suffix. A state dict may stand alone
    or under "state_dict", "model" or "model_state_dict" (what stands beside it is not read). A "module." that all names begin with
    comes from `DataParallel` and is dropped. Floating point values are converted to the module's precision.
    """
    path = Path(path)
    own = _state(module)
    given = _read_for(own, path)
    misfits = _misfits(own, given)
    if misfits:
        raise CheckpointError(
            f"{path.name} does not fit {type(inner(module)).__name__}: {_other_classes(own, given) or misfits}"
        )
    inner(module).load_state_dict(_usable(own, given, path.name))


def body(module: nn.Module, head: str, parts: Sequence[str] = ()) -> dict[str, Tensor]:
    """Copies of a network's tensors apart from its head's, or of the named parts' only: what `load_body` takes."""
    return {name: value.detach().clone() for name, value in _body(module, head, parts).items()}


def read_body(
    module: nn.Module, head: str, path: str | Path, parts: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a checkpoint that a network can begin from: all but its head's, or those of the named parts only.

    The file must hold every one of them in the right shape. Without `parts` it may hold nothing more than a head of the same name, for any
    number of classes; with `parts` the rest of it is not read. Files are read as by `load_weights`; those of face.evoLVe are translated for
    `ir152` and `facenet`, and batch norms from before torch counted batches begin to count at zero.

    Args:
        head: the layer that `find_head` finds in the module.
        parts: sub-modules such as "features", by the names they have inside a `Preprocess`.
    """
    path = Path(path)
    own = _body(module, head, parts)
    given = _read_for(_state(module), path)
    if isinstance(inner(module), IR) and not _state(module).keys() & given.keys():
        given = from_face_evolve(given)
    given = _with_counters(own, _chosen(given, _inside(module, head), parts))
    _check_body(
        own,
        given,
        parts,
        f"{path.name} does not fit {type(inner(module)).__name__} apart from its head",
    )
    return _usable(own, given, path.name)


def load_body(
    module: nn.Module, head: str, tensors: Mapping[str, Tensor], parts: Sequence[str] = ()
) -> None:
    """Copy the tensors that `read_body` or `body` gave into the module, all of them or none; its head stays as it is."""
    own = _body(module, head, parts)
    given = dict(tensors)
    _check_body(
        own,
        given,
        parts,
        f"the starting weights do not fit {type(inner(module)).__name__} apart from its head",
    )
    inner(module).load_state_dict(
        {**_state(module), **_usable(own, given, "a set of starting weights")}
    )


def save_target(target: Target, folder: str | Path) -> None:
    """Write a target's weights and description into an existing folder.

    `target.info["build"]` must hold the recipe of the network: name, options, mean, std and the defenses that changed its layers.
    """
    folder = Path(folder)
    if "build" not in target.info:
        raise CheckpointError(
            'a target without a recipe in info["build"] could not be loaded again: add it before saving'
        )
    try:
        text = json.dumps(
            {
                "classes": target.classes,
                "image_shape": target.image_shape,
                "head": target.head,
                "taps": target.taps,
                "cut": target.cut,
                "attributes": target.attributes,
                "info": dict(target.info),
            },
            indent=1,
            sort_keys=True,
            allow_nan=False,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a target's info must be plain finite values: {first_line(error)}"
        ) from error
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
        split = {
            name: text[name] for name in ("cut", "attributes") if name in text
        }  # older files have neither
    except FileNotFoundError as error:
        raise CheckpointError(f"no target in {str(folder)!r}: {DESCRIPTION} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{DESCRIPTION} in {str(folder)!r} is damaged: {type(error).__name__} {first_line(error)}"
        ) from error
    module = rebuild({**recipe, "classes": len(classes), "image_shape": shape})
    load_weights(module, folder / WEIGHTS)
    check_layers(module, shape, head=head, taps=taps)
    return Target(
        module=module.eval(),
        classes=classes,
        image_shape=shape,
        head=head,
        taps=taps,
        info=info,
        **split,
    )


def _state(module: nn.Module) -> dict[str, Tensor]:
    state = inner(module).state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{type(inner(module)).__name__} keeps something else than a tensor in its state ({_few(odd)}): it cannot be stored"
        )
    return state


def _inside(module: nn.Module, layer: str) -> str:
    """A layer's name as the network itself knows it."""
    return layer.removeprefix("net.") if isinstance(module, Preprocess) else layer


def _body(module: nn.Module, head: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """The module's own tensors that a start must bring."""
    own, head, name = _state(module), _inside(module, head), type(inner(module)).__name__
    if not any(_lies_in(tensor, head) for tensor in own):
        raise CheckpointError(
            f"{name} has no head named {head!r} with weights: give the name that find_head finds"
        )
    wanted = _chosen(own, head, ())
    for part in parts:
        if not any(_lies_in(tensor, part) for tensor in wanted):
            known = {tensor.partition(".")[0] for tensor in wanted}
            raise CheckpointError(
                f"{name} has no part named {part!r} with weights besides its head: {nearest(part, known)}"
            )
    return _chosen(own, head, parts)


def _chosen(tensors: dict[str, Tensor], head: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """The tensors in any of the parts (all of them if none is named) and not in the head."""
    return {
        name: value
        for name, value in tensors.items()
        if not _lies_in(name, head) and (not parts or any(_lies_in(name, part) for part in parts))
    }


def _lies_in(tensor: str, layer: str) -> bool:
    """Whether a tensor belongs to a layer; none belongs to the layer without a name."""
    return f"{tensor}.".startswith(f"{layer}.")


def _with_counters(own: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Batch counters of zero where a file has none at all: torch before 0.4.1 had none, and torch itself then puts zero."""
    counters = [name for name in own if name.endswith(".num_batches_tracked")]
    if any(name in given for name in counters):
        return given
    return {**given, **{name: torch.zeros_like(own[name], device="cpu") for name in counters}}


def _check_body(
    own: dict[str, Tensor], given: dict[str, Tensor], parts: Sequence[str], title: str
) -> None:
    misfits = _misfits(own, given)
    if not misfits:
        return
    candidates = parts or dict.fromkeys(name.partition(".")[0] for name in own)
    fitting = [
        part
        for part in candidates
        if not _misfits(_chosen(own, "", (part,)), _chosen(given, "", (part,)))
    ]
    advice = (
        f"name the parts that fit with start_parts ({', '.join(fitting)})"
        if fitting
        else "no part of it fits: take another file"
    )
    raise CheckpointError(f"{title}: {misfits}; {advice}")


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
        raise CheckpointError(
            f"{path.name} is damaged or cut short: {first_line(error)}"
        ) from error


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:  # of a path, torch.load would believe the suffix
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # of pickle protocols that it is about to refuse
                return torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path.name} holds more than tensors or is damaged; unpickling could run any code: re-save its weights as safetensors"
            ) from error
        except DAMAGE as error:
            raise CheckpointError(
                f"{path.name} is damaged, cut short or no state dict of torch.save: {first_line(error)}"
            ) from error


def _read_for(own: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """What the file holds, without the "module." of `DataParallel`."""
    given = _read(path)
    if all(name.startswith("module.") for name in given) and not all(
        name.startswith("module.") for name in own
    ):
        return {name.removeprefix("module."): value for name, value in given.items()}
    return given


def _unnest(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        nests = [nest for nest in NESTS if isinstance(content.get(nest), Mapping)]
        if len(nests) > 1:
            raise CheckpointError(
                f"{path.name} holds several state dicts ({', '.join(nests)}): save the one you mean alone"
            )
        content = content[nests[0]] if nests else content
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path.name} holds a {type(content).__name__} and no state dict")
    odd = [
        str(name)
        for name, value in content.items()
        if not isinstance(value, Tensor) or not isinstance(name, str)
    ]
    if odd:
        raise CheckpointError(
            f"{path.name} holds something else than named tensors ({_few(odd)}): save the plain state dict"
        )
    return dict(content)


def _misfits(own: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """What is wrong with the names, shapes and kinds of the given tensors, in one line; empty when they match."""
    both = [name for name in own if name in given]
    problems = [
        ([name for name in own if name not in given], "missing"),
        ([name for name in given if name not in own], "unexpected"),
        (
            [
                f"{name} {tuple(given[name].shape)} for {tuple(own[name].shape)}"
                for name in both
                if own[name].shape != given[name].shape
            ],
            "of another shape",
        ),
        (
            [
                f"{name} {given[name].dtype} for {own[name].dtype}"
                for name in both
                if not _same_kind(own[name], given[name])
            ],
            "of another kind",
        ),
    ]
    return ", ".join(f"{len(names)} {what} ({_few(names)})" for names, what in problems if names)


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() == other.is_floating_point()


def _other_classes(own: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """The plain words for the one misfit whose cause is known; empty for others."""
    if own.keys() != given.keys() or not all(_same_kind(own[name], given[name]) for name in own):
        return ""
    rows = _rows(own, given, [name for name in own if own[name].shape != given[name].shape])
    return f"the checkpoint has {rows[0]} classes, the model {rows[1]}" if rows else ""


def _rows(
    own: dict[str, Tensor], given: dict[str, Tensor], shapes: list[str]
) -> tuple[int, int] | None:
    """The two row counts when a single layer differs, and only in its rows: no later layer minds, so it is the head."""
    if len({name.rpartition(".")[0] for name in shapes}) != 1 or any(
        own[name].shape[1:] != given[name].shape[1:] for name in shapes
    ):
        return None
    rows = {
        (len(given[name]), len(own[name])) for name in shapes if own[name].ndim and given[name].ndim
    }
    return rows.pop() if len(rows) == 1 else None


def _usable(own: dict[str, Tensor], given: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """The given tensors in the module's precision, if they can be weights."""
    given = {name: value.to(own[name].dtype) for name, value in given.items()}
    _check_finite(given, f"{source} cannot be used")
    _check_ties(own, given, f"{source} cannot be used")
    return given


def _check_finite(state: dict[str, Tensor], title: str) -> None:
    broken = [name for name, value in state.items() if not value.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{title}: {len(broken)} of its tensors hold NaN or infinity ({_few(broken)})"
        )


def _check_ties(own: dict[str, Tensor], given: dict[str, Tensor], title: str) -> None:
    first: dict[tuple, str] = {}
    for name, value in own.items():
        if value.numel() == 0:
            continue
        twin = first.setdefault((value.device, value.data_ptr(), value.shape, value.stride()), name)
        if not torch.equal(given[name], given[twin]):
            raise CheckpointError(
                f"{title}: {twin} and {name} are one tensor in the model and differ in the checkpoint"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
