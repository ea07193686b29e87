"""What exists, and what each thing is: read from the registries and docstrings, never typed by hand."""

import dataclasses
import inspect
from typing import Any, get_args

from frostglass.attacks.base import attacks
from frostglass.data.base import datasets
from frostglass.defenses.base import defenses
from frostglass.errors import ConfigError
from frostglass.metrics.base import metrics
from frostglass.models.base import models
from frostglass.priors.base import priors
from frostglass.registry import Registry, nearest

KINDS: dict[str, Registry] = {
    "datasets": datasets, "models": models, "defenses": defenses, "priors": priors, "attacks": attacks, "metrics": metrics,
}  # fmt: skip


def entries(kind: str) -> list[dict[str, Any]]:
    """Name and one-line summary of everything of a kind."""
    if kind not in KINDS:
        raise ConfigError(f"no kind named {kind!r}: {nearest(kind, KINDS)}")
    return [{"name": name, "kind": kind, "summary": _summary(KINDS[kind].get(name))} for name in KINDS[kind].names()]


def describe(name: str) -> dict[str, Any]:
    """One method in full: summary, text, parameters with defaults and meaning."""
    for kind, registry in KINDS.items():
        if name in registry.names():
            method = registry.get(name)
            text = inspect.cleandoc(method.__doc__ or "")
            body, _, arguments = text.partition("\nArgs:\n")
            return {
                "name": name,
                "kind": kind,
                "summary": _summary(method),
                "text": body.strip(),
                "parameters": _parameters(method),
                "arguments": inspect.cleandoc(arguments),
                "file": inspect.getmodule(method).__name__,  # type: ignore[union-attr]
            }
    raise ConfigError(f"nothing is named {name!r}: {nearest(name, [n for registry in KINDS.values() for n in registry.names()])}")


def _summary(method: Any) -> str:
    return inspect.cleandoc(method.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _parameters(method: Any) -> list[dict[str, Any]]:
    if dataclasses.is_dataclass(method):
        return [{"name": f.name, "type": _type(f.type), "default": _default(f)} for f in dataclasses.fields(method)]
    given = {"classes", "image_shape"}  # what the data decides
    return [
        {"name": p.name, "type": _type(p.annotation), "default": p.default}
        for p in inspect.signature(method).parameters.values()
        if p.name not in given
    ]


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        value = getattr(field.default, "default", field.default)  # pydantic keeps Field(...) objects
        return [] if repr(value) == "PydanticUndefined" else value
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else "required"


def _type(annotation: Any) -> str:
    """A type as a person would say it: Annotated[int, Field(ge=1)] is int."""
    if isinstance(annotation, str):
        return annotation
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if getattr(annotation, "__origin__", None) is not None and "Literal" in str(annotation.__origin__):
        return " | ".join(repr(choice) for choice in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    if get_args(annotation) and "|" in str(annotation):
        return " | ".join(_type(a) for a in get_args(annotation)).replace("NoneType", "none")
    return str(annotation).replace("typing.", "")
