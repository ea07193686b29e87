"""The elements a page consists of; `page.html` has a macro for each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

MAX_COLUMNS = 10  # beside the first, that fit a page
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
    """A table that can be sorted; the first cell of each row is its header.

    One that is `long` scrolls on a screen. Too many columns are shown as several tables.
    """

    label: str
    head: Sequence[Cell | str]
    rows: Sequence[Sequence[Cell | str]]
    css: str = ""
    long: bool = False

    @property
    def slices(self) -> list[list[int]]:
        """The columns of each table that is drawn; all begin with the first one."""
        others = list(range(1, len(self.head)))
        starts = range(0, max(1, len(others)), MAX_COLUMNS)
        return [[0, *others[start : start + MAX_COLUMNS]] for start in starts]

    @property
    def titles(self) -> list[str]:
        """The heads as plain text, which a phone shows beside each cell."""
        return [plain_text(cell) for cell in self.head]


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
class Reach:
    """The ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """The answer for one subject: "PASS", "FAIL" or "INCONCLUSIVE", and why if it is open."""

    subject: str
    outcome: str
    status: Status
    text: str


@dataclass(frozen=True)
class Summary:
    """Page one: facts by name, answers, limits, what to do next, and the words used."""

    facts: Sequence[tuple[str, str]]
    verdicts: Sequence[Verdict]
    unfixed: str
    limits: Sequence[Table]
    steps: Sequence[str]
    glossary: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    unit: str
    small: str


@dataclass(frozen=True)
class Panel:
    """One study on the page: its summary, sections with notes, and an appendix."""

    name: str
    summary: Summary
    vacuous: Sequence[str]
    reasons: Sequence[tuple[str, str]]
    sentences: Sequence[str]
    tiles: Sequence[Tile]
    notes: Sequence[str]
    sections: Sequence[Section]
    appendix: Sequence[Section]


def plain_text(cell: Cell | str) -> str:
    """Return a cell as text: its small lines and its tag after it."""
    if isinstance(cell, str):
        return Markup(cell).striptags() if isinstance(cell, Markup) else " ".join(cell.split())
    return "; ".join(filter(None, map(plain_text, (cell.text, *cell.small, cell.tag))))


def folded_if(many: bool, summary: str, table: Table) -> Part:
    """Fold a table that is too long for a page in print."""
    return Details(summary, [table]) if many else table


def tables_in(content: Sequence[Part]) -> Iterator[Table]:
    """Yield all tables, folded ones too."""
    for part in content:
        if isinstance(part, Table):
            yield part
        elif isinstance(part, Details):
            yield from tables_in(part.parts)


def named_cell(label: str, *small: str, css: str = "") -> Cell:
    """Return the cell of a label "name · detail · detail"."""
    name, *details = label.split(" · ")
    return Cell(name, (*details, *small), css=css)


def verdict(text: str, status: Status, *small: str) -> Cell:
    return Cell(text, small, status, TAGS[status])
