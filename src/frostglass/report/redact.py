"""Runs without people: letters for names and a few colours for faces, replaced before anything is written."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from frostglass.report.charts import frosted
from frostglass.report.runs import LoadedRun, RunFacts
from frostglass.training.settings import PUBLIC

OWN_WORDS = ("name", "loss", "optimizer", "schedule", "keep")


def without_names_and_faces(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    """The same runs with letters for people and a few colours for each face; a person has one letter in all of them."""
    cover = covered(
        name
        for run in runs
        for name in [*run.facts.identities, *(n for v in run.verdicts for n in v)]
    )
    hide = hider(cover)
    result = []
    for run in runs:
        document = hidden_document(hide, run.document)
        for plain, hidden in zip(run.document["audits"], document["audits"], strict=True):
            # What defenses tell of a network is about layers and numbers; only the recipe may name files.
            hidden["training"] = plain["training"] | {
                "recipe": hidden_method(hide, plain["training"]["recipe"])
            }
        verdicts = tuple(
            {cover[name]: verdict for name, verdict in some.items()} for some in run.verdicts
        )
        pictures = {name: frosted(pixels) for name, pixels in run.pictures.items()}
        result.append(LoadedRun(document, RunFacts.model_validate(document), verdicts, pictures))
    return result


def hidden_document(hide: Callable[[str], str], document: Mapping[str, Any]) -> dict[str, Any]:
    """A run.json of any kind without people."""
    hidden: dict[str, Any] = everywhere(hide, document)
    for plain, audit in zip(document["audits"], hidden["audits"], strict=True):
        audit["attack"] = hidden_method(hide, plain["attack"])
        audit["defenses"] = [hidden_method(hide, defense) for defense in plain["defenses"]]
    return hidden | {
        part: everywhere(hide, document[part], keys=True) for part in ("settings", "data")
    }


def hidden_method(hide: Callable[[str], str], method: Mapping[str, Any]) -> dict[str, Any]:
    """Choices of methods are this package's words and never people, whatever somebody called a folder."""
    return {
        key: value if key in OWN_WORDS or value == PUBLIC else everywhere(hide, value)
        for key, value in method.items()
    }


def covered(names: Iterable[str]) -> dict[str, str]:
    """A letter for each name, the same one wherever it comes."""
    return {name: f"person {_letters(place)}" for place, name in enumerate(dict.fromkeys(names))}


def _letters(place: int) -> str:
    """A, B, … Z, AA, AB, …"""
    letter = chr(ord("A") + place % 26)
    return letter if place < 26 else _letters(place // 26 - 1) + letter


def hider(cover: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces names in a text: as words of their own, or, for numbers and very short ones, as a whole text or path part."""
    names, patterns = sorted(cover, key=len, reverse=True), []
    for name in names:
        if len(name) < 3 or name.isdigit():
            patterns.append(rf"(?<![^/\\])({re.escape(name)})(?![^/\\])")
        else:
            left, right = (
                r"(?<![^\W_])" if name[0].isalnum() else "",
                r"(?![^\W_])" if name[-1].isalnum() else "",
            )
            patterns.append(f"{left}({re.escape(name)}){right}")
    pattern = re.compile("|".join(patterns), re.IGNORECASE)
    # As it is written first: two people's names may differ in nothing but case.
    return lambda text: pattern.sub(
        lambda hit: cover.get(hit.group()) or cover[names[(hit.lastindex or 0) - 1]], text
    )


def everywhere(change: Callable[[str], str], value: Any, *, keys: bool = False) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [everywhere(change, item, keys=keys) for item in value]
    if isinstance(value, dict):
        return {
            (change(key) if keys else key): everywhere(change, item, keys=keys)
            for key, item in value.items()
        }
    return value
