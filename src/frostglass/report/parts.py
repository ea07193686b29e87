"""The elements a page consists of; `page.html` has a macro for each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

Status = Literal["ok", "look", "fail", "void"]
TAGS: dict[Status, str] = {
    "ok": "✓ pass",
    "look": "! attention",
    "fail": "✕ vacuous",
    "void": "void",
}


class Part:
    """Base of all elements; each is rendered by the macro of the same name."""

    @property
    def macro(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Note(Part):
    text: str
    css: str = "note"


@dataclass(frozen=True)
class Heading(Part):
    text: str


@dataclass(frozen=True)
class Code(Part):
    text: str


@dataclass(frozen=True)
class Items(Part):
    """A list; `css` is "legend", "plain", "plain note" or "plain warnings"."""

    items: Sequence[str]
    css: str = "plain"


@dataclass(frozen=True)
class Cell:
    """A table cell: text, small lines below it, and a tag with a status."""

    text: str = ""
    small: Sequence[str] = ()
    status: Status | None = None
    tag: str = ""
    css: str = ""


@dataclass(frozen=True)
class Table(Part):
    """A table in a box that scrolls; the first cell of each row is its header."""

    label: str
    head: Sequence[Cell | str]
    rows: Sequence[Sequence[Cell | str]]
    css: str = ""
    long: bool = False


@dataclass(frozen=True)
class Thumbnail:
    """An image of a reconstruction with the verdicts on it; `marks` are symbols."""

    source: str
    alt: str
    marks: Markup | None = None
    verdicts: str = ""
    similarity: str = ""
    partial: bool = False


@dataclass(frozen=True)
class Gallery(Part):
    """A table of images: a column for each person, `rows` of a header and images or gaps."""

    people: Sequence[str]
    rows: Sequence[tuple[Cell, Sequence[Thumbnail | None]]]


@dataclass(frozen=True)
class Pair:
    """A real image of a person beside a reconstruction, both large."""

    name: str
    real: str
    reconstruction: str
    text: str


@dataclass(frozen=True)
class Pairs(Part):
    """Large pairs of images of one audit."""

    label: str
    pairs: Sequence[Pair]


@dataclass(frozen=True)
class Figure(Part):
    """A drawing in a box."""

    label: str
    drawing: Markup


@dataclass(frozen=True)
class Tracks(Part):
    """Scores on a common scale: (name, note, drawing) for each audit."""

    lines: Sequence[tuple[str, str, Markup]]
    scale: Markup


@dataclass(frozen=True)
class Details(Part):
    """Parts that are folded away."""

    summary: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Section:
    label: str
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    unit: str
    small: str


@dataclass(frozen=True)
class Panel:
    """One study on the page: its answer, notes below it, and sections."""

    name: str
    vacuous: Sequence[str]
    reasons: Sequence[tuple[str, str]]
    sentences: Sequence[str]
    tiles: Sequence[Tile]
    notes: Sequence[str]
    sections: Sequence[Section]


def named_cell(label: str, *small: str, css: str = "") -> Cell:
    """Return the cell of a label "name · detail · detail"."""
    name, *details = label.split(" · ")
    return Cell(name, (*details, *small), css=css)


def verdict(text: str, status: Status, *small: str) -> Cell:
    return Cell(text, small, status, TAGS[status])
