"""Markdown from plain text: docstrings are written for a terminal."""

import re
from collections.abc import Iterable, Sequence

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`[^`]+`)")
SPECIAL = re.compile(r"([\\*_<>\[\]#|~^])")


def slug(text: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading, so that links work in both places."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def prose(text: str) -> str:
    """Escape a paragraph of plain text; spans in backticks are code already."""
    parts = CODE.split(text)
    return "".join(
        part if number % 2 else SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts)
    )


def cell(text: object) -> str:
    """Escape a value for one cell of a table."""
    return prose(str(text)).replace("\n", " ")


def code(value: object) -> str:
    """Return a value as a code span that a table can hold."""
    text = str(value).replace("|", "&#124;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<code>{text}</code>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fenced(language: str, text: str) -> str:
    """Return a block of code, with a fence longer than any inside."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
