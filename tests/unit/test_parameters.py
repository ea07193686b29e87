"""Validated parameters: every problem at once, in plain words."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters, problems


@parameters
class Oven:
    place: Path
    heat: Annotated[int, Field(ge=50, le=250)] = 180
    least: int = 100

    def __post_init__(self):
        if self.least > self.heat:
            raise ConfigError(f"least {self.least} is above heat {self.heat}: swap them")


def test_values_are_kept_shown_and_frozen():
    oven = Oven(place="kitchen")
    assert repr(oven) == f"Oven(place={Path('kitchen')!r}, heat=180, least=100)"
    assert oven == Oven(place="kitchen", heat=180)
    assert replace(oven, heat=200).heat == 200
    with pytest.raises(FrozenInstanceError):
        oven.heat = 200


def test_all_problems_are_reported_in_one_line():
    with pytest.raises(ConfigError) as caught:
        Oven(heat=300, least="warm")
    assert len(caught.value.problems) == 3
    message = str(caught.value)
    assert "\n" not in message
    assert "Oven: place: required, and not given" in message
    assert "Oven: heat: expected at most 250, got 300; the default is 180" in message
    assert "Oven: least: expected a valid integer" in message
    assert "got 'warm'" in message


def test_ranges_are_described_in_plain_words():
    @parameters
    class Kiln:
        low: Annotated[float, Field(gt=0)] = 1.0
        high: Annotated[float, Field(lt=9)]
        kind: Literal["gas", "wood"] = "gas"

    with pytest.raises(ConfigError) as caught:
        Kiln(low=0, high=10, kind="coal")
    assert caught.value.problems == (
        "Kiln: low: expected more than 0, got 0; the default is 1.0",
        "Kiln: high: expected less than 9, got 10",
        "Kiln: kind: expected 'gas' or 'wood', got 'coal'; the default is 'gas'",
    )


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(
        ConfigError,
        match=r"Oven: heet: no such parameter; did you mean 'heat'\? known: heat, least, place",
    ):
        Oven(place="kitchen", heet=200)


def test_conditions_over_several_values():
    with pytest.raises(ConfigError, match=r"^Oven: least 190 is above heat 180: swap them$"):
        Oven(place="kitchen", least=190)
    with pytest.raises(ConfigError, match="least 100 is above heat 60"):
        replace(Oven(place="kitchen"), heat=60)


def test_positional_values_are_refused():
    with pytest.raises(ConfigError, match="positional"):
        Oven("kitchen")


def test_problems_inside_a_model_join_those_of_the_model():
    class House(BaseModel):
        oven: Oven
        rooms: int

    with pytest.raises(ValidationError) as caught:
        House(oven={"place": "kitchen", "heat": 10}, rooms="many")
    oven, rooms = problems(caught.value)
    assert oven == "oven.heat: expected at least 50, got 10"
    assert rooms.startswith("rooms: expected a valid integer")
    with pytest.raises(ValidationError) as caught:
        House(oven={"place": "kitchen", "least": 190}, rooms=3)
    assert problems(caught.value) == ["oven: least 190 is above heat 180: swap them"]
    assert House(oven={"place": "kitchen"}, rooms=3).oven == Oven(place="kitchen")
