"""What exists, and what each thing is: read from the registries and docstrings."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from frostglass.analyses.base import analyses
from frostglass.attacks.base import Attack, attacks
from frostglass.auditing.experiment import Judging
from frostglass.auditing.fractions import Fractions
from frostglass.auditing.thresholds import Thresholds
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize, Budget, Method
from frostglass.core.registry import Registry, import_path, nearest
from frostglass.data.base import datasets
from frostglass.defenses.base import Defense, defenses
from frostglass.metrics.base import metrics
from frostglass.models.base import models
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.base import priors
from frostglass.published import reading as published
from frostglass.robustness.base import threats
from frostglass.training.settings import Training

KINDS: dict[str, Registry] = {
    "datasets": datasets,
    "models": models,
    "defenses": defenses,
    "priors": priors,
    "attacks": attacks,
    "metrics": metrics,
    "threats": threats,
    "analyses": analyses,
}
SECTIONS: dict[str, Any] = {
    "target": Training,
    "split": Fractions,
    "judging": Judging,
    "thresholds": Thresholds,
    "amortizer": Amortizer,
}
SET_BY_DATA = ("classes", "image_shape")
# Sections of a docstring; they come after its text, each with further lines indented or not.
SECTION = re.compile(r"(?:^|(?<=[.?!]) )(Use|Cost|Paper|Differs): ", re.MULTILINE)
EXAMPLE = AuditSize(people=40, public=8000, classes=40)
EXAMPLE_WORDS = "40 people, an image each, and 8,000 public images"
PAPERS = "papers"  # tables of papers, which are no methods


def entries(kind: str) -> list[dict[str, Any]]:
    """Return name, surface and one-line summary of every method of a kind."""
    if kind == PAPERS:
        return [
            {"name": table.name, "kind": PAPERS, "summary": summary_of(table)}
            for table in published.tables()
        ]
    if kind not in KINDS:
        raise ConfigError(f"no kind named {kind!r}: {nearest(kind, [*KINDS, PAPERS])}")
    registry = KINDS[kind]
    rows = [
        {"name": name, "kind": kind, "summary": _summary(registry.get(name))}
        for name in registry.names()
    ]
    if registry is attacks:
        rows = [row | {"surface": attacks.get(row["name"]).surface} for row in rows]
    if registry is defenses:
        rows = [row | {"surface": _surface(defenses.get(row["name"]))} for row in rows]
    return rows


def _surface(defense: type[Defense]) -> str:
    """Return what a defense protects: whole models, or features that leave a device."""
    return "features" if defense.needs_cut else "model"


def _adaptive(defense: type[Defense]) -> list[str]:
    """Name the attacks that know a defense, or their variants and parameters that do."""
    named = []
    for name in defense.adaptive:
        variants = [each for each in attacks.names() if name in attacks.get(each).variants]
        parameters = [
            each
            for each in attacks.names()
            if name in (field.name for field in dataclasses.fields(attacks.get(each)))
        ]
        if variants:
            named.append(f"{name} (variant of {', '.join(variants)})")
        elif parameters:
            named.append(f"{name} (parameter of {', '.join(parameters)})")
        else:
            named.append(name)
    return named


def attackers_of(facts: Mapping[str, Any]) -> str:
    """Return who knows a defense, in words; "" for what is not a defense."""
    if facts["adaptive"] is None:
        return ""
    return "; ".join(facts["adaptive"]) or "none here"


def summary_of(table: published.Table) -> str:
    """Return what a published table is about, in one line."""
    return f"[{table.entry.kind}] {table.paper.name} {table.entry.number}: {table.entry.about}"


def describe(name: str) -> dict[str, Any]:
    """Return one method in full: summary, text, parameters with defaults and meaning."""
    if name in SECTIONS:
        return _page(name, "config section", SECTIONS[name])
    for registry in KINDS.values():
        if name in registry.names():
            return _page(name, registry.kind, registry.get(name))
    if ":" in name:
        return _page(name, *_imported(name))
    known = [*SECTIONS, *(n for registry in KINDS.values() for n in registry.names())]
    known += published.names()
    raise ConfigError(f"nothing is named {name!r}: {nearest(name.lower(), known)}")


def _imported(path: str) -> tuple[str, Any]:
    """Return kind and class of a method given as package.module:Class."""
    method = import_path(path)
    for registry in KINDS.values():
        contract = registry.contract
        if contract and inspect.isclass(method) and issubclass(method, contract):
            registry.check(method)
            return registry.kind, method
    raise ConfigError(
        f"{path!r} is no method: expected a class that inherits from frostglass.Attack, Defense, "
        "PriorMethod, Metric, Dataset, Threat or AnalysisMethod"
    )


def _page(name: str, kind: str, method: Any) -> dict[str, Any]:
    body, _ = _docstring(method)
    about, sections = parse_sections(body)
    is_method = inspect.isclass(method) and issubclass(method, Method)
    variants = method.variants if is_method else {}
    listed = _parameters(method)
    arguments = "\n".join(filter(None, (_docstring(part)[1] for part in _with_bases(method))))
    return {
        "name": name,
        "kind": kind,
        "title": (method.title if is_method else "") or name,
        "summary": _summary(method),
        "text": body.strip(),
        "about": about,
        "use": sections.get("Use", ""),
        "cost": sections.get("Cost", "") or _cost(method),
        "paper": sections.get("Paper", ""),
        "differs": sections.get("Differs", ""),
        "parameters": listed,
        "arguments": arguments,
        "meanings": parse_meanings(arguments, [parameter["name"] for parameter in listed]),
        "variants": [
            {"name": variant, "why": why, "sets": dict(sets)}
            for variant, (why, sets) in variants.items()
        ],
        "adaptive": _adaptive(method) if is_method and issubclass(method, Defense) else None,
        "file": method.__module__,
    }


def _docstring(method: Any) -> tuple[str, str]:
    """Split a docstring into its text and its arguments."""
    body, _, arguments = inspect.cleandoc(method.__doc__ or "").partition("\nArgs:\n")
    return body, inspect.cleandoc(arguments)


def parse_sections(text: str) -> tuple[str, dict[str, str]]:
    """Split the text of a docstring into what it says first, and its named sections in one line."""
    about, *parts = SECTION.split(text)
    sections, after = {}, []
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        section, _, rest = part.partition("\n\n")
        sections[name] = " ".join(section.split())
        after += [rest] if rest.strip() else []
    return "\n\n".join(piece.strip() for piece in (about, *after)), sections


def parse_meanings(arguments: str, names: Sequence[str]) -> dict[str, str]:
    """Return what a docstring says of each parameter; several may share a line or an entry."""
    entries = re.sub(r"\n\s+", " ", arguments)
    name = "|".join(map(re.escape, names)) or "(?!)"
    _, *parts = re.split(rf"(?:^|(?<=\. ))((?:{name})(?:, (?:{name}))*): ", entries, flags=re.M)
    meanings: dict[str, str] = {}
    for heads, text in zip(parts[::2], parts[1::2], strict=True):
        for each in heads.split(", "):
            # What a base says comes first: a subclass adds remarks.
            meanings[each] = " ".join([*text.split(), *meanings.get(each, "").split()])
    return meanings


def _cost(method: Any) -> str:
    """Return the work of a method at its defaults in an audit of 40 people, where it says so."""
    if not (inspect.isclass(method) and issubclass(method, Method)):
        return ""
    if any(parameter["required"] for parameter in _parameters(method)):
        return ""
    stages: list[Method] = [method()]
    if isinstance(stages[0], Attack) and stages[0].pretraining is not None:
        stages.insert(0, stages[0].pretraining)
    return "; ".join(filter(None, (_work(stage.budget(EXAMPLE)) for stage in stages)))


def _work(budget: Budget) -> str:
    counts = ((budget.evaluations, "the attacked network"), (budget.trained, "networks it trains"))
    shown = [f"{count:,} images through {whose}" for count, whose in counts if count]
    return ": ".join(filter(None, [budget.description, " and ".join(shown)]))


def _with_bases(method: Any) -> list[Any]:
    """Return a class and the bases whose parameters it inherits; a function alone."""
    if not inspect.isclass(method):
        return [method]
    return [part for part in method.__mro__ if dataclasses.is_dataclass(part)]


def _summary(method: Any) -> str:
    """Return the first sentence of the docstring, in one line."""
    first = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.?!])\s+(?=[A-Z])", first, maxsplit=1)[0]


def _parameters(method: Any) -> list[dict[str, Any]]:
    if dataclasses.is_dataclass(method):
        return [
            _parameter(
                name,
                field.annotation,
                field.get_default(call_default_factory=True),
                field.is_required(),
            )
            for name, field in method.__pydantic_fields__.items()  # type: ignore[union-attr]
        ]
    return [
        _parameter(name, one.annotation, one.default, one.default is inspect.Parameter.empty)
        for name, one in inspect.signature(method).parameters.items()
        if name not in SET_BY_DATA
    ]


def _parameter(name: str, annotation: Any, default: Any, required: bool) -> dict[str, Any]:
    default = None if required else default
    return {"name": name, "type": _type(annotation), "default": default, "required": required}


def _type(annotation: Any) -> str:
    """Return a readable type: Annotated[int, Field(ge=1)] is int."""
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
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)
