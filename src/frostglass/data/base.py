"""What a dataset is: plain parameters and one method that returns a private and a public table of pictures."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Shape

datasets = Registry("dataset", "frostglass.data")


class Dataset(Protocol):
    """The contract of a registered dataset; a class made with `checks.parameters` that has these fits, and need not inherit.

    `tables` returns (private, public), both of `image_shape` pictures, in the same order at every call. Labels are numbered from 0
    in each table and `names` are the identities'; a public table without identities has no names and every label -1. Both tables hold
    all their pictures: `splits.make_split` divides the private one and checks that the two share nobody and nothing.
    """

    @property
    def image_shape(self) -> Shape: ...

    def tables(self) -> tuple[Images, Images]: ...

    def counts(self) -> tuple[int, int, int]:
        """About how many private identities, private pictures and public pictures there are; found without reading a picture."""
        ...

    def public_people(self) -> list[int]:
        """About how many pictures there are of each public person who has a name; found without reading a picture."""
        ...

    def files(self) -> list[Path]:
        """The files the tables are read from; a result is made anew when one of them changes."""
        ...


Digit = Annotated[int, Field(ge=0, le=9)]
DigitClasses = Annotated[tuple[Digit, ...], Field(min_length=1)]


def check_digits(private: Sequence[int], public: Sequence[int]) -> None:
    """Refuse classes that are private and public, or that are given twice."""
    both = sorted(set(private) & set(public))
    if both:
        raise ConfigError(
            f"{listed(both)} in both private_classes and public_classes: an identity is either private or public"
        )
    for side, classes in (("private_classes", private), ("public_classes", public)):
        twice = sorted({digit for digit in classes if list(classes).count(digit) > 1})
        if twice:
            raise ConfigError(f"{listed(twice)} given twice in {side}: name each class once")


def digit_table(
    pixels: Tensor, labels: Tensor, digits: Sequence[int], source: str, most: int | None = None
) -> Images:
    """The pictures of some digits as a table with one identity a digit, in the order given; at most the first `most` of each."""
    index = [(labels == digit).nonzero().flatten()[:most] for digit in digits]
    rows = torch.cat(index)
    return Images(
        pixels=pixels[rows],
        labels=torch.arange(len(digits)).repeat_interleave(
            torch.tensor([len(one) for one in index])
        ),
        names=tuple(f"digit {digit}" for digit in digits),
        sources=tuple(f"{source} {row}" for row in rows.tolist()),
    )


def listed(items: Iterable[object], most: int = 5) -> str:
    """The first few items of a list that may be long, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
