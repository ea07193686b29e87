"""A study in headless Chromium: from consent to thanks, at the sizes of a desktop and a phone."""

import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from frostglass.study.answers import Answers
from study_visits import of_protocol, served, study_of_run, tokens
from webdriver import ENTER, browser

pytestmark = pytest.mark.slow

SIZES = [(1200, 900, False), (390, 844, True)]
KEYS = {"pairwise": ["1", "2", "ArrowLeft"], "identification": ["1", "d", "0", "n"]}
ARROWS = {"ArrowLeft": "\ue012", "ArrowRight": "\ue014"}
PLACE = "document.querySelector('#trial')?.dataset.place"
WIDE = "document.documentElement.scrollWidth <= innerWidth"
SMALL = """[...document.querySelectorAll('button:not([hidden]), a, label')].filter(
    each => each.getBoundingClientRect().height < 24).length"""
LOADED = "[...document.images].every(each => each.complete && each.naturalWidth > 0)"


def answers_of(folder):
    answers = Answers(folder.answers, folder.id, read_only=True)
    try:
        return answers.all()
    finally:
        answers.close()


@pytest.mark.parametrize("protocol", ["pairwise", "identification"])
@pytest.mark.parametrize(("width", "height", "phone"), SIZES, ids=["desktop", "phone"])
def test_from_consent_to_thanks(tmp_path: Path, protocol, width, height, phone):
    folder = study_of_run(tmp_path)
    participant = of_protocol(folder, protocol)
    with (
        served(folder.path) as (address, _),
        browser(tmp_path, width, height, phone=phone) as window,
    ):
        home = f"{address}/p/{tokens(folder)[participant.id]}"
        window.open(home)
        assert window.script(WIDE)
        window.click("#begin")  # refused by the browser: the box is not ticked
        assert window.find("#agree")
        window.click("label[for=agree]")
        window.leave(lambda: window.click("#begin"))
        for place in range(len(participant.trials)):
            assert window.title == f"Question {place + 1} of {len(participant.trials)}"
            assert window.script(PLACE) == str(place)
            assert window.script(LOADED)
            assert window.script(WIDE)
            assert window.script(SMALL) == 0
            assert window.script("document.activeElement.tagName") == "H1"
            if place == 1:
                window.leave(window.reload)
                assert window.script(PLACE) == "1"
            if phone:
                window.leave(lambda: window.click(".options button"))
            else:
                key = KEYS[protocol][place % len(KEYS[protocol])]
                window.leave(lambda key=key: window.press(ARROWS.get(key, key)))
        assert window.script("document.querySelector('h1').textContent") == "Thank you"
        window.back()
        assert "Question" not in window.title
        assert window.errors() == []
        hosts = {urlsplit(each).netloc for each in window.requested()}
        assert hosts == {urlsplit(address).netloc}
    assert [each.place for each in answers_of(folder)] == list(range(len(participant.trials)))


def test_tab_and_enter_choose_an_option_and_a_second_click_counts_once(tmp_path):
    folder = study_of_run(tmp_path)
    participant = of_protocol(folder, "pairwise")
    with served(folder.path) as (address, _), browser(tmp_path, 1200, 900) as window:
        window.open(f"{address}/p/{tokens(folder)[participant.id]}")
        window.click("#agree")
        window.leave(lambda: window.click("#begin"))
        window.press("\ue004")  # Tab
        assert window.script("document.activeElement.value") == "0"
        window.leave(lambda: window.press(ENTER))
        both = "document.querySelectorAll('[data-keys]').forEach(each => each.click())"
        window.leave(lambda: window.script(both))
        assert window.script(PLACE) == "2"
    assert [each.position for each in answers_of(folder)] == [0, 0]


def test_the_time_runs_out_by_itself(tmp_path):
    folder = study_of_run(tmp_path, seconds=11)
    participant = of_protocol(folder, "pairwise")
    with served(folder.path) as (address, _), browser(tmp_path, 390, 844, phone=True) as window:
        window.open(f"{address}/p/{tokens(folder)[participant.id]}")
        window.click("#agree")
        window.leave(lambda: window.click("#begin"))
        started = time.monotonic()
        window.leave(lambda: time.sleep(3), within=40)
        assert time.monotonic() - started > 8
        assert window.script(PLACE) == "1"
    assert [each.choice for each in answers_of(folder)] == [None]
