"""The embedded world of procedural faces: no download, no real person."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._looks import LOOKS
from frostglass.data._people import ATTRIBUTES, attributes, moods, traits
from frostglass.data._portrait import draw
from frostglass.data.base import Dataset, datasets

EMBEDDER_WORLD = 2**31 - 1  # the people that the shipped embedder was trained on
Style = Literal["same", "other"]
# Private people count from 0, public and secret ones from these numbers: they never overlap.
PUBLIC_START, SECRET_START = 1_000_000, 2_000_000


def photograph(
    world: int, identities: Tensor, photos: Tensor, size: int, style: Style = "same"
) -> tuple[Tensor, Tensor]:
    """Draw photos of people: pixels uint8 (N, 3, size, size) and attributes bool (N, 17)."""
    look = LOOKS[style]
    pixels, marks = [], []
    for who, shot in zip(identities.split(256), photos.split(256), strict=True):
        person, mood = traits(world, who, look), moods(world, who, shot, look)
        pixels.append(draw(person, mood, size).mul_(255).round_().to(torch.uint8))
        marks.append(attributes(person, mood))
    return torch.cat(pixels), torch.cat(marks)


@datasets.register
@parameters
class Faces(Dataset):
    """Procedural colour faces, with 17 binary attributes.

    An identity fixes skull, eyes, brows, nose, mouth, skin, hair and glasses. A photo varies pose,
    expression, light, clothes and background. The same parameters give the same images on every
    machine.

    Args:
        size: pixels a side, 16 to 128.
        identities: private people.
        images: photos of each private person.
        first_identity: number of the first private person; another value gives other people.
        public_identities: public people, never the same as private ones.
        public_images: photos of each public person.
        public_style: "same" draws public people as private ones; "other" draws another population
            with another camera (hair, shapes, light, rooms), so that whatever learns from public
            images (prior, embedder, first stage of training) learns from another distribution.
        secret_identities: people whom only the model's owner has, for the defense `decoys`; neither
            private nor public.
        secret_images: photos of each of them.
        world: seed of the whole world.
    """

    title: ClassVar[str] = "Procedural faces"

    size: Annotated[int, Field(ge=16, le=128)] = 32
    identities: Annotated[int, Field(ge=2, le=PUBLIC_START)] = 40
    images: Annotated[int, Field(ge=3, le=10_000)] = 60
    first_identity: Annotated[int, Field(ge=0, lt=PUBLIC_START)] = 0
    public_identities: Annotated[int, Field(ge=2, le=PUBLIC_START)] = 4000
    public_images: Annotated[int, Field(ge=1, le=10_000)] = 2
    public_style: Style = "same"
    secret_identities: Annotated[int, Field(ge=0, le=PUBLIC_START)] = 0
    secret_images: Annotated[int, Field(ge=1, le=10_000)] = 14
    world: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @property
    def image_shape(self) -> Shape:
        return (3, self.size, self.size)

    def counts(self) -> tuple[int, int, int]:
        public = self.public_identities * self.public_images
        return self.identities, self.identities * self.images, public

    def public_people(self) -> list[int]:
        return [self.public_images] * self.public_identities

    def secret_people(self) -> list[int]:
        return [self.secret_images] * self.secret_identities

    def secret_table(self) -> Images | None:
        if not self.secret_identities:
            return None
        return self._table(SECRET_START, self.secret_identities, self.secret_images, "same")

    def embedder(self) -> str:
        """Return the shipped one, which needs 32 pixels and was trained on a world of its own."""
        return "faces32" if self.size >= 32 and self.world != EMBEDDER_WORLD else "public"

    def attribute_names(self) -> tuple[str, ...]:
        return ATTRIBUTES

    def tables(self) -> tuple[Images, Images]:
        private = self._table(self.first_identity, self.identities, self.images, "same")
        people = PUBLIC_START, self.public_identities, self.public_images
        return private, self._table(*people, self.public_style)

    def _table(self, first: int, identities: int, images: int, style: Style) -> Images:
        labels = torch.arange(identities).repeat_interleave(images)
        photos = torch.arange(images).repeat(identities)
        pixels, marks = photograph(self.world, labels + first, photos, self.size, style)
        place = f"faces:{self.world}" + ("" if style == "same" else f":{style}")
        numbers = zip((labels + first).tolist(), photos.tolist(), strict=True)
        return Images(
            pixels=pixels,
            labels=labels,
            names=tuple(f"person {number}" for number in range(first, first + identities)),
            sources=tuple(f"{place}/{who}/{shot}" for who, shot in numbers),
            attributes=marks,
            attribute_names=ATTRIBUTES,
        )
