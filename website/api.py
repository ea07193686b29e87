"""The API reference: every public name, from its signature and docstring."""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import frostglass
from website.text import cell, code, fenced, prose, table

GROUPS = {
    "Run and report": (
        "Experiment", "experiments", "audit", "Audit", "audit_model", "run_all", "Run", "write_run",
        "build_report", "harden", "analyze", "Analysis", "problems", "estimate", "Store", "Work",
    ),
    "Data": ("Images", "Split", "make_split"),
    "Models": ("Training", "train_target", "Target", "wrap", "examine", "cut"),
    "Attack and measure": (
        "invert", "prior_only", "Assets", "Reconstructions", "ModelView", "FeatureView", "Prior",
        "read_prior", "write_prior", "measure", "Evidence", "Rows", "Score", "Embedder",
        "read_embedder", "Verifier", "enrol",
    ),
    "Split inference": ("split_model", "Client", "Server", "ship", "release_folder"),
    "Methods of your own": (
        "Method", "parameters", "Attack", "Defense", "PriorMethod", "Metric", "Dataset", "Threat",
        "AnalysisMethod", "AuditSize", "Budget",
    ),
    "Errors": ("FrostglassError",),
}  # fmt: skip
QUALIFIER = re.compile(r"\b(?:frostglass|torch|collections|pathlib|numpy|typing)(?:\.\w+)*\.(?=\w)")
HIDDEN = ("model_", "_")


def api_page() -> str:
    """Return the reference of `import frostglass as fg`, and of the contract tests."""
    grouped = [name for names in GROUPS.values() for name in names]
    other = sorted(set(frostglass.__all__) - set(grouped))
    parts = [
        "# API reference",
        "`import frostglass as fg` has these names. Classes of methods are in the subpackages "
        "`frostglass.attacks`, `.defenses`, `.priors`, `.metrics`, `.data`, `.robustness` and "
        "`.analyses`: see [Methods](methods/index.md).",
    ]
    for title, names in {**GROUPS, "More": tuple(other)}.items():
        known = [name for name in names if name in frostglass.__all__]
        if known:
            parts.append(f"## {title}")
            parts += [_entry(name, getattr(frostglass, name)) for name in known]
    parts += ["## Contract tests: `frostglass.testing`", *_testing()]
    return "\n\n".join(parts) + "\n"


def _testing() -> list[str]:
    module = importlib.import_module("frostglass.testing")
    named = inspect.getmembers(module, inspect.isfunction)
    return [_entry(name, value) for name, value in named if name.startswith("check_")]


def _entry(name: str, value: Any) -> str:
    parts = [f"### {name}"]
    if not inspect.isclass(value) or dataclasses.is_dataclass(value):
        parts.append(fenced("python", f"{name}{_signature(value)}"))
    parts.append(_docstring(value))
    if inspect.isclass(value) and (rows := _members(value)):
        parts.append(table(["member", "does"], rows))
    return "\n\n".join(parts)


def _signature(value: Any) -> str:
    """Return a signature without the packages of its types, wrapped if it is long."""
    signature = inspect.signature(value)
    text = QUALIFIER.sub("", str(signature)).replace("'", "")
    if len(text) <= 80:
        return text
    names = [QUALIFIER.sub("", str(one)).replace("'", "") for one in signature.parameters.values()]
    kinds = [one.kind for one in signature.parameters.values()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    if keyword in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        names.insert(kinds.index(keyword), "*")
    returned = text.rpartition(") -> ")[2] if ") -> " in text else ""
    return "(\n    " + ",\n    ".join(names) + ",\n)" + (f" -> {returned}" if returned else "")


def _docstring(value: Any) -> str:
    text, _, arguments = inspect.cleandoc(value.__doc__ or "").partition("\nArgs:\n")
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("    "):
            paragraphs.append(fenced("python", inspect.cleandoc(paragraph)))
        else:
            paragraphs.append(prose(paragraph))
    entries = re.sub(r"\n\s+", " ", inspect.cleandoc(arguments))
    rows = [line.partition(": ") for line in entries.splitlines() if ": " in line]
    if rows:
        listed = ([code(name), cell(meaning)] for name, _, meaning in rows)
        paragraphs.append(table(["argument", "meaning"], listed))
    return "\n\n".join(paragraphs)


def _members(cls: type) -> list[list[str]]:
    """Return public methods and properties that the package defines and explains."""
    rows = []
    for name, value in inspect.getmembers(cls):
        found = value.fget if isinstance(value, property) else value
        if name.startswith(HIDDEN) or not (inspect.isfunction(found) or inspect.ismethod(found)):
            continue
        if not (found.__module__ or "").startswith("frostglass") or not found.__doc__:
            continue
        call = "" if isinstance(value, property) else "()"
        summary = inspect.cleandoc(found.__doc__).split("\n\n")[0]
        rows.append([code(f"{name}{call}"), cell(summary)])
    return rows
