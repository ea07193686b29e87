"""The Markdown pages of the repository, and their blocks of code, for tests of the docs."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "SECURITY.md",
            "configs/README.md",
            "examples/plugin/README.md",
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^ *```(\w*)$")


class Block(NamedTuple):
    """A fenced block of a page: its language, its first line's number, its text."""

    language: str
    line: int
    text: str


def pages():
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def split(page: Path) -> tuple[list[tuple[int, str]], list[Block]]:
    """Return a page's numbered lines outside of fenced blocks, and those blocks."""
    prose: list[tuple[int, str]] = []
    blocks: list[Block] = []
    block: list[str] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if block is not None and fence:
            blocks[-1] = blocks[-1]._replace(text="\n".join(block))
            block = None
        elif block is not None:
            block.append(line)
        elif fence:
            block = []
            blocks.append(Block(fence[1], number + 1, ""))
        else:
            prose.append((number, line))
    assert block is None, f"{page.name}: the block at line {blocks[-1].line} is never closed"
    return prose, blocks


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of a page in some languages."""
    return [block for block in split(page)[1] if block.language in languages]
