"""The catalogue: every method says what it is and what each of its parameters means."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from frostglass.cli import catalogue
from frostglass.cli.catalogue import KINDS, describe, entries
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters

METHODS = [(kind, name) for kind, registry in KINDS.items() for name in registry.names()]


def test_what_attacks_act_on_and_defenses_protect():
    surfaces = {
        row["name"]: row["surface"] for kind in ("attacks", "defenses") for row in entries(kind)
    }
    assert {surfaces[name] for name in ("latent", "decoder", "disco", "later_cut")} == {"features"}
    assert {surfaces[name] for name in ("gmi", "smile", "midre", "ssd")} == {"model"}


def test_a_defense_names_the_attackers_who_know_it():
    assert describe("midre")["adaptive"] == ["erased (variant of gmi, ifgmi, lomma, mirror, ppa)"]
    assert describe("decoys")["adaptive"][1:3] == ["modes", "members"]
    assert describe("gmi")["adaptive"] is None
    assert describe("disco")["adaptive"] == [
        "channels (variant of decoder, hybrid, latent)",
        "adapt (parameter of decoder, latent, mapper)",
    ]
    assert describe("bido")["adaptive"] == []


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_method_in_one_line(kind, name):
    entry = next(entry for entry in entries(kind) if entry["name"] == name)
    facts = describe(name)
    surface = {"surface": entry["surface"]} if kind in ("attacks", "defenses") else {}
    assert entry == {"name": name, "kind": kind, "summary": facts["summary"]} | surface
    assert 20 < len(entry["summary"]) < 200
    assert entry["summary"][-1] in ".?"
    assert "\n" not in entry["summary"]
    assert facts["text"].replace("\n", " ").startswith(entry["summary"])


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_parameter_is_explained(kind, name):
    facts = describe(name)
    words = set(re.findall(r"\w+", facts["text"] + facts["arguments"]))
    words |= {word.removesuffix("ped") for word in words}  # "cropped" explains `crop`
    assert {parameter["name"] for parameter in facts["parameters"]} <= words


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_parameter_has_a_type_and_a_default_that_it_takes(kind, name):
    listed = describe(name)["parameters"]
    assert all(re.fullmatch(r"[\w' |.,\[\]]+", parameter["type"]) for parameter in listed), listed
    assert all((parameter["default"] is None) or not parameter["required"] for parameter in listed)
    json.dumps(listed)
    if kind != "models" and not any(parameter["required"] for parameter in listed):
        method = KINDS[kind].get(name)
        assert method(**{one["name"]: one["default"] for one in listed}) == method()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        each
        for each in METHODS
        if each[0] in ("attacks", "defenses", "priors", "metrics", "threats")
    ],
)
def test_a_method_says_when_to_use_it(kind, name):
    facts = describe(name)
    assert 10 < len(facts["use"]) < 200
    assert facts["use"][-1] in ".?"
    assert f"Use: {facts['use'].split()[0]}" in facts["text"]
    assert not any(f"{section}: " in facts["about"] for section in ("Use", "Paper", "Differs"))


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_what_is_said_of_a_parameter_is_found(kind, name):
    facts = describe(name)
    assert set(facts["meanings"]) == {parameter["name"] for parameter in facts["parameters"]}
    for parameter, meaning in facts["meanings"].items():  # a subclass adds remarks, no second one
        begins = [" ".join(part.split()[:2]) for part in meaning.split(". ")]
        assert len(begins) == len(set(begins)), (parameter, meaning)


def test_sections_and_meanings():
    text = "Does it.\n\nx = y.\n\nUse: never,\n    or now.\nPaper: A, B.\nDiffers: no.\n\nMore."
    assert catalogue.parse_sections(text) == (
        "Does it.\n\nx = y.\n\nMore.",
        {"Use": "never, or now.", "Paper": "A, B.", "Differs": "no."},
    )
    inline = "Does it.\n\nPaper: A, 1998. Differs: ReLU."
    assert catalogue.parse_sections(inline)[1] == {"Paper": "A, 1998.", "Differs": "ReLU."}
    arguments = "a: first,\n    of two. b: second: last.\nc, d: both.\na: base."
    assert catalogue.parse_meanings(arguments, "abcd") == {
        "a": "base. first, of two.", "b": "second: last.", "c": "both.", "d": "both.",
    }  # fmt: skip


def test_cost_is_that_of_the_defaults():
    assert describe("gmi")["cost"].startswith("40 people × 5 candidates × 1,500 steps: 300,000")
    assert "epochs × 8000 public images" in describe("decoder")["cost"]  # its training comes first
    assert "1.03 times" in describe("mid")["cost"]
    assert describe("folder")["cost"] == ""


def test_a_docstring_is_split_into_text_and_arguments():
    facts = describe("gmi")
    assert facts["kind"] == "attack"
    assert facts["file"] == "frostglass.attacks.model.gmi"
    assert "Paper: " in facts["text"]
    assert "Args:" not in facts["text"] + facts["arguments"]
    assert facts["arguments"].startswith("coupling: ")  # its own first, then those of its bases
    assert "\nloss: " in facts["arguments"]
    variants = [variant["name"] for variant in facts["variants"]]
    assert variants == [
        "published", "noise", "aimed", "straight", "margin", "poincare", "students",
        "erased", "subtract",
    ]  # fmt: skip
    steps = {"name": "steps", "type": "int", "default": 1500, "required": False}
    assert steps in facts["parameters"]
    private = {"name": "private", "type": "Path", "default": None, "required": True}
    assert private in describe("folder")["parameters"]


def test_what_the_data_decides_is_no_parameter_of_a_model():
    names = [parameter["name"] for parameter in describe("resnet")["parameters"]]
    assert names == ["width", "depth"]


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


def test_types_are_readable():
    assert catalogue._summary(Sample) == "Is it short?"
    assert [tuple(parameter.values()) for parameter in catalogue._parameters(Sample)] == [
        ("plain", "int", None, True),
        ("bounded", "float", 0.5, False),
        ("maybe", "int | none", None, False),
        ("choice", "'a' | 3", "a", False),
        ("several", "tuple[int, ...]", (1, 2), False),
        ("table", "dict[str, Any]", {}, False),
        ("place", "Path | none", None, False),
    ]


def test_unknown_names():
    hint = r"did you mean 'calor'\? known: accuracy, .*adv_learn, .*bido, .*brepmi, calor, "
    with pytest.raises(ConfigError, match=rf"nothing is named 'calorr': {hint}"):
        describe("calorr")
    hint = r"did you mean 'attacks'\? known: analyses, attacks, datasets, defenses"
    with pytest.raises(ConfigError, match=rf"no kind named 'attack': {hint}"):
        entries("attack")


def test_a_class_given_by_its_path_is_described_like_a_registered_one():
    by_path, by_name = describe("frostglass.attacks.model.gmi:Gmi"), describe("gmi")
    assert by_path == by_name | {"name": "frostglass.attacks.model.gmi:Gmi"}


def test_a_section_of_a_config_has_a_page():
    facts = describe("target")
    assert facts["kind"] == "config section"
    named = {parameter["name"] for parameter in facts["parameters"]}
    assert {"start", "start_parts", "milestones", "jitter", "keep"} <= named
    assert all(name in facts["arguments"] for name in named)
