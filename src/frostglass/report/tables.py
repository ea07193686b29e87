"""Tables as CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from frostglass.core.errors import ConfigError
from frostglass.report import parts
from frostglass.report.text import JOINER, NARROW, slug
from frostglass.store.files import write_bytes

SPACES = str.maketrans({NARROW: " ", "\u00a0": " ", JOINER: None})
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        **{char: f"\\{char}" for char in "&%$#_{}"},
        "−": "$-$", "–": "--", "≥": r"$\ge$", "×": r"$\times$", "★": r"$\star$",
        "Δ": r"$\Delta$", "α": r"$\alpha$", "β": r"$\beta$", "λ": r"$\lambda$",
        "✓": r"$\checkmark$", "✕": r"$\times$", "●": r"$\bullet$", "○": r"$\circ$",
        "◆": r"$\diamond$", "◇": r"$\diamond$", "▲": r"$\triangle$", "△": r"$\triangle$",
        "■": r"$\square$", "□": r"$\square$",
    }
)  # fmt: skip


@dataclass(frozen=True)
class PlainTable:
    """A table of texts; `caption` stands below it."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def plain_table(table: parts.Table) -> PlainTable:
    """Return a table of a page without its markup."""
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    return PlainTable(table.label, [_plain(cell) for cell in table.head], rows)


def _plain(cell: parts.Cell | str) -> str:
    return parts.plain_text(cell).translate(SPACES)


def as_markdown(table: PlainTable) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    text = [
        "| " + " | ".join(_one_line(c).replace("|", "\\|") for c in row) + " |" for row in lines
    ]
    return "\n".join([*text, *(["", table.caption] if table.caption else []), ""])


def as_csv(table: PlainTable) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([table.head, *table.rows])
    return text.getvalue()


def as_latex(table: PlainTable) -> str:
    """Return a tabular; its signs need amssymb, its lines booktabs."""
    body = [" & ".join(_one_line(c).translate(LATEX) for c in r) + r" \\" for r in table.rows]
    head = " & ".join(_one_line(cell).translate(LATEX) for cell in table.head) + r" \\"
    caption = [f"% {_one_line(table.caption)}"] if table.caption else []
    lines = [
        f"% {_one_line(table.name)}; needs the packages booktabs and amssymb",
        f"\\begin{{tabular}}{{{'l' * len(table.head)}}}",
        *(r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"),
        *caption,
    ]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


FORMATS: dict[str, tuple[str, Callable[[PlainTable], str]]] = {
    "markdown": ("md", as_markdown),
    "csv": ("csv", as_csv),
    "latex": ("tex", as_latex),
}


def formatted(table: PlainTable, form: str) -> str:
    """Return a table in a format; refuse one that is not known."""
    if form not in FORMATS:
        raise ConfigError(f"table: expected markdown, csv or latex, got {form!r}")
    return FORMATS[form][1](table)


def write_tables(tables: Iterable[PlainTable], folder: Path) -> list[Path]:
    """Write each table in every format; equal names are numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: dict[str, int] = {}
    written = []
    for table in tables:
        name = slug(table.name).lower()
        seen[name] = seen.get(name, 0) + 1
        stem = name if seen[name] == 1 else f"{name}-{seen[name]}"
        for suffix, write in FORMATS.values():
            path = folder / f"{stem}.{suffix}"
            write_bytes(path, write(table).encode())
            written.append(path)
    return written
