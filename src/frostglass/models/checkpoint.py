"""Weights and targets on disk, written as safetensors and read strictly.

A checkpoint that does not match its network exactly is refused: a network with half its weights
looks safe when it is only broken.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.core.errors import CheckpointError, FrostglassError
from frostglass.core.limits import within_file
from frostglass.core.registry import nearest
from frostglass.core.types import Target
from frostglass.models.architectures._ir import IR, from_face_evolve
from frostglass.models.base import MODEL_ERRORS, Preprocess, class_name, first_line, inner
from frostglass.models.taps import check_layers
from frostglass.models.weight_files import (
    differences,
    few,
    other_classes,
    read_state,
    shapes_in,
    usable,
    write_state,
)

WEIGHTS, DESCRIPTION = "weights.safetensors", "target.json"


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Write weights and buffers as safetensors, under their names inside a `Preprocess`.

    Tied tensors are written under each of their names. Equal weights give equal bytes.
    """
    write_state(_state(module), Path(path), class_name(module))


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Copy a checkpoint into the module; unless every name and shape match, nothing is changed.

    Reads safetensors, and files of `torch.save` that hold tensors only; the content decides, not
    the suffix. A state dict may be the file's content or be under "state_dict", "model" or
    "model_state_dict"; other entries are ignored. A "module." that all names begin with, from
    `DataParallel`, is dropped. Floating point values are converted to the module's precision.
    """
    path = Path(path)
    own = _state(module)
    state = read_state(own, path)
    if problems := differences(own, state):
        problems = other_classes(own, state) or problems
        raise CheckpointError(f"{path.name} does not fit {class_name(module)}: {problems}")
    inner(module).load_state_dict(usable(own, state, path.name))


def body(module: nn.Module, head: str, parts: Sequence[str] = ()) -> dict[str, Tensor]:
    """Copy a network's tensors without its head's, or only those of `parts`, for `load_body`."""
    return {name: value.detach().clone() for name, value in _body(module, head, parts).items()}


def read_body(
    module: nn.Module, head: str, path: str | Path, parts: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Read starting weights from a checkpoint: all but its head's, or only those of `parts`.

    The file must hold all of them in the right shape. Without `parts` it may only hold one thing
    more, a head of the same name for any number of classes; with `parts` the rest is ignored. Files
    are read as by `load_weights`. Those of face.evoLVe are translated for `ir152` and `facenet`.
    Batch norms from before torch counted batches start counting at zero.

    Args:
        head: the layer that `find_head` finds in the module.
        parts: sub-modules such as "features", by their names inside a `Preprocess`.
    """
    path = Path(path)
    own, whole = _body(module, head, parts), _state(module)
    state = read_state(whole, path)
    if isinstance(inner(module), IR) and not whole.keys() & state.keys():
        state = from_face_evolve(state)
    state = _with_counters(own, _chosen(state, _inside(module, head), parts))
    _check_body(own, state, parts, f"{path.name} does not fit {class_name(module)}")
    return usable(own, state, path.name)


def load_body(
    module: nn.Module, head: str, tensors: Mapping[str, Tensor], parts: Sequence[str] = ()
) -> None:
    """Copy tensors from `read_body` or `body` into the module, all or none, but not its head."""
    own = _body(module, head, parts)
    _check_body(own, tensors, parts, f"the starting weights do not fit {class_name(module)}")
    state = usable(own, tensors, "a set of starting weights")
    inner(module).load_state_dict({**_state(module), **state})


