"""Files of priors: one safetensors file holds the networks and the record of their method."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from frostglass.core.code_names import named_code
from frostglass.core.errors import CheckpointError, FrostglassError
from frostglass.core.limits import within_file
from frostglass.core.parameters import problems
from frostglass.core.prior import Condition, Prior, ScoredDraws
from frostglass.core.types import Shape
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.priors.base import priors
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import under_prefix, with_prefix

SCORED = ("scored_latents", "scored_answers")  # tensors of the draws that a target scored


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
    scored = prior.scored
    if scored is not None:
        tensors |= {"scored_latents": scored.latents, "scored_answers": scored.scores}
    facts = {
        "image_shape": prior.image_shape,
        "info": dict(prior.info),
        "tied_to": prior.tied_to,
        "critic": prior.critic is not None,
        "latent": prior.latent,
        "classes": prior.classes,
        "condition": prior.condition,
        "scored": None if scored is None else [scored.truncation, scored.cutoff],
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


class MethodRecord(BaseModel):
    """A method as `PriorMethod.record` describes it."""

    name: str
    parameters: dict[str, Any]


class Info(BaseModel):
    """What `Prior.info` must say: how the prior was made, and the one it extends, if any."""

    model_config = ConfigDict(extra="allow")

    method: MethodRecord
    base: "Info | None" = None


class PriorFacts(BaseModel):
    """The record in a prior's file."""

    image_shape: tuple[
        Annotated[int, Field(ge=1, le=4)],
        Annotated[int, Field(ge=1, le=2048)],
        Annotated[int, Field(ge=1, le=2048)],
    ]
    info: Info
    tied_to: str | None
    critic: bool
    latent: Annotated[int, Field(ge=1)] | None = None
    classes: Annotated[int, Field(ge=0)] = 0
    condition: Condition = ""
    scored: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[int, Field(ge=0)]] | None = None


def read_prior(path: Path, *, trusted: bool = False) -> Prior:
    """Read a prior from its file; every tensor must be there, and no other.

    A file that names code to run is refused unless it is `trusted`. A network that is larger than
    the file is refused before memory is allocated for it.
    """
    facts, tensors = _read_file(path)
    info = facts.info.model_dump(exclude_unset=True)
    networks = _networks(path, facts, info, tensors, trusted=trusted)
    critic = networks.critic if facts.critic else None
    parts = _parts(networks.generator, critic, networks.students)
    _check_tensors(path, tensors, [part for part, _ in parts])
    for part, module in parts:
        _load(path, part, module, under_prefix(part, tensors), facts.info.method.name)
    latent = networks.latent if facts.latent is None else facts.latent
    if (latent, facts.condition) != (networks.latent, networks.condition):
        raise _damaged(
            path,
            f"{latent} latents and {facts.condition or 'no'} condition, expected "
            f"{networks.latent} and {networks.condition or 'no'} condition",
        )
    return Prior(
        generator=networks.generator,
        critic=critic,
        latent=latent,
        image_shape=facts.image_shape,
        seen_identities=tensors["seen_identities"],
        info=info,
        tied_to=facts.tied_to,
        classes=facts.classes,
        condition=facts.condition,
        students=networks.students,
        features=tensors.get("features"),
        scored=_scored(path, facts, tensors, latent),
    )


def _scored(
    path: Path, facts: PriorFacts, tensors: Mapping[str, Tensor], latent: int
) -> ScoredDraws | None:
    """Return the draws that the target scored, if the file has any."""
    latents, scores = (tensors.get(name) for name in SCORED)
    if facts.scored is None or latents is None or scores is None:
        if facts.scored is None and latents is scores is None:
            return None
        raise _damaged(path, "scored draws without their latents, scores or truncation")
    expected = [(len(latents), latent), (len(latents), facts.classes)]
    if [tuple(latents.shape), tuple(scores.shape)] != expected:
        raise _damaged(path, f"scored draws of other shapes than {expected}")
    return ScoredDraws(latents, scores, *facts.scored)


def _networks(
    path: Path,
    facts: PriorFacts,
    info: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    trusted: bool,
) -> Prior:
    """Build the networks that a record describes, with any weights."""
    try:
        code = code_in(info)
        if code and not trusted:
            raise CheckpointError(
                f"{path} names code to run ({code}), and a file must hold weights alone: name the "
                "code in a config, as prior.source or a student"
            )
        with seeded(0, "read_prior"):  # the weights drawn here are replaced later
            if not code:  # without memory first: code of the user's need not support that
                shapes = [tensor.shape for tensor in tensors.values()]
                with torch.device("meta"), within_file(path, shapes):
                    _skeleton(info, facts.image_shape, facts.classes)
            return _skeleton(info, facts.image_shape, facts.classes)
    except CheckpointError:
        raise
    except FrostglassError as error:
        raise _damaged(path, str(error)) from error
    except (*MODEL_ERRORS, OverflowError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}, {first_line(error)}") from error


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} does not say how its prior was made ({reason[:160]}): make the prior again"
    )


def _read_file(path: Path) -> tuple[PriorFacts, dict[str, Tensor]]:
    """Return the record and the tensors of a prior's file."""
    if not path.is_file():
        raise CheckpointError(
            f"no prior at {path}: give the path of a file written by frostglass, or the name of an "
            "embedded prior"
        )
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("frostglass_prior")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}): make the prior again"
        ) from None
    if text is None:
        raise CheckpointError(
            f"{path} holds weights but does not say it is a frostglass prior: expected a file "
            "written by save_prior"
        )
    try:
        return PriorFacts.model_validate_json(text, strict=True), tensors
    except ValidationError as error:
        raise _damaged(path, problems(error)[0]) from None


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], parts: Sequence[str]) -> None:
    """Refuse tensors that belong to no network, or are not finite."""
    prefixes = tuple(f"{part}." for part in parts)
    others = ("seen_identities", "features", *SCORED)
    stray = sorted(n for n in tensors if n not in others and not n.startswith(prefixes))
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    broken = sorted(name for name, tensor in floats.items() if not tensor.isfinite().all())
    missing = "" if _is_list(tensors.get("seen_identities")) else "no "
    table = tensors.get("features", torch.zeros(2, 1))  # mean and deviation
    if stray or broken or missing or len(table) != 2 or table.ndim != 2:
        raise CheckpointError(
            f"{path} is not as it was written: {len(stray)} tensors too many "
            f"({', '.join(stray[:3])}), {len(broken)} not finite ({', '.join(broken[:3])}), "
            f"{missing}list of the identities it was trained on; make the prior again"
        )


def _is_list(seen: Tensor | None) -> bool:
    return seen is not None and (seen.dtype, seen.ndim) == (torch.int64, 1)


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
    return named_code({"method": info["method"], "base": info.get("base")})


def _skeleton(info: Mapping[str, Any], shape: Shape, classes: int) -> Prior:
    """Build the networks as the recorded method does; on those of its base, if it has one."""
    base = _skeleton(info["base"], shape, classes) if "base" in info else None
    method = priors.get(info["method"]["name"])(**info["method"]["parameters"])
    return method.skeleton(shape, classes, base)
