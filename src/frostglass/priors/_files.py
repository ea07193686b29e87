"""Files of priors: one safetensors file holds the networks and the record of their method."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from frostglass.core.errors import CheckpointError
from frostglass.core.prior import Prior
from frostglass.core.types import Shape
from frostglass.priors.base import priors
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import under_prefix, with_prefix


def save_prior(prior: Prior, folder: Path) -> None:
    """Write a prior into a folder; `prior.info` must record its method under "method"."""
    write_prior(prior, folder / "prior.safetensors")


def write_prior(prior: Prior, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a prior to `path`; half precision is converted back to float32 on reading."""
    tensors: dict[str, Tensor] = {}
    for part, module in _parts(prior.generator, prior.critic, prior.students):
        for name, tensor in with_prefix(part, module.state_dict()).items():
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    tensors["seen_identities"] = prior.seen_identities
    if prior.features is not None:
        tensors["features"] = prior.features
    facts = {
        "image_shape": prior.image_shape,
        "info": dict(prior.info),
        "tied_to": prior.tied_to,
        "critic": prior.critic is not None,
        "latent": prior.latent,
        "classes": prior.classes,
        "condition": prior.condition,
    }
    save_file(tensors, path, metadata={"frostglass_prior": json.dumps(facts, sort_keys=True)})


def _parts(
    generator: nn.Module, critic: nn.Module | None, students: Sequence[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """List the networks of a prior with the names they have in its file."""
    named = [("generator", generator), *([("critic", critic)] if critic is not None else [])]
    return [*named, *((f"student{number}", student) for number, student in enumerate(students))]


def load_prior(folder: Path) -> Prior:
    """Read what `save_prior` wrote, also if it names code of the user's."""
    return read_prior(folder / "prior.safetensors", trusted=True)


def read_prior(path: Path, *, trusted: bool = False) -> Prior:
    """Read a prior from its file; every tensor must be there, and no other.

    A file that names code to run is refused unless it is `trusted`.
    """
    facts, tensors = _read_file(path)
    try:
        code = code_in(facts["info"])
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not say how its prior was made ({type(error).__name__}): make the prior "
            "again"
        ) from error
    if code and not trusted:
        raise CheckpointError(
            f"{path} names code to run ({code}), and a file must hold weights alone: name the code "
            "in a config, as prior.source or a student"
        )
    shape, classes = tuple(facts["image_shape"]), facts.get("classes", 0)
    with seeded(0, "read_prior"):  # the weights drawn here are replaced below
        networks = _skeleton(facts["info"], shape, classes)
    critic = networks.critic if facts["critic"] else None
    parts = _parts(networks.generator, critic, networks.students)
    _check_tensors(path, tensors, [part for part, _ in parts])
    for part, module in parts:
        _load(path, part, module, under_prefix(part, tensors), facts["info"]["method"]["name"])
    return Prior(
        generator=networks.generator,
        critic=critic,
        latent=facts.get("latent", facts["info"]["method"]["parameters"].get("latent")),
        image_shape=shape,
        seen_identities=tensors["seen_identities"],
        info=facts["info"],
        tied_to=facts["tied_to"],
        classes=classes,
        condition=facts.get("condition", ""),
        students=networks.students,
        features=tensors.get("features"),
    )


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the record and the tensors of a prior's file."""
    if not path.is_file():
        raise CheckpointError(
            f"no prior at {path}: give the path of a file written by frostglass, or the name of an "
            "embedded prior"
        )
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("frostglass_prior", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}): make the prior again"
        ) from None
    if facts is None:
        raise CheckpointError(
            f"{path} holds weights but does not say it is a frostglass prior: expected a file "
            "written by save_prior"
        )
    return facts, tensors


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], parts: Sequence[str]) -> None:
    """Refuse tensors that belong to no network, or are not finite."""
    prefixes = tuple(f"{part}." for part in parts)
    others = ("seen_identities", "features")
    stray = sorted(n for n in tensors if n not in others and not n.startswith(prefixes))
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    broken = sorted(name for name, tensor in floats.items() if not tensor.isfinite().all())
    missing = "no " if "seen_identities" not in tensors else ""
    if stray or broken or missing:
        raise CheckpointError(
            f"{path} is not as it was written: {len(stray)} tensors too many "
            f"({', '.join(stray[:3])}), {len(broken)} not finite ({', '.join(broken[:3])}), "
            f"{missing}list of the identities it was trained on; make the prior again"
        )


def _load(
    path: Path, part: str, module: nn.Module, tensors: Mapping[str, Tensor], method: str
) -> None:
    """Load one network's tensors in single precision; names and shapes must match."""
    state = {key: t.float() if t.is_floating_point() else t for key, t in tensors.items()}
    expected = {key: t.shape for key, t in module.state_dict().items()}
    if {key: t.shape for key, t in state.items()} != expected:
        raise CheckpointError(
            f"{path}: the {part}'s tensors do not match {method}: expected {len(expected)} names "
            f"and shapes, got {len(state)}"
        )
    module.load_state_dict(state)
    module.eval()


def code_in(info: Mapping[str, Any]) -> str:
    """Return the user's code or file that a prior's networks are made by, if any."""
    name, parameters = info["method"]["name"], info["method"]["parameters"]
    students = [student["model"] for student in parameters.get("students") or ()]
    named = [
        path
        for path in (name, *students)
        if ":" in path and path.partition(":")[0] not in ("timm", "torchvision")
    ]
    of_base = code_in(info["base"]) if "base" in info else ""
    return next(filter(None, [parameters.get("source"), *named, of_base]), "")


def _skeleton(info: Mapping[str, Any], shape: Shape, classes: int) -> Prior:
    """Build the networks as the recorded method does; on those of its base, if it has one."""
    base = _skeleton(info["base"], shape, classes) if "base" in info else None
    method = priors.get(info["method"]["name"])(**info["method"]["parameters"])
    return method.skeleton(shape, classes, base)
