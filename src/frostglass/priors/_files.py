"""What an attacker knows of the world before touching a target: a generator learned on public images."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from frostglass.core.errors import CheckpointError
from frostglass.core.prior import Prior
from frostglass.priors.base import priors
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import under_prefix, with_prefix


def save_prior(prior: Prior, folder: Path) -> None:
    """Write a prior as one safetensors file; `prior.info` must hold the method's name and parameters under "method"."""
    write_prior(prior, folder / "prior.safetensors")


def write_prior(prior: Prior, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a prior to `path`; half precision halves the file and is widened again on reading."""
    tensors = {
        name: t
        for part, module in _parts(prior.generator, prior.critic, prior.students)
        for name, t in with_prefix(part, module.state_dict()).items()
    }
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
        for name, t in tensors.items()
    }
    tensors["seen_identities"] = prior.seen_identities
    if prior.features is not None:
        tensors["features"] = prior.features
    facts = {
        "image_shape": prior.image_shape, "info": dict(prior.info), "tied_to": prior.tied_to, "critic": prior.critic is not None,
        "latent": prior.latent, "classes": prior.classes, "condition": prior.condition,
    }  # fmt: skip
    save_file(tensors, path, metadata={"frostglass_prior": json.dumps(facts, sort_keys=True)})


def _parts(
    generator: nn.Module, critic: nn.Module | None, students: Sequence[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """The networks of a prior by the names they have in its file."""
    named = [("generator", generator), *([("critic", critic)] if critic is not None else [])]
    return [*named, *((f"student{number}", student) for number, student in enumerate(students))]


def load_prior(folder: Path) -> Prior:
    """Read what `save_prior` wrote, also where it names code of the user's own to build its networks."""
    return read_prior(folder / "prior.safetensors", ours=True)


def read_prior(path: Path, *, ours: bool = False) -> Prior:
    """Rebuild a prior from its file, strictly: every tensor must be there, and no other. Unless it is `ours`, a file that names code to run is refused."""
    if not path.is_file():
        raise CheckpointError(
            f"no prior at {path}: give the path of a file written by frostglass, or the name of an embedded prior"
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
            f"{path} holds weights but does not say it is a frostglass prior: expected a file written by save_prior"
        )
    try:
        code = code_in(facts["info"])
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not say how its prior was made ({type(error).__name__}): make the prior again"
        ) from error
    if code and not ours:
        raise CheckpointError(
            f"{path} names code to run ({code}), and a file must hold weights alone: name the code in a config, as prior.source or a student"
        )
    shape, classes = tuple(facts["image_shape"]), facts.get("classes", 0)
    with seeded(0, "read_prior"):  # the weights drawn here are replaced below
        generator, critic, students = _networks(facts["info"], shape, classes)
    parts = _parts(generator, critic if facts["critic"] else None, students)
    named = tuple(f"{part}." for part, _ in parts)
    stray = sorted(
        name
        for name in tensors
        if name not in ("seen_identities", "features") and not name.startswith(named)
    )
    broken = sorted(
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    )
    if stray or broken or "seen_identities" not in tensors:
        raise CheckpointError(
            f"{path} is not as it was written: {len(stray)} tensors too many ({', '.join(stray[:3])}), {len(broken)} not finite "
            f"({', '.join(broken[:3])}), {'no ' if 'saw' not in tensors else ''}list of the identities it saw; make the prior again"
        )
    for part, module in parts:
        found = {
            key: t.float() if t.is_floating_point() else t
            for key, t in under_prefix(part, tensors).items()
        }
        expected = {key: tuple(t.shape) for key, t in module.state_dict().items()}
        if {key: tuple(t.shape) for key, t in found.items()} != expected:
            raise CheckpointError(
                f"{path}: the {part}'s tensors do not match {facts['info']['method']['name']}: expected {len(expected)} names and shapes, got {len(found)}"
            )
        module.load_state_dict(found)
        module.eval()
    return Prior(
        generator=generator,
        critic=critic if facts["critic"] else None,
        latent=facts.get("latent", facts["info"]["method"]["parameters"].get("latent")),
        image_shape=shape,  # type: ignore[arg-type]
        seen_identities=tensors["seen_identities"],
        info=facts["info"],
        tied_to=facts["tied_to"],
        classes=classes,
        condition=facts.get("condition", ""),
        students=tuple(students),
        features=tensors.get("features"),
    )


def code_in(info: Mapping[str, Any]) -> str:
    """The code or file of somebody else's that a prior's networks are made by, if any."""
    given = info["method"]["parameters"]
    students = [student["model"] for student in given.get("students") or ()]
    named = [
        model
        for model in students
        if ":" in model and model.partition(":")[0] not in ("timm", "torchvision")
    ]
    under = code_in(info["base"]) if "base" in info else ""
    return next(filter(None, [given.get("source"), *named, under]), "")


def _networks(
    info: Mapping[str, Any], shape: Any, classes: int
) -> tuple[nn.Module, nn.Module | None, Sequence[nn.Module]]:
    """Generator, critic and students as the recorded method builds them; a prior that was added to has the record of the other as "base"."""
    method = priors.get(info["method"]["name"])(**info["method"]["parameters"])
    if "base" not in info:
        return *method.networks(shape, classes), ()
    generator, critic, _ = _networks(info["base"], shape, classes)
    return generator, critic, method.build_students(shape, classes)
