"""The website of a study: from consent to thanks, once each, and nothing for strangers."""

import re
import sqlite3
from dataclasses import dataclass

import pytest
from starlette.testclient import TestClient

from frostglass.study.answers import Answers
from frostglass.study.app import GRACE, HEADERS, LARGEST_FORM, study_app
from study_visits import FORM, Visitor, of_protocol, study_of_run, tokens


@dataclass
class Clock:
    """A clock that tests set."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return study_of_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made, tmp_path):
    """A study without answers."""
    from dataclasses import replace
    from shutil import copytree

    return replace(made, path=copytree(made.path, tmp_path / "study"))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def client(folder, clock):
    with TestClient(study_app(folder, clock), base_url="http://study") as client:
        yield client


@pytest.fixture
def pairs(client, folder):
    return Visitor(client, folder, of_protocol(folder, "pairwise"))


@pytest.fixture
def searches(client, folder):
    return Visitor(client, folder, of_protocol(folder, "identification"))


def saved(folder):
    answers = Answers(folder.answers, folder.id, read_only=True)
    try:
        return answers.all()
    finally:
        answers.close()


def test_the_way_from_consent_to_thanks(searches, folder):
    page = searches.look()
    assert "What is kept" in page.text
    assert f"There are {len(searches.participant.trials)} questions" in page.text
    page = searches.begin()
    assert "Whom does this image show?" in page.text
    page = searches.finish(lambda item: item.none)
    assert "Thank you" in page.text
    answers = saved(folder)
    assert [each.place for each in answers] == list(range(len(searches.participant.trials)))
    for each in answers:
        trial, item = searches.trial(each.place)
        assert each.choice == (item.truth if item.check else item.none)
        where = item.none if each.choice == item.none else trial.order.index(each.choice)
        assert each.position == where


def test_a_pairwise_page_names_neither_model_nor_person(pairs, folder):
    text = pairs.begin().text
    assert "Which image resembles this person more?" in text
    words = [each.label for each in folder.design.models] + [f"person {n}" for n in range(20)]
    assert [word for word in words if word.lower() in text.lower()] == []


def test_images_are_those_of_the_open_trial_alone(pairs):
    address = f"{pairs.home}/image/0/0"
    assert pairs.client.get(address).status_code == 404  # before consent
    pairs.begin()
    images = [pairs.client.get(f"{pairs.home}/image/0/{slot}") for slot in range(3)]
    assert [each.headers["content-type"] for each in images] == ["image/png"] * 3
    assert len({each.content for each in images}) >= 2
    for other in ("1/0", "0/3", "0/-1", "99999999999999999999/0"):
        assert pairs.client.get(f"{pairs.home}/image/{other}").status_code == 404
    pairs.choose(0, 0)
    assert pairs.client.get(address).status_code == 404
    assert pairs.client.get(f"{pairs.home}/image/1/0").status_code == 200


def test_options_are_shown_in_the_order_of_the_trial(searches, folder):
    from frostglass.report.charts import png

    searches.begin()
    trial, item = searches.trial(0)
    shown = [searches.client.get(f"{searches.home}/image/0/{n}").content for n in range(5)]
    images = folder.images()
    expected = [item.image, *(item.options[option] for option in trial.order)]
    assert shown == [png(images[place], 512) for place in expected]


def test_a_double_click_counts_once_and_the_first_answer_stays(pairs, folder):
    pairs.begin()
    first = pairs.choose(0, 1)
    again = pairs.choose(0, 0)
    assert (first.status_code, again.status_code) == (200, 200)
    assert pairs.place() == 1
    assert [(each.place, each.choice) for each in saved(folder)] == [(0, 1)]


def test_a_reload_changes_nothing(pairs, folder):
    pairs.begin()
    assert pairs.look().text == pairs.look().text
    assert saved(folder) == []


def test_answers_out_of_turn_are_refused(pairs, folder):
    assert pairs.post("answer", place=0, choice=0).status_code == 409  # before consent
    pairs.post("consent", agree="yes")
    pairs.client.get(pairs.home)
    assert pairs.post("answer", place=1, choice=0).status_code == 409
    assert saved(folder) == []


def test_what_was_not_shown_cannot_be_answered(pairs, folder):
    pairs.client.post(
        f"{pairs.home}/consent", content="agree=yes", headers=FORM, follow_redirects=False
    )
    assert pairs.post("answer", place=0, choice=0).status_code == 409
    assert saved(folder) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"place": 0},
        {"choice": 0},
        {"place": 0, "choice": 2},
        {"place": 0, "choice": "none"},
        {"place": 0, "choice": "-1"},
        {"place": "²", "choice": 0},
        {"place": "0x0", "choice": 0},
        {"place": 0, "choice": "0" * 50},
        {"place": 99999, "choice": 0},
        {"place": "0; DROP TABLE answers", "choice": 0},
    ],
)
def test_forms_that_are_not_ours_are_refused(pairs, folder, fields):
    pairs.begin()
    assert pairs.post("answer", **fields).status_code == 400
    assert saved(folder) == []


def test_an_identification_has_no_time_limit(searches, folder, clock):
    searches.begin()
    clock.now += 3600
    searches.choose(0, 0)
    (answer,) = saved(folder)
    assert (answer.choice, answer.seconds) == (0, 3600)
    assert searches.post("answer", place=1, choice="timeout").status_code == 400


@pytest.mark.parametrize(("after", "counts"), [(60 + GRACE, True), (61 + GRACE, False)])
def test_a_late_comparison_counts_as_timed_out(pairs, folder, clock, after, counts):
    pairs.begin()
    clock.now += after
    pairs.post("answer", place=0, choice=0)
    (answer,) = saved(folder)
    assert (answer.choice is not None) is counts
    assert answer.seconds == after


def test_the_page_sends_a_time_out(pairs, folder, clock):
    pairs.begin()
    clock.now += 60
    pairs.post("answer", place=0, choice="timeout")
    assert [each.choice for each in saved(folder)] == [None]
    assert pairs.place() == 1


def test_a_reload_gives_no_time_back(pairs, folder, clock):
    pairs.begin()
    clock.now += 20
    assert 'data-left="40.0"' in pairs.look().text
    clock.now += 60
    page = pairs.look().text
    assert 'name="place" value="1"' in page
    assert 'data-left="60.0"' in page
    assert [(each.place, each.choice, each.seconds) for each in saved(folder)] == [(0, None, 80)]


def test_the_clock_begins_anew_when_the_server_was_down(pairs, folder, clock):
    pairs.begin()
    clock.now += 500
    with TestClient(study_app(folder, clock), base_url="http://study") as client:
        again = Visitor(client, folder, pairs.participant)
        trial, _ = again.trial(0)
        again.post("answer", place=0, choice=0)  # the page that was open all the time
        assert [each.choice for each in saved(folder)] == [trial.order[0]]
        assert 'data-left="60.0"' in again.look().text


def test_a_restart_loses_nothing(searches, folder, clock):
    searches.begin()
    searches.finish(lambda item: 0, most=3)
    with TestClient(study_app(folder, clock), base_url="http://study") as client:
        again = Visitor(client, folder, searches.participant)
        assert again.place() == 3
        assert "Thank you" in again.finish(lambda item: 0).text


def test_consent_is_needed_and_given_once(pairs, folder):
    assert pairs.post("consent", agree="no").status_code == 400
    assert "What is kept" in pairs.look().text
    pairs.begin()
    assert pairs.post("consent", agree="yes").status_code == 200
    assert pairs.place() == 0


def test_who_withdraws_leaves_nothing(pairs, folder):
    pairs.begin()
    pairs.finish(lambda item: 0, most=2)
    assert "Answers saved so far: 2." in pairs.client.get(f"{pairs.home}/stop").text
    assert pairs.post("stop").status_code == 415  # an empty form has no type
    assert pairs.post("stop", delete="no").status_code == 400
    assert len(saved(folder)) == 2
    assert "Your answers are deleted" in pairs.post("stop", delete="yes").text
    assert saved(folder) == []
    assert pairs.post("answer", place=0, choice=0).status_code == 409
    assert pairs.client.get(f"{pairs.home}/image/0/0").status_code == 404
    assert pairs.post("consent", agree="yes").status_code == 200
    assert "Your answers are deleted" in pairs.look().text


STRANGE_PATHS = [
    "/",
    "/p",
    "/p/",
    "/p/x",
    "/p/x/image/0/0",
    "/p/..%2f..%2fstudy.json",
    "/p/%00",
    "/p/%ff%fe",
    f"/p/{'a' * 5000}",
    "/static/",
    "/static/base.html",
    "/static/..%2fapp.py",
    "/static/%2e%2e/answers.sqlite",
    "/static/../../study.json",
    "/static/study.css%00",
    "/study.json",
    "/images.safetensors",
    "/answers.sqlite",
    "/links.csv",
    "/docs",
    "/openapi.json",
]


@pytest.mark.parametrize("path", STRANGE_PATHS)
def test_there_is_nothing_without_a_link(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert "There is nothing here" in response.text


def test_a_token_must_be_whole(pairs):
    token = pairs.token
    others = [token[:-1], token + "A", token.swapcase(), token + "/", f"{token}%20"]
    for wrong in others:
        assert pairs.client.get(f"/p/{wrong}").status_code == 404
        form = {"agree": "yes"}
        assert pairs.client.post(f"/p/{wrong}/consent", data=form).status_code == 404


def test_nobody_answers_for_another(pairs, searches, folder):
    """Items are named by the participant's own places, so there is no way to name another's."""
    pairs.begin()
    searches.begin()
    pairs.choose(0, 0)
    assert {each.participant for each in saved(folder)} == {pairs.participant.id}
    assert searches.place() == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "answer"),
        ("GET", "consent"),
        ("PUT", "answer"),
        ("DELETE", "stop"),
        ("POST", "image/0/0"),
        ("TRACE", "answer"),
    ],
)
def test_wrong_methods_are_refused(pairs, method, path):
    assert pairs.client.request(method, f"{pairs.home}/{path}").status_code == 405


def test_large_and_odd_bodies_are_refused(pairs, folder):
    pairs.begin()
    address = f"{pairs.home}/answer"

    def sent(body, kind=FORM["content-type"]):
        return pairs.client.post(address, content=body, headers={"content-type": kind}).status_code

    assert sent(b"place=0&choice=0&x=" + b"a" * LARGEST_FORM) == 413
    assert sent(b"a" * 10_000_000) == 413
    assert sent(b"place=0&choice=0", "multipart/form-data; boundary=x") == 415
    assert sent(b'{"place": 0, "choice": 0}', "application/json") == 415
    assert sent(b"\xff\xfe") == 400
    assert sent(b"&".join(b"a%d=1" % n for n in range(100))) == 400
    assert saved(folder) == []


@pytest.mark.parametrize("path", ["/", "/static/study.js", "/p/x", "{home}", "{home}/answer"])
def test_every_response_has_the_strict_headers(pairs, path):
    headers = pairs.client.get(path.format(home=pairs.home)).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"unsafe|http|\*|data:", policy)


def test_pages_load_from_this_server_alone(pairs, searches):
    texts = [pairs.look(), pairs.begin(), searches.begin(), pairs.client.get(f"{pairs.home}/stop")]
    for text in (each.text for each in texts):
        loaded = re.findall(r'(?:src|href|action)="([^"]*)"', text)
        assert loaded
        assert [each for each in loaded if not each.startswith(("/p/", "/static/"))] == []
        assert not re.search(r"style=|onclick|<script>|<style", text)
    for name in ("study.css", "study.js"):
        assert "//" not in pairs.client.get(f"/static/{name}").text.replace("// ", "")


def test_the_database_keeps_no_token_and_nothing_about_a_visitor(pairs, folder):
    pairs.begin()
    pairs.choose(0, 0)
    connection = sqlite3.connect(folder.answers)
    dump = "\n".join(connection.iterdump())
    connection.close()
    assert not [token for token in tokens(folder).values() if token in dump]
    assert "testclient" not in dump  # the address and the user agent of the test's client


def test_pages_can_be_used_with_a_keyboard_and_a_screen_reader(pairs, searches):
    for text in (pairs.begin().text, searches.begin().text):
        assert 'lang="en"' in text
        assert re.search(r"<title>Question 1 of \d+</title>", text)
        assert [tag for tag in re.findall(r"<img[^>]*>", text) if 'alt="' not in tag] == []
        assert 'aria-live="polite"' in text
        assert re.search(r'<h1 tabindex="-1" data-focus>', text)
        buttons = re.findall(r"<button[^>]*data-keys=\"([^\"]*)\"", text)
        keys = [key for each in buttons for key in each.split()]
        assert len(keys) == len(set(keys)) == 2 * len(buttons)
    consent = Visitor(pairs.client, pairs.folder, pairs.folder.design.participants[1]).look().text
    assert '<label for="agree">' in consent


def test_an_answer_that_cannot_be_written_is_not_lost_silently(folder, clock, monkeypatch):
    """A full disk: the participant is told, and the same answer can be given again."""
    app = study_app(folder, clock)
    with TestClient(app, base_url="http://study", raise_server_exceptions=False) as client:
        visitor = Visitor(client, folder, of_protocol(folder, "pairwise"))
        visitor.begin()
        with monkeypatch.context() as patch:

            def full(*_):
                raise sqlite3.OperationalError("database or disk is full")

            patch.setattr(Answers, "record", full)
            response = visitor.choose(0, 1)
        assert response.status_code == 500
        assert "That did not work" in response.text
        assert "content-security-policy" in response.headers
        assert saved(folder) == []
        assert visitor.choose(0, 1).status_code == 200
        assert [each.choice for each in saved(folder)] == [1]