def save_target(target: Target, folder: str | Path) -> None:
    """Write a target's weights and description into an existing folder.

    `target.info["build"]` must hold the recipe of the network: name, options, mean, std and the
    defenses that changed its layers.
    """
    folder = Path(folder)
    if "build" not in target.info:
        raise CheckpointError(
            'a target without a recipe in info["build"] could not be loaded: add it before saving'
        )
    description = {
        "classes": target.classes,
        "image_shape": target.image_shape,
        "head": target.head,
        "taps": target.taps,
        "cut": target.cut,
        "attributes": target.attributes,
        "info": dict(target.info),
    }
    try:
        text = json.dumps(description, indent=1, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a target's info must be plain finite values: {first_line(error)}"
        ) from error
    save_weights(target.module, folder / WEIGHTS)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def load_target(folder: str | Path, rebuild: Callable[[dict[str, Any]], nn.Module]) -> Target:
    """Load the target that `save_target` wrote, in evaluation mode.

    `rebuild` makes the network, with any weights, from the recipe in info["build"] with `classes`
    (their number) and `image_shape`: it calls `build` and lets each defense replace its layers.
    """
    folder = Path(folder)
    try:
        text = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        fields = {name: text[name] for name in ("head", "cut", "attributes", "info")}
        fields |= {name: tuple(text[name]) for name in ("classes", "image_shape", "taps")}
        recipe = dict(fields["info"]["build"])
    except FileNotFoundError as error:
        raise CheckpointError(f"no target in {str(folder)!r}: {DESCRIPTION} is missing") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{DESCRIPTION} in {str(folder)!r} is damaged: {type(error).__name__} "
            f"{first_line(error)}"
        ) from error
    shape = fields["image_shape"]
    try:
        with within_file(folder / DESCRIPTION, shapes_in(folder / WEIGHTS)):
            module = rebuild({**recipe, "classes": len(fields["classes"]), "image_shape": shape})
        load_weights(module, folder / WEIGHTS)
        check_layers(module, shape, head=fields["head"], taps=fields["taps"])
        return Target(module=module.eval(), **fields)
    except FrostglassError:
        raise
    except (*MODEL_ERRORS, OverflowError) as error:
        raise CheckpointError(
            f"{DESCRIPTION} in {str(folder)!r} describes no network: {type(error).__name__} "
            f"{first_line(error)}"
        ) from error


def _state(module: nn.Module) -> dict[str, Tensor]:
    state = inner(module).state_dict()
    if wrong := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{class_name(module)} keeps something else than a tensor in its state ({few(wrong)}): "
            "it cannot be stored"
        )
    return state


def _inside(module: nn.Module, layer: str) -> str:
    """Return a layer's name inside a `Preprocess`."""
    return layer.removeprefix("net.") if isinstance(module, Preprocess) else layer


def _body(module: nn.Module, head: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the module's own tensors that starting weights must include."""
    own, head, name = _state(module), _inside(module, head), class_name(module)
    if not any(_lies_in(tensor, head) for tensor in own):
        raise CheckpointError(
            f"{name} has no head named {head!r} with weights: pass the name that find_head returns"
        )
    tensors = _chosen(own, head, ())
    for part in parts:
        if not any(_lies_in(tensor, part) for tensor in tensors):
            known = {tensor.partition(".")[0] for tensor in tensors}
            raise CheckpointError(
                f"{name} has no part named {part!r} with weights besides its head: "
                f"{nearest(part, known)}"
            )
    return _chosen(own, head, parts)


def _chosen(tensors: Mapping[str, Tensor], head: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors in any of the parts (in all if none is named) and not in the head."""
    return {
        name: value
        for name, value in tensors.items()
        if not _lies_in(name, head) and (not parts or any(_lies_in(name, part) for part in parts))
    }


def _lies_in(tensor: str, layer: str) -> bool:
    """Return whether a tensor belongs to a layer; none belongs to the layer without a name."""
    return f"{tensor}.".startswith(f"{layer}.")


def _with_counters(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add batch counters of zero if a file has none, like torch: before 0.4.1 there were none."""
    counters = [name for name in own if name.endswith(".num_batches_tracked")]
    if any(name in state for name in counters):
        return dict(state)
    return {**state, **{name: torch.zeros_like(own[name], device="cpu") for name in counters}}


def _check_body(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], parts: Sequence[str], title: str
) -> None:
    problems = differences(own, state)
    if not problems:
        return
    fitting = [
        part
        for part in parts or dict.fromkeys(name.partition(".")[0] for name in own)
        if not differences(_chosen(own, "", (part,)), _chosen(state, "", (part,)))
    ]
    advice = (
        f"name the parts that fit with start_parts ({', '.join(fitting)})"
        if fitting
        else "no part of it fits: use another file"
    )
    raise CheckpointError(f"{title} apart from its head: {problems}; {advice}")
