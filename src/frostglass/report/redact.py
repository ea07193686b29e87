"""Runs without people: letters for names and a few colours for faces."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from frostglass.report.charts import redacted
from frostglass.report.facts import parsed
from frostglass.report.load import AuditRows, Run
from frostglass.training.settings import PUBLIC

# Values of these keys are words of the package or of the data's table, never people.
OWN_WORDS = ("name", "loss", "optimizer", "schedule", "keep")
OWN_FACTS = ("surface", "access", "attributes", "cut")


def without_names_and_faces(runs: Sequence[Run]) -> list[Run]:
    """Replace people by letters, the same in all runs, and faces by a few colours."""
    names = [[*run.facts.identities, *(n for rows in run.rows for n in rows.names)] for run in runs]
    letters = _letters_of(name for some in names for name in some)
    hide = _hider(letters)
    result = []
    for run in runs:
        document = _hidden_document(hide, run.document)
        rows = tuple(
            AuditRows(tuple(letters[name] for name in each.names), each.columns)
            for each in run.rows
        )
        images = {name: redacted(pixels) for name, pixels in run.images.items()}
        # Rates by attribute need them; what is written does not have them.
        facts = parsed(document | {"attributes": run.facts.attributes})
        result.append(Run(document, facts, rows, images, redacted=True))
    return result


def _hidden_document(hide: Callable[[str], str], document: Mapping[str, Any]) -> dict[str, Any]:
    hidden: dict[str, Any] = _everywhere(hide, document)
    for plain, audit in zip(document["audits"], hidden["audits"], strict=True):
        audit |= {key: plain[key] for key in OWN_FACTS if key in plain}
        audit["attack"] = _hidden_method(hide, plain["attack"])
        audit["defenses"] = [_hidden_method(hide, defense) for defense in plain["defenses"]]
        if "training" in plain:
            # What defenses report is about layers and numbers; only the recipe may name files.
            recipe = _hidden_method(hide, plain["training"]["recipe"])
            audit["training"] = plain["training"] | {"recipe": recipe}
    # Attributes of each person may tell who it is.
    return hidden | {
        "attributes": {},
        **{part: _everywhere(hide, document[part], keys=True) for part in ("settings", "data")},
    }


def _hidden_method(hide: Callable[[str], str], method: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if key in OWN_WORDS or value == PUBLIC else _everywhere(hide, value)
        for key, value in method.items()
    }


def _letters_of(names: Iterable[str]) -> dict[str, str]:
    return {name: f"person {_letter(place)}" for place, name in enumerate(dict.fromkeys(names))}


def _letter(place: int) -> str:
    """A, B, … Z, AA, AB, …"""
    letter = chr(ord("A") + place % 26)
    return letter if place < 26 else _letter(place // 26 - 1) + letter


def _hider(letters: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces names in a text.

    Names are replaced as words; numbers and very short names only as whole texts or path parts.
    """
    names, patterns = sorted(letters, key=len, reverse=True), []
    for name in names:
        left, right = r"(?<![^/\\])", r"(?![^/\\])"
        if len(name) >= 3 and not name.isdigit():
            left = r"(?<![^\W_])" if name[0].isalnum() else ""
            right = r"(?![^\W_])" if name[-1].isalnum() else ""
        patterns.append(f"{left}({re.escape(name)}){right}")
    pattern = re.compile("|".join(patterns), re.IGNORECASE)
    # Exact spelling first: two names may differ in nothing but case.
    return lambda text: pattern.sub(
        lambda hit: letters.get(hit.group()) or letters[names[(hit.lastindex or 0) - 1]], text
    )


def _everywhere(change: Callable[[str], str], value: Any, *, keys: bool = False) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_everywhere(change, item, keys=keys) for item in value]
    if isinstance(value, dict):
        return {
            (change(key) if keys else key): _everywhere(change, item, keys=keys)
            for key, item in value.items()
        }
    return value
