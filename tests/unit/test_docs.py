"""The docs are true as far as a test can tell: links, anchors, lengths and languages of blocks.

`test_docs_code.py` runs their code, `test_website.py` builds the site.
"""

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
from website.text import slug

from docs_pages import PAGES, ROOT, pages, split

COLUMNS = 100
LANGUAGES = {"python", "toml", "sh", "text"}
ADDRESS = re.compile(r"(?<=\]\()[^)\s]+|https?://\S+")  # may exceed the line's length
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    names = set()
    for _, line in split(page)[0]:
        if heading := re.match(r"#{1,6} +(.*)", line):
            name = slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]))
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
def test_every_block_says_its_language(page):
    """Blocks of code are run or parsed by their language; output and pseudo-code are text."""
    for block in split(page)[1]:
        assert block.language in LANGUAGES, f"{page.name}, line {block.line}: {block.language!r}"


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
