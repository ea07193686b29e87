"""The page in headless Chromium: no errors, no network, everything fits, and it prints."""

import json

import pytest

from browser import Tab, browser, needs_chromium, pages_of
from feature_folders import CRAFTED, LATENT, OPEN, make_feature_run
from frostglass.report.build import build_report
from pages import plain
from run_folders import BROKEN, DEFENDED, TRANSFER, make_run, many_models

pytestmark = needs_chromium
MAX_PAGES = 6  # in print, without the appendix, which is folded
LIMITS = {"max_first": 0.1, "max_any": 0.5, "min_accuracy": 0.95}
UNFOLD = 'document.querySelectorAll("details").forEach((part) => { part.open = true; })'
# Elements whose content is wider than they are, or that reach beyond the page.
WIDE = """[...document.querySelectorAll("main *")].filter((each) => {
  if (each.closest("svg, pre") || getComputedStyle(each).display === "inline") return false;
  const right = each.getBoundingClientRect().right;
  return each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0
    || right > document.documentElement.clientWidth + 1;
}).map((each) => `${each.tagName} ${each.textContent.trim().slice(0, 40)}`)"""
TABLES = """Object.fromEntries([...document.querySelectorAll(".box:has(.figures)")].map((box) =>
  [box.getAttribute("aria-label"), [...box.querySelectorAll("tbody tr")].map((row) =>
    [...row.cells].map((cell) => cell.textContent))]))"""
COLOURS = """(() => { const image = document.querySelector(".faces img");
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
  const drawing = canvas.getContext("2d"); drawing.drawImage(image, 0, 0);
  const data = drawing.getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let place = 0; place < data.length; place += 4)
    colours.add(data.slice(place, place + 3).join());
  return colours.size; })()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A run of three models whose people have long names, with three guesses each."""
    folder = tmp_path_factory.mktemp("models")
    names = [f"Maximiliana_Featherstonehaugh-Wolfeschlegelsteinhausen_{n}" for n in range(20)]
    marks = {"glasses": [place % 2 == 0 for place in range(20)]}
    more = {"thresholds": LIMITS, "attributes": marks, "candidates": 3, "size": 32}
    return make_run(folder / "run", [BROKEN, DEFENDED, TRANSFER], names=names, **more)


def quiet(tab: Tab, page) -> bool:
    """Whether a page had no errors and asked for nothing but itself and its own images."""
    others = [url for url in tab.requests if not url.startswith("data:")]
    return tab.errors == [] and others == [page.resolve().as_uri()]


def _letters(cell: str) -> str:
    """A cell without spaces, and without what separates its lines in a plain table."""
    return "".join(plain(cell).replace(";", "").split())


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_is_clipped_and_nothing_is_loaded(tab, models, tmp_path, width):
    page = build_report([models], tmp_path / "report.html")
    tab.open(page, width)
    assert tab.ask(WIDE) == []
    tab.ask(UNFOLD)
    assert tab.ask(WIDE) == []
    assert quiet(tab, page)


def test_the_numbers_are_those_of_the_json(tab, models, tmp_path):
    page = build_report([models], tmp_path / "report.html", images=False)
    tab.open(page)
    shown = tab.ask(TABLES)
    tables = json.loads(page.with_suffix(".json").read_text())["tables"]
    assert len(tables) > 10
    for table in tables:
        rows = [["".join(cell.replace(";", "").split()) for cell in row] for row in table["rows"]]
        found = [
            ["".join(plain(c).replace(";", "").split()) for c in r] for r in shown[table["name"]]
        ]
        assert found == rows, table["name"]


def test_tables_sort_and_images_grow(tab, models, tmp_path):
    tab.open(build_report([models], tmp_path / "report.html"))
    box = 'document.querySelector(".box[aria-label=\\"Utility and leak\\"]")'
    column = (
        f"[...{box}.querySelectorAll('tbody tr')].map((row) => row.cells[1].textContent.trim())"
    )
    before = tab.ask(column)
    assert plain(before[0]).startswith("98.2 %")
    tab.ask(f"{box}.querySelectorAll('thead th')[1].click()")
    assert plain(tab.ask(column)[0]).startswith("96.7 %")
    tab.ask(f"{box}.querySelectorAll('thead th')[1].click()")
    assert tab.ask(column)[0] == before[0]
    tab.ask('document.querySelector(".closest img").click()')
    assert tab.ask('document.querySelector("dialog").open') is True
    assert tab.ask('document.querySelector("dialog img").getBoundingClientRect().width') > 400
    assert tab.ask(WIDE) == []
    tab.ask('document.querySelector("dialog").click()')
    assert tab.ask('document.querySelector("dialog").open') is False
    assert tab.errors == []


def test_it_prints_on_six_pages(tab, models, tmp_path):
    tab.open(build_report([models], tmp_path / "report.html"))
    folded = pages_of(tab.print())
    assert 3 <= folded <= MAX_PAGES
    tab.ask('document.getElementById("unfold").click()')
    assert pages_of(tab.print()) > folded, "the appendix is printed where it is unfolded"


def test_redaction_removes_pixels(tab, models, tmp_path):
    tab.open(build_report([models], tmp_path / "whole.html"))
    tab.ask(UNFOLD)
    assert tab.ask(COLOURS) > 500
    page = build_report([models], tmp_path / "redacted.html", redact=True)
    tab.open(page)
    tab.ask(UNFOLD)
    assert tab.ask(COLOURS) <= 9
    assert "Featherstonehaugh" not in tab.ask("document.documentElement.outerHTML")
    assert quiet(tab, page)


def test_a_page_of_features_fits_too(tab, tmp_path):
    audits = [OPEN, CRAFTED, {**CRAFTED, "attack": LATENT, "case": "latent"}]
    run = make_feature_run(tmp_path / "run", audits, thresholds={"max_similarity": 0.4})
    page = build_report([run], tmp_path / "report.html")
    for width in (390, 1200):
        tab.open(page, width)
        tab.ask(UNFOLD)
        assert tab.ask(WIDE) == []
    assert quiet(tab, page)


@pytest.mark.slow
def test_many_models_fit_and_print(tab, tmp_path):
    models = [{**spec, "case": case} for spec in many_models() for case in ("one", "two")]
    runs = [
        make_run(tmp_path / "many", many_models(), thresholds={"max_first": 0.3}),
        make_run(tmp_path / "crossed", models),
    ]
    for place, run in enumerate(runs):
        page = build_report([run], tmp_path / f"{place}.html")
        for width in (390, 1200):
            tab.open(page, width)
            tab.ask(UNFOLD)
            assert tab.ask(WIDE) == []
        tab.open(page)
        assert pages_of(tab.print()) <= MAX_PAGES
        assert quiet(tab, page)


@pytest.mark.slow
def test_an_unfinished_run_is_marked_on_every_printed_page(tab, tmp_path):
    run = make_run(tmp_path / "run", [DEFENDED], not_run=["bido: time budget of 1 h reached"])
    tab.open(build_report([run], tmp_path / "report.html"))
    marked, pages = tab.print(), None
    tab.ask('document.querySelector(".watermark").remove()')
    pages = tab.print()
    assert pages_of(marked) == pages_of(pages) >= 3
    assert len(marked) > len(pages)
