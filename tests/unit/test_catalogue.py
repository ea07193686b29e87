"""The catalogue: every method says what it is and what each of its parameters means."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from frostglass.audit import catalogue
from frostglass.audit.catalogue import KINDS, describe, entries
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters

METHODS = [(kind, name) for kind, registry in KINDS.items() for name in registry.names()]


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_method_in_one_line(kind, name):
    entry = next(entry for entry in entries(kind) if entry["name"] == name)
    facts = describe(name)
    assert entry == {"name": name, "kind": kind, "summary": facts["summary"]}
    assert 20 < len(entry["summary"]) < 200
    assert entry["summary"][-1] in ".?"
    assert "\n" not in entry["summary"]
    assert facts["text"].replace("\n", " ").startswith(entry["summary"])


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_parameter_is_explained(kind, name):
    facts = describe(name)
    told = set(re.findall(r"\w+", facts["text"] + facts["arguments"]))
    told |= {word.removesuffix("ped") for word in told}  # "cropped" tells of `crop`
    assert [
        parameter["name"] for parameter in facts["parameters"] if parameter["name"] not in told
    ] == []


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_parameter_has_a_type_and_a_default_that_it_takes(kind, name):
    found = describe(name)["parameters"]
    assert all(re.fullmatch(r"[\w' |.,\[\]]+", parameter["type"]) for parameter in found), found
    assert all((parameter["default"] is None) or not parameter["required"] for parameter in found)
    json.dumps(found)
    if kind != "models" and not any(parameter["required"] for parameter in found):
        method = KINDS[kind].get(name)
        assert (
            method(**{parameter["name"]: parameter["default"] for parameter in found}) == method()
        )


def test_a_docstring_is_split_into_text_and_arguments():
    facts = describe("gmi")
    assert facts["kind"] == "attack"
    assert facts["file"] == "frostglass.attacks.model.gmi"
    assert "Paper: " in facts["text"]
    assert "Args:" not in facts["text"] + facts["arguments"]
    assert facts["arguments"].startswith(
        "coupling: "
    )  # its own first, then those all attacks by gradients share
    assert "\nloss: what the target should think" in facts["arguments"]
    assert [variant["name"] for variant in facts["variants"]] == [
        "noise",
        "aimed",
        "straight",
        "margin",
        "poincare",
    ]
    assert {"name": "steps", "type": "int", "default": 1500, "required": False} in facts[
        "parameters"
    ]
    assert {"name": "private", "type": "Path", "default": None, "required": True} in describe(
        "folder"
    )["parameters"]


def test_what_the_data_decides_is_no_parameter_of_a_model():
    assert [parameter["name"] for parameter in describe("resnet")["parameters"]] == [
        "width",
        "depth",
    ]


@parameters
class Sample:
    """Is it short? Yes. And
    it goes on.
    """

    plain: int
    bounded: Annotated[float, Field(gt=0)] = 0.5
    maybe: Annotated[int, Field(ge=1)] | None = None
    choice: Literal["a", 3] = "a"
    several: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2)
    table: dict[str, Any] = Field(default_factory=dict)
    place: Path | None = None


def test_types_are_told_as_a_person_would():
    assert catalogue._summary(Sample) == "Is it short?"
    told = [
        (p["name"], p["type"], p["default"], p["required"]) for p in catalogue._parameters(Sample)
    ]
    assert told == [
        ("plain", "int", None, True),
        ("bounded", "float", 0.5, False),
        ("maybe", "int | none", None, False),
        ("choice", "'a' | 3", "a", False),
        ("several", "tuple[int, ...]", (1, 2), False),
        ("table", "dict[str, Any]", {}, False),
        ("place", "Path | none", None, False),
    ]


def test_unknown_names():
    with pytest.raises(
        ConfigError,
        match=r"nothing is named 'calorr': did you mean 'calor'\? known: accuracy, adv_learn, .*bido, brepmi, calor, ",
    ):
        describe("calorr")
    with pytest.raises(
        ConfigError,
        match=r"no kind named 'attack': did you mean 'attacks'\? known: attacks, datasets, defenses",
    ):
        entries("attack")


def test_a_section_of_a_config_has_a_page():
    facts = describe("target")
    assert facts["kind"] == "config section"
    named = {parameter["name"] for parameter in facts["parameters"]}
    assert {"start", "start_parts", "milestones", "jitter", "keep"} <= named
    assert all(name in facts["arguments"] for name in named)
