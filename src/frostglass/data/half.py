"""Half of the private people of another dataset."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data.base import Crop, Dataset, datasets

FEWEST = 4  # private people: a model of each half needs two


@datasets.register
@parameters
class Half(Dataset):
    """Half of the private people of another dataset, with all its public and secret images.

    What is chosen on models of one half can be measured on models of the other, whose people had no
    part in the choice. People are divided in the order of the dataset; of an odd number the second
    half has one more.

    Args:
        of: the dataset, a table with its `name` and parameters.
        which: the "first" or the "second" half of its private people.
    """

    title: ClassVar[str] = "Half of the people"

    of: dict[str, Any] = Field(default_factory=lambda: {"name": "faces"})
    which: Literal["first", "second"] = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.of.get("name"), str) or self.of["name"] == self.name:
            known = ", ".join(name for name in datasets.names() if name != self.name)
            raise ValueError(f"of: expected a table with a name, one of {known}; got {self.of!r}")
        try:
            self.whole  # noqa: B018
        except ValueError as error:
            raise ValueError(f"of: {error}") from error

    @property
    def whole(self) -> Dataset:
        """The dataset of all people."""
        return datasets.build(self.of)

    def _chosen(self, people: int) -> range:
        """Return the places of this half's people among so many."""
        middle = people // 2
        return range(middle) if self.which == "first" else range(middle, people)

    @property
    def in_memory(self) -> bool:
        return self.whole.in_memory

    @property
    def image_shape(self) -> Shape:
        return self.whole.image_shape

    def tables(self) -> tuple[Images, Images]:
        private, public = self.whole.tables()
        people = len(private.names)
        if people < FEWEST:
            raise DataError(
                f"half of {people} private people cannot be told apart: add people, at least "
                f"{FEWEST}, or use the whole dataset"
            )
        return private.of_people(torch.tensor(self._chosen(people))), public

    def secret_table(self) -> Images | None:
        return self.whole.secret_table()

    def secret_people(self) -> list[int]:
        return self.whole.secret_people()

    def counts(self) -> tuple[int, int, int]:
        people, images, public = self.whole.counts()
        chosen = self._chosen(people)
        private, _ = self.people()
        return len(chosen), sum(private.values()) or images * len(chosen) // people, public

    def people(self) -> tuple[dict[str, int], dict[str, int]]:
        private, public = self.whole.people()
        names = list(private)
        return {names[place]: private[names[place]] for place in self._chosen(len(names))}, public

    def public_people(self) -> list[int]:
        return self.whole.public_people()

    def most_of_one(self) -> int:
        return self.whole.most_of_one()

    def crop_mode(self) -> Crop:
        return self.whole.crop_mode()

    def published_test(self) -> Tensor | None:
        test = self.whole.published_test()
        if test is None:
            return None
        private, _ = self.whole.tables()
        chosen = self._chosen(len(private.names))
        return test[(private.labels >= chosen.start) & (private.labels < chosen.stop)]

    def embedder(self) -> str:
        return self.whole.embedder()

    def attribute_names(self) -> tuple[str, ...]:
        return self.whole.attribute_names()

    def constant_attributes(self) -> tuple[str, ...]:
        return self.whole.constant_attributes()

    def describes_public(self) -> bool:
        return self.whole.describes_public()

    def files(self) -> list[Path]:
        return self.whole.files()
