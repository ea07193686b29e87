"""A study in headless Chromium: from consent to thanks, at the sizes of a desktop and a phone."""

import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from browser import browser, needs_chromium
from frostglass.study.answers import Answers
from study_visits import of_protocol, served, study_of_run, tokens

pytestmark = [pytest.mark.slow, needs_chromium]

DESKTOP, PHONE = (1200, 900), (390, 844)
KEYS = {"pairwise": ["1", "2", "ArrowLeft"], "identification": ["1", "d", "0", "n"]}
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
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_from_consent_to_thanks(tmp_path: Path, protocol, size):
    folder = study_of_run(tmp_path)
    participant = of_protocol(folder, protocol)
    with served(folder.path) as (address, _), browser(tmp_path / "profile") as tab:
        tab.open(f"{address}/p/{tokens(folder)[participant.id]}", *size)
        assert tab.ask(WIDE)
        tab.click("#begin")  # refused by the browser: the box is not ticked
        assert tab.ask("document.querySelectorAll('#agree').length") == 1
        tab.click("label[for=agree]")
        tab.leave(lambda: tab.click("#begin"))
        for place in range(len(participant.trials)):
            title = f"Question {place + 1} of {len(participant.trials)}"
            assert tab.ask("document.title") == title
            assert tab.ask(PLACE) == str(place)
            assert tab.ask(LOADED)
            assert tab.ask(WIDE)
            assert tab.ask(SMALL) == 0
            assert tab.ask("document.activeElement.tagName") == "H1"
            if place == 1:
                tab.leave(lambda: tab.call("Page.reload"))
                assert tab.ask(PLACE) == "1"
            if size == PHONE:
                tab.leave(lambda: tab.click(".options button"))
            else:
                key = KEYS[protocol][place % len(KEYS[protocol])]
                tab.leave(lambda key=key: tab.press(key))
        assert tab.ask("document.querySelector('h1').textContent") == "Thank you"
        tab.leave(lambda: tab.ask("history.back()"))
        assert "Question" not in tab.ask("document.title")
        assert tab.errors == []
        assert {urlsplit(each).netloc for each in tab.requests} == {urlsplit(address).netloc}
    assert [each.place for each in answers_of(folder)] == list(range(len(participant.trials)))


def test_tab_and_enter_choose_an_option_and_a_second_click_counts_once(tmp_path):
    folder = study_of_run(tmp_path)
    participant = of_protocol(folder, "pairwise")
    with served(folder.path) as (address, _), browser(tmp_path / "profile") as tab:
        tab.open(f"{address}/p/{tokens(folder)[participant.id]}", *DESKTOP)
        tab.click("#agree")
        tab.leave(lambda: tab.click("#begin"))
        tab.press("Tab")
        assert tab.ask("document.activeElement.value") == "0"
        tab.leave(lambda: tab.press("Enter"))
        both = "document.querySelectorAll('[data-keys]').forEach(each => each.click())"
        tab.leave(lambda: tab.ask(both))
        assert tab.ask(PLACE) == "2"
    assert [each.position for each in answers_of(folder)] == [0, 0]


def test_the_time_runs_out_by_itself(tmp_path):
    folder = study_of_run(tmp_path, seconds=11)
    participant = of_protocol(folder, "pairwise")
    with served(folder.path) as (address, _), browser(tmp_path / "profile") as tab:
        tab.open(f"{address}/p/{tokens(folder)[participant.id]}", *PHONE)
        tab.click("#agree")
        tab.leave(lambda: tab.click("#begin"))
        started = time.monotonic()
        tab.leave(lambda: time.sleep(3), within=40)
        assert time.monotonic() - started > 8
        assert tab.ask(PLACE) == "1"
    assert [each.choice for each in answers_of(folder)] == [None]
