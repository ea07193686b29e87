"""Folders of clients and servers: facts.json and safetensors, never code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.core.code_names import named_code
from frostglass.core.errors import CheckpointError, FrostglassError
from frostglass.core.limits import within_file
from frostglass.core.types import Halves, Shape
from frostglass.deploy._facts import F, Facts, parse_facts
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.models.build import source
from frostglass.models.cut import cut
from frostglass.runtime.device import device_of
from frostglass.store.files import read_json, read_tensors, write_json, write_tensors
from frostglass.store.manifest import MANIFEST, broken_seal, seal
from frostglass.training.build import rebuild_network

CHUNK = 128  # images or features passed through a network at once
OTHER_HALF = 2**28  # numbers that the half which is not in the folder may have
FACTS, WEIGHTS = "facts.json", "weights.safetensors"


def new_folder(folder: Path | str) -> Path:
    """Create a folder; refuse one that holds anything."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already. Give another folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_half(folder: Path, network: nn.Module, facts: Mapping[str, Any]) -> Path:
    """Write weights and facts, and last the manifest of all files: without it none is used."""
    write_tensors(folder / WEIGHTS, network.state_dict())
    write_json(folder / FACTS, facts)
    seal(folder, _names(folder))
    return folder


def read_facts(folder: Path, kind: str, facts_type: type[F]) -> F:
    """Read facts.json of a client or server, and check that its entries are there."""
    if not (folder / FACTS).is_file():
        raise CheckpointError(
            f"no {kind} in {folder}: expected a folder written by frostglass protect, with {FACTS}"
        )
    if problem := broken_seal(folder, _names(folder)):
        raise CheckpointError(f"{problem}. Save the {kind} again.")
    facts = read_json(folder / FACTS)
    if not isinstance(facts, dict) or facts.get("kind") != kind:
        actual = facts.get("kind") if isinstance(facts, dict) else type(facts).__name__
        raise CheckpointError(f"expected a {kind} in {folder}, got a {actual}. Give its folder.")
    return parse_facts(facts, facts_type, folder / FACTS)


def _names(folder: Path) -> list[str]:
    """Return the names of a half's files, apart from its manifest and hidden files."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    return [name for name in names if not name.startswith(".")]


def refuse_code(record: Any, folder: Path) -> None:
    """Refuse a record with a name of code to import: a folder must hold weights alone."""
    if name := named_code(record):
        where = source(name) or "its file"
        raise CheckpointError(
            f"{folder} names code to run ({name}, {where}), but files must hold weights alone. "
            "Build the module and pass it to load(), or install the method as a plugin."
        )


def rebuild_halves(facts: Facts, folder: Path, module: nn.Module | None) -> Halves:
    """Cut `module`, or the network that the recipe describes; without weights."""
    recipe, shape = facts.plain_recipe, shape_of(facts)
    if module is not None:
        return _checked(cut(module, facts.cut, shape), facts, folder)
    if recipe is None:
        raise CheckpointError(
            f"{folder} was saved from a module of your own. Build the module and pass it to load()."
        )
    refuse_code(recipe, folder)
    try:
        tensors, _ = read_tensors(folder / WEIGHTS)
        shapes = [tensor.shape for tensor in tensors.values()]
        with within_file(folder / WEIGHTS, shapes, least=OTHER_HALF):
            network = rebuild_network({**recipe, "image_shape": tuple(recipe["image_shape"])})
        return _checked(cut(network, facts.cut, shape), facts, folder)
    except FrostglassError:
        raise
    except (*MODEL_ERRORS, OverflowError) as error:
        raise CheckpointError(
            f"{folder / FACTS} describes no network ({first_line(error)}): it was changed. Save "
            "it again."
        ) from error


def _checked(both: Halves, facts: Facts, folder: Path) -> Halves:
    """Refuse halves that do not take the images or pass on the features that the facts state."""
    images = facts.image_shape if facts.recipe is None else facts.recipe.image_shape
    if images != facts.image_shape or both.feature_shape != tuple(facts.feature_shape):
        raise CheckpointError(
            f"{folder / FACTS} states images {facts.image_shape} and features "
            f"{facts.feature_shape}, and its network has {images} and {list(both.feature_shape)}: "
            "it was changed. Save it again."
        )
    return both


def shape_of(facts: Facts) -> Shape:
    channels, height, width = facts.image_shape
    return channels, height, width


def load_weights(module: nn.Module, folder: Path) -> None:
    """Load the weights of a half, all of them and no others."""
    path = folder / WEIGHTS
    tensors, _ = read_tensors(path)
    expected, actual = _shapes(module.state_dict()), _shapes(tensors)
    if expected != actual:
        names = expected.keys() | actual.keys()
        differing = sorted(name for name in names if expected.get(name) != actual.get(name))
        raise CheckpointError(
            f"{path} does not fit the network: {len(differing)} tensors differ, such as "
            f"{differing[0]}. Build the network as it was saved."
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{path} holds NaN or infinity in {name}. Save it again.")
    module.load_state_dict(tensors)
    module.eval()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def match_weights(tensor: Tensor, network: nn.Module) -> Tensor:
    """Move a tensor to the device and the precision of a network's weights."""
    return tensor.to(next(network.parameters(), torch.zeros(0, device=device_of(network))))
