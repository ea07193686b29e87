"""What facts.json of a client or server must say, and of which types."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frostglass.core.errors import CheckpointError
from frostglass.core.parameters import problems
from frostglass.data.base import Crop

Side = Annotated[int, Field(ge=1, le=4096)]
F = TypeVar("F", bound="Facts")


class Named(BaseModel):
    """A method: its name, and its parameters beside it."""

    model_config = ConfigDict(extra="allow")

    name: str


class ModelSettings(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str


class Recipe(BaseModel):
    """How a network is built; `training` are settings of `Training`."""

    model_config = ConfigDict(extra="allow")

    training: ModelSettings
    defenses: list[Named]
    seed: int
    classes: Annotated[int, Field(ge=1, le=10**7)]
    image_shape: list[Side] = Field(min_length=3, max_length=3)


class Facts(BaseModel):
    image_shape: list[Side] = Field(min_length=3, max_length=3)
    feature_shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    cut: str
    recipe: Recipe | None

    @property
    def plain_recipe(self) -> dict[str, Any] | None:
        return self.recipe.model_dump() if self.recipe else None


class ClientFacts(Facts):
    kind: Literal["client"]
    protection: Named | None
    crop: Crop = "centre"


class ServerFacts(Facts):
    kind: Literal["server"]
    classes: list[str] = Field(min_length=1)
    attributes: bool


def parse_facts(values: Any, kind: type[F], path: Path) -> F:
    """Check the content of a facts.json; refuse entries that are missing or of another type."""
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} was changed ({problems(error)[0][:160]}). Save it again."
        ) from None
