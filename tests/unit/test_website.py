"""The documentation site: its pages, their links and navigation, and that it needs no network."""

import posixpath
import re
import subprocess
import sys
from functools import cache

import pytest
from website.hooks import site_pages
from website.methods import ABOUT, method_page
from website.nav import SECTIONS, navigation
from website.sources import address, rewritten
from website.text import FENCED, LINK, prose, slug

import frostglass
from docs_pages import ROOT
from frostglass.cli.catalogue import KINDS, describe

# What a browser would fetch when a page is opened; links that are clicked are no matter.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//[^>]+>"""
    r"""|<link[^>]+rel=["']?(?:stylesheet|preconnect|preload)[^>]+href="https?://"""
)


@cache
def pages():
    return site_pages()


def listed(entry):
    """Yield every page of a navigation."""
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry:
        if not isinstance(entry, str):
            yield from listed(part)


def test_every_page_has_one_place_in_the_navigation():
    shown = list(listed(navigation(set(pages()))))
    assert len(shown) == len(set(shown))
    assert set(shown) == {page for page in pages() if not page.startswith("files/")}
    named = {page for section in SECTIONS.values() for page in section}
    assert named <= set(pages())


def test_every_link_of_the_site_leads_to_a_page():
    images = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/images/*")}
    for page, text in pages().items():
        for part in FENCED.split(text)[::2]:
            for _, link, _ in LINK.findall(part):
                path = link.partition("#")[0]
                if re.match(r"[a-z]+:", link) or not path:
                    continue
                found = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
                assert found in pages() or found in images, f"{page}: {link}"


@pytest.mark.parametrize("kind", ABOUT)
def test_every_method_has_a_page(kind):
    assert set(ABOUT) == set(KINDS)
    for name in KINDS[kind].names():
        page, facts = pages()[f"methods/{kind}/{name}.md"], describe(name)
        assert page.startswith("# ")
        assert all(f"| `{one['name']}` |" in page for one in facts["parameters"])
        headings = re.findall(r"^## (.+)", page, re.MULTILINE)
        assert ("When to use it" in headings) is bool(facts["use"])
        assert ("Attackers who know it" in headings) is (kind == "defenses")
        assert ("Paper" in headings) is bool(facts["paper"])
        assert ("Differences from the paper" in headings) is bool(facts["differs"])
        assert ("Variants" in headings) is bool(facts["variants"])


def test_a_method_page_escapes_what_markdown_would_read():
    assert prose("a_b * c < d, `x_y`") == r"a\_b \* c \< d, `x_y`"
    page = method_page("attacks", "gmi")
    assert r"v\_old" in page
    assert "| `loss` | <code>\"ce\"</code> | <code>'ce' &#124; 'logit'" in page


def test_the_reference_has_every_public_name():
    page = pages()["api.md"]
    for name in frostglass.__all__:
        assert page.count(f"\n### {name}\n") == 1, name
    assert "\n### check_attack\n" in page


def test_links_are_rewritten_for_the_site():
    text = "[a](docs/faq.md#x) ![b](docs/images/r.png) [c](configs/a.toml) [d](https://x.org)"
    moved, linked = rewritten(f"{text}\n\n```sh\n[e](docs/faq.md)\n```\n", "README.md")
    assert moved.splitlines()[0] == (
        "[a](faq.md#x) ![b](images/r.png) [c](files/configs/a.toml.md) [d](https://x.org)"
    )
    assert "[e](docs/faq.md)" in moved  # code stays as it is
    assert linked == {"docs/faq.md", "docs/images/r.png", "configs/a.toml"}
    assert rewritten("[r](../README.md) [s](#here)", "docs/faq.md")[0] == "[r](index.md) [s](#here)"
    assert rewritten("| `a [b\\|c]` |", "docs/faq.md")[0] == "| <code>a [b&#124;c]</code> |"
    assert address("notebooks/a.ipynb") == "notebooks/a.md"


def test_anchors_are_those_of_github():
    assert slug("Speed: `make bench`") == "speed-make-bench"


@pytest.mark.parametrize("name", [path.name for path in ROOT.glob("docs/images/*.svg")])
def test_a_figure_fetches_nothing(name):
    text = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    assert not re.search(r"(href|src|url\()\s*=?\s*[\"']?https?:", text)


def test_figures_of_threats_say_what_they_show_and_follow_the_scheme():
    figures = list(ROOT.glob("docs/images/threat-*.svg"))
    assert len(figures) == 6
    for figure in figures:
        text = figure.read_text(encoding="utf-8")
        assert "<title" in text
        assert "<desc" in text
        assert "prefers-color-scheme: dark" in text


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(tmp_path.rglob("*.html"))
    assert len(built) > len(pages())
    for page in built:
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
