"""What exists, and what each thing is: read from the registries and docstrings, never typed by hand."""

import dataclasses
import inspect
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from frostglass.attacks.base import attacks
from frostglass.attacks.features.base import feature_attacks
from frostglass.audit.config import Fractions, Judging
from frostglass.audit.features import FeatureJudging
from frostglass.core.errors import ConfigError
from frostglass.core.registry import Registry, nearest
from frostglass.data.base import datasets
from frostglass.defenses.base import defenses
from frostglass.metrics.base import metrics
from frostglass.models.base import models
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.base import priors
from frostglass.training.settings import Training

KINDS: dict[str, Registry] = {
    "datasets": datasets, "models": models, "defenses": defenses, "priors": priors, "attacks": attacks,
    "feature_attacks": feature_attacks, "metrics": metrics,
}  # fmt: skip
SECTIONS: dict[str, Any] = {
    "target": Training, "split": Fractions, "judging": Judging, "feature judging": FeatureJudging, "amortizer": Amortizer,
}  # fmt: skip
DECIDED_BY_DATA = ("classes", "image_shape")


def entries(kind: str) -> list[dict[str, Any]]:
    """Name and one-line summary of everything of a kind."""
    if kind not in KINDS:
        raise ConfigError(f"no kind named {kind!r}: {nearest(kind, KINDS)}")
    return [
        {"name": name, "kind": kind, "summary": _summary(KINDS[kind].get(name))}
        for name in KINDS[kind].names()
    ]


def describe(name: str) -> dict[str, Any]:
    """One method in full: summary, text, parameters with defaults and meaning."""
    if name in SECTIONS:
        return _page(name, "config section", SECTIONS[name])
    for kind, registry in KINDS.items():
        if name in registry.names():
            return _page(name, kind.removesuffix("s"), registry.get(name))
    known = [*SECTIONS, *(n for registry in KINDS.values() for n in registry.names())]
    raise ConfigError(f"nothing is named {name!r}: {nearest(name.lower(), known)}")


def _page(name: str, kind: str, method: Any) -> dict[str, Any]:
    body, _ = _told(method)
    return {
        "name": name,
        "kind": kind,
        "summary": _summary(method),
        "text": body.strip(),
        "parameters": _parameters(method),
        "arguments": "\n".join(filter(None, (_told(part)[1] for part in _with_bases(method)))),
        "variants": [
            {"name": variant, "why": why, "sets": dict(sets)}
            for variant, (why, sets) in getattr(method, "variants", {}).items()
        ],
        "file": inspect.getmodule(method).__name__,  # type: ignore[union-attr]
    }


def _told(method: Any) -> tuple[str, str]:
    """A docstring's text, and what it says of arguments."""
    body, _, arguments = inspect.cleandoc(method.__doc__ or "").partition("\nArgs:\n")
    return body, inspect.cleandoc(arguments)


def _with_bases(method: Any) -> list[Any]:
    """A class and those whose parameters it takes over, which explain them; a function alone."""
    return (
        [part for part in method.__mro__ if dataclasses.is_dataclass(part)]
        if inspect.isclass(method)
        else [method]
    )


def _summary(method: Any) -> str:
    """The first sentence of the docstring, in one line."""
    first = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.?!])\s+(?=[A-Z])", first, maxsplit=1)[0]


def _parameters(method: Any) -> list[dict[str, Any]]:
    if dataclasses.is_dataclass(method):
        fields = method.__pydantic_fields__.items()  # type: ignore[union-attr]
        given = [
            (
                name,
                field.annotation,
                field.get_default(call_default_factory=True),
                field.is_required(),
            )
            for name, field in fields
        ]
    else:
        taken = [
            p
            for p in inspect.signature(method).parameters.values()
            if p.name not in DECIDED_BY_DATA
        ]
        given = [
            (p.name, p.annotation, p.default, p.default is inspect.Parameter.empty) for p in taken
        ]
    return [
        {
            "name": name,
            "type": _type(annotation),
            "default": None if required else default,
            "required": required,
        }
        for name, annotation, default, required in given
    ]


def _type(annotation: Any) -> str:
    """A type as a person would say it: Annotated[int, Field(ge=1)] is int."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return " | ".join(map(repr, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(_type, parts))
    if origin:
        return f"{origin.__name__}[{', '.join(map(_type, parts))}]"
    if annotation is NoneType or annotation is Ellipsis:
        return "none" if annotation is NoneType else "..."
    return getattr(annotation, "__name__", str(annotation))
