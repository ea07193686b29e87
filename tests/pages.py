"""A report as tests read it."""

import base64
import hashlib
import io
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def plain(text: str) -> str:
    """Text without the characters that only steer line breaks."""
    return text.replace("\u202f", " ").replace("\u00a0", " ").replace("\u2060", "")


class Page(HTMLParser):
    """The parts of a page that tests look at: text, sentences, tables by name, and tags.

    `images` are those in tables, `large` those that stand beside each other in figures.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self.sentences: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._sources: dict[str, list[str]] = {"td": [], "figure": []}
        self._stack: list[tuple[str, dict[str, Any]]] = []
        self._region = ""
        self.raw = path.read_text(encoding="utf-8")
        self.feed(self.raw)
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        if values.get("role") == "region":
            self._region = values["aria-label"]
            self.tables.setdefault(self._region, [])
        if tag == "tr":
            self.tables[self._region].append([])
        if tag in ("td", "th"):
            self.tables[self._region][-1].append("")
        if tag == "p" and values.get("class") == "said":
            self.sentences.append("")
        if tag == "img":
            open_tags = [each for each, _ in self._stack]
            self._sources["figure" if "figure" in open_tags else "td"].append(values["src"])
        if tag not in ("img", "meta", "br"):
            self._stack.append((tag, values))

    def handle_endtag(self, tag):
        assert self._stack.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        open_tags = [tag for tag, _ in self._stack]
        data = plain(data)
        if not {"style", "script"} & set(open_tags):
            self.texts.append(data + " ")
        if any(values.get("class") == "said" for _, values in self._stack):
            self.sentences[-1] += data
        if "td" in open_tags or "th" in open_tags:
            row = self.tables[self._region][-1]
            row[-1] = " ".join(f"{row[-1]} {data}".split())

    @property
    def images(self) -> list[np.ndarray]:
        return _decoded(self._sources["td"])

    @property
    def large(self) -> list[np.ndarray]:
        return _decoded(self._sources["figure"])


def _decoded(sources: list[str]) -> list[np.ndarray]:
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",", 1)[1]))))
        for source in sources
    ]


ACTIVE_TAGS = {"link", "iframe", "object", "embed", "a", "base", "form"}
ACTIVE_ATTRIBUTES = ("href", "srcset", "action")


def assert_own_script(page: Page) -> None:
    """Assert that the only script is the package's, and that the page's policy names its hash."""
    assert [values for tag, values in page.tags if tag == "script"] == [{}]
    script = page.raw.split("<script>")[1].split("</script>")[0]
    own = resources.files("frostglass.report").joinpath("page.js").read_text(encoding="utf-8")
    assert script == f"\n{own}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.raw


def assert_self_contained(path: Path, folder: Path) -> None:
    """Assert that a report loads nothing, runs its own script alone, and names no folder."""
    page = Page(path)
    assert_own_script(page)
    assert not {tag for tag, _ in page.tags} & ACTIVE_TAGS
    names = {name for _, values in page.tags for name in values}
    assert not [name for name in names if name.startswith("on") or name in ACTIVE_ATTRIBUTES]
    assert all(values["src"].startswith("data:") for _, values in page.tags if "src" in values)
    assert "url(" not in page.raw
    assert "@import" not in page.raw
    assert "default-src 'none'" in page.raw
    assert str(folder) not in page.raw + path.with_suffix(".json").read_text()
