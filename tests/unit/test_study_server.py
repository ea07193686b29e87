"""A real server: it is killed without losing an answer, takes many visitors, stays at home."""

import importlib
import json
import re
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from commands import error_of, frostglass
from frostglass.core.errors import ConfigError
from frostglass.study.answers import Answers
from frostglass.study.serve import is_local, serve_study
from run_folders import BROKEN, DEFENDED, make_run
from study_visits import (
    Visitor,
    answer_all,
    forked,
    of_protocol,
    served,
    study_of_run,
)

ROOT = Path(__file__).parents[2]


def test_a_server_that_is_killed_loses_no_answer(tmp_path):
    folder = study_of_run(tmp_path)
    participant = of_protocol(folder, "identification")
    confirmed, page = [], None
    for kill in range(3):
        with (
            forked(folder.path) as (address, _),
            httpx2.Client(base_url=address, follow_redirects=True, timeout=30) as client,
        ):
            visitor = Visitor(client, folder, participant)
            if kill == 0:
                visitor.begin()
            assert visitor.place() == len(confirmed)
            while len(confirmed) < 2 * (kill + 1):
                page = visitor.choose(len(confirmed), len(confirmed) % 4)
                confirmed.append(len(confirmed) % 4)
        # Killed with SIGKILL, right after the last answer was confirmed.
    assert page.status_code == 200
    answers = Answers(folder.answers, folder.id, read_only=True)
    assert [each.choice for each in answers.all()] == confirmed
    answers.close()


def test_several_visitors_at_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    benchmark = importlib.import_module("benchmarks.human_study")
    folder = benchmark.made_up_study(tmp_path / "study", 12, 8, 16)
    with forked(folder.path) as (_, port):
        load = benchmark.run_load(folder, port, looking=0.01)
    asked = sum(len(each.trials) for each in folder.design.participants)
    assert load.kept == load.answers == asked
    assert 0 < load.quantile(0.5) <= load.quantile(0.99)


def test_the_command_serves_on_this_machine_until_it_is_interrupted(tmp_path):
    folder = study_of_run(tmp_path)
    with served(folder.path) as (address, server):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
        response = httpx2.get(f"{address}/p/nobody", timeout=30)
        assert response.status_code == 404
        assert "server" not in response.headers
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
        assert server.stderr.read() == (
            "frostglass: stopped; run the same command again to resume\n"
        )
    assert not folder.answers.with_name("answers.sqlite-wal").exists()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("study.example.org", False),
    ],
)
def test_what_is_local(host, local):
    assert is_local(host) is local


def test_a_port_in_use(tmp_path):
    folder = study_of_run(tmp_path)
    with forked(folder.path) as (_, port):
        line = error_of(frostglass("study", "serve", folder.path, "--port", port))
    assert line.startswith(f"cannot listen on 127.0.0.1 port {port} (")
    assert line.endswith("choose another --port or --host")
    with pytest.raises(ConfigError, match="cannot listen on no such host port 1"):
        serve_study(folder.path, "no such host", 1)


def test_without_the_extra_there_is_one_line(tmp_path, monkeypatch):
    folder = study_of_run(tmp_path)
    for missing in ("uvicorn", "starlette.applications"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.delitem(sys.modules, "frostglass.study.app", raising=False)
            line = error_of(frostglass("study", "serve", folder.path))
        assert "serving a study needs starlette and uvicorn" in line
        assert line.endswith("pip install 'frostglass[study]'")


def test_making_and_evaluating_need_no_extra():
    """Only the server imports the extra, and only when it is called."""
    package = ROOT / "src" / "frostglass" / "study"
    needs = re.compile(r"^(from|import) (starlette|uvicorn)", re.MULTILINE)
    files = [path.name for path in package.glob("*.py") if needs.search(path.read_text())]
    assert files == ["app.py"]
    imports = re.compile(r"^from frostglass\.study\.app", re.MULTILINE)
    assert not [path for path in package.glob("*.py") if imports.search(path.read_text())]


def test_the_commands_from_runs_to_results(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, {**DEFENDED, "control": (1, 1)}])
    out = tmp_path / "study"
    made = frostglass(
        *("study", "make", run, "--out", out, "--participants", 6, "--raters", 2, "--people", 6)
    )
    assert (made.code, made.err) == (0, "")
    assert "study of trial: undefended (GMI); CALoR (GMI)" in made.out
    assert "pairwise: 6 items, each judged by 2 of 2 participants; 8 trials for one" in made.out
    assert "note: the audit of CALoR is vacuous (" in made.out
    links = frostglass("study", "links", out, "--address", "https://study.example.org")
    assert len(links.out.splitlines()) == 6
    assert all(each.startswith("https://study.example.org/p/") for each in links.out.splitlines())
    empty = frostglass("study", "results", out)
    assert (empty.code, empty.out.splitlines()[0]) == (
        0,
        "study of trial: 6 invited, 0 agreed, 0 finished, 0 withdrew",
    )

    from frostglass.study.folder import read_study

    answer_all(read_study(out), lambda who, item: item.truth or 0)
    found = frostglass("study", "results", out)
    for words in (
        "pairwise: which resembles the person more",
        "identification: whom of four people, or none",
        "identification by option",
        "agreement (pairwise): Krippendorff's alpha",
        "metrics of the run beside people's judgement",
        "verified_3",
        "top1_1",
        "1.000 (0.",
    ):
        assert words in found.out
    facts = json.loads(frostglass("study", "results", out, "--json").out)
    assert facts["identified"][0]["macro_f1"]["value"] == 1.0
    assert facts["participation"]["finished"] == 6
    assert {each["metric"] for each in facts["metrics"]} >= {"verified_1", "top1_1", "match_3"}


def test_bad_input_is_one_line(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN])
    out = tmp_path / "study"
    line = error_of(frostglass("study", "make", run, "--out", out))
    assert line.startswith("a pairwise study compares two models, but there is one (undefended)")
    assert not out.exists()
    one, other = (study_of_run(tmp_path / name) for name in ("one", "other"))
    line = error_of(frostglass("study", "results", one.path, "--answers", other.answers))
    assert "has the answers of another study" in line
    assert "is not a study" in error_of(frostglass("study", "results", tmp_path))
    assert "is not a study" in error_of(frostglass("study", "serve", tmp_path))
    assert "is not a folder" in error_of(frostglass("study", "make", tmp_path / "x", "--out", out))
