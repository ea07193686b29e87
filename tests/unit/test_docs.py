"""The docs are true as far as a test can tell: links, lengths, commands, code and its imports."""

import ast
import importlib
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from frostglass.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
COLUMNS = 100
FENCE = re.compile(r"^ *```(\w*)$")
ADDRESS = re.compile(r"(?<=\]\()[^)\s]+|https?://\S+")  # may exceed the line's length
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# A command is named at the start of a code span or of a line in a code block.
SPAN = re.compile(r"`(?:python -m )?frostglass ([^`\s]+)[^`]*`")
LINE = re.compile(r"^(?:\$ )?(?:python -m )?frostglass (\S+)", re.MULTILINE)


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


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    names = set()
    for _, line in split(page)[0]:
        if heading := re.match(r"#{1,6} +(.*)", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            names.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return names


@pages()
def test_every_link_leads_to_a_file_and_an_anchor(page):
    text = "\n".join(line for _, line in split(page)[0])
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{link}: no such file"
        assert file.is_relative_to(ROOT), f"{link}: leads out of the repository"
        if anchor:
            assert anchor in anchors(file), f"{link}: {file.name} has {sorted(anchors(file))}"


@pages()
def test_no_line_is_too_long(page):
    prose, blocks = split(page)
    code = [
        (block.line + offset, line)
        for block in blocks
        for offset, line in enumerate(block.text.splitlines())
    ]
    plain = [(number, ADDRESS.sub("", line)) for number, line in prose if line[:1] != "|"]
    long = [number for number, line in [*plain, *code] if len(line) > COLUMNS]
    assert not long, f"lines of more than {COLUMNS} columns: {sorted(long)}"


@pages()
def test_every_command_exists(page):
    commands = set(typer.main.get_command(app).commands)
    prose, blocks = split(page)
    named = SPAN.findall("\n".join(line for _, line in prose))
    named += [name for block in blocks for name in LINE.findall(block.text)]
    unknown = {name for name in named if not name.startswith("-")} - commands
    assert not unknown, f"no such command: {sorted(unknown)}; known: {sorted(commands)}"


@pages()
def test_python_blocks_parse_and_import_what_exists(page):
    for block in (block for block in split(page)[1] if block.language == "python"):
        where = f"{page.name}, line {block.line}"
        tree = ast.parse(block.text, filename=where)
        aliases = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
                    if alias.name == "frostglass":
                        aliases.add(alias.asname or alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                missing = [each.name for each in node.names if not hasattr(module, each.name)]
                assert not missing, f"{where}: {node.module} has no {', '.join(missing)}"
        package = importlib.import_module("frostglass")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                known = node.value.id not in aliases or hasattr(package, node.attr)
                assert known, f"{where}: frostglass has no {node.attr}"


@pages()
def test_toml_blocks_parse(page):
    for block in (block for block in split(page)[1] if block.language == "toml"):
        tomllib.loads(block.text)


def test_public_names_in_prose_exist():
    package = importlib.import_module("frostglass")
    for page in PAGES:
        for name in re.findall(r"`fg\.(\w+)", page.read_text(encoding="utf-8")):
            assert hasattr(package, name), f"{page.name}: frostglass has no {name}"


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## Speed: `make bench`", "speed-make-bench"),
        ("## 1. Where to cut", "1-where-to-cut"),
        ("# Is it? `a b/c.toml`", "is-it-a-bctoml"),
    ],
)
def test_anchors_are_those_of_github(tmp_path, heading, anchor):
    page = tmp_path / "page.md"
    page.write_text(f"{heading}\n\n```sh\n# no heading\n```\n\n{heading}\n", encoding="utf-8")
    assert anchors(page) == {anchor, f"{anchor}-1"}
