"""The table of `make bench`: goals beside figures, and an exit code that says if one is missed."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.__main__")


@pytest.fixture
def measured(table):
    return importlib.import_module("benchmarks.measured").Measured


def test_every_benchmark_is_in_the_table(table):
    helpers = {"measured", "timing", "__main__", "__init__"}
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers == set(
        table.BENCHMARKS
    )


@pytest.mark.parametrize(
    ("value", "limits", "goal", "missed"),
    [
        (1.0, {"most": 1.15}, "≤ 1.15", False),
        (1.2, {"most": 1.15}, "≤ 1.15", True),
        (2.9, {"least": 3}, "≥ 3", True),
        (3.0, {"least": 3}, "≥ 3", False),
        (0.7, {"least": 0.8, "most": 1.25}, "0.8 to 1.25", True),
        (float("nan"), {"most": 1.0}, "≤ 1", True),
        (9.0, {}, "", False),
    ],
)
def test_a_goal_is_beside_its_figure(measured, value, limits, goal, missed):
    row = measured("step", value, "as measured", **limits)
    assert (row.goal, row.missed) == (goal, missed)
    words = {True: "MISSED", False: "met"}[missed] if goal else ""
    assert row.line.split() == [
        "step",
        f"{value:.3g}",
        *goal.split(),
        *words.split(),
        "as",
        "measured",
    ]


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (2.0, 1)])
def test_a_missed_goal_fails(table, measured, monkeypatch, capsys, value, code):
    class Fake:
        @staticmethod
        def measure():
            yield measured("first", 1.0, most=1.5)
            yield measured("second", value, most=1.5)

    monkeypatch.setitem(sys.modules, "benchmarks.people", Fake)
    assert table.main(["people"]) == code
    out = capsys.readouterr().out
    assert out.count("≤ 1.5") == 2
    assert ("1 missed: second" in out) == bool(code)


def test_an_unknown_benchmark_is_refused(table, capsys):
    assert table.main(["speed"]) == 2
    assert "no benchmark 'speed'" in capsys.readouterr().err
