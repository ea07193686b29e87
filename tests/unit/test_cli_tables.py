"""What the commands print: tables that fit any terminal, and progress."""

import io
import re
import sys

import pytest

from frostglass.cli.progress import Bars, Lines, progress
from frostglass.cli.tables import print_costs, print_scores, print_table
from frostglass.store.step import Event

LABELS = ("undefended", "calor, attack plgmi with a long name, seed 1")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def scored(value):
    return {"value": value, "low": value - 0.0512, "high": value + 0.0813}


def audit(label, surface, evaluators):
    """The part of an audit in run.json that the terminal shows."""
    top1 = {f"top1_{number}": scored(0.1 * number) for number in evaluators}
    return {
        "label": label,
        "surface": surface,
        "images_per_person": 3,
        "target": {"accuracy": {"test": 0.917}},
        "utility": {"mean_mcc": 0.71, "mean_auc": 0.93},
        "scores": {
            **top1,
            "target_top1": scored(0.875),
            "similarity": scored(0.62),
            "ssim": scored(0.44),
        },
        "prior_only": {**top1, "similarity": scored(0.12)},
        "controls": {
            "warnings": ["the evaluators disagree"],
            "references": {"same_person": 0.7, "different_people": 0.02},
        },
        "queries": 12345678,
        "seconds": 98765.4,
    }


def run_facts(surface, evaluators=3):
    numbers = range(1, evaluators + 1)
    return {
        "name": "toy",
        "identities": ["a", "b"],
        "evaluators": [{"model": f"net{n}", "accuracy": {"test": 0.9}} for n in numbers],
        "audits": [audit(label, surface, numbers) for label in LABELS],
    }


VALUES = {
    "model": [
        *("91.7%", "10.0% (4.9% to 18.1%)", "20.0% (14.9% to 28.1%)", "30.0% (24.9% to 38.1%)"),
        *("10.0%, 20.0%, 30.0%", "87.5%", "12,345,678", "98765"),
    ],
    "features": [
        *("0.71", "0.93", "0.62 (0.57 to 0.70)", "10%", "20%", "30%", "0.44", "0.12"),
        *("12,345,678", "98765"),
    ],
}


@pytest.mark.parametrize("surface", VALUES)
@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_no_column_and_no_digit_is_lost_on_any_terminal(monkeypatch, capsys, surface, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_scores(run_facts(surface))
    table = capsys.readouterr().out.partition("evaluator N:")[0]
    assert max(map(len, table.splitlines())) <= columns
    for value in VALUES[surface]:
        assert len(re.findall(rf"(?<![\d.]){re.escape(value)}", table)) >= len(LABELS)
    assert all(word in table for label in LABELS for word in label.split())
    assert "…" not in table


@pytest.mark.parametrize(("columns", "framed"), [(80, False), (200, True)])
def test_a_table_that_does_not_fit_becomes_a_block_per_row(monkeypatch, capsys, columns, framed):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_scores(run_facts("model"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: 2 people attacked"
    assert any("┃" in line for line in lines) is framed
    if not framed:
        assert lines[1:4] == [
            "undefended",
            "  accuracy            91.7%",
            "  evaluator 1 (95 %)  10.0% (4.9% to 18.1%)",
        ]


def test_a_given_model_is_called_so_and_its_accuracy_is_not_called_held_out(capsys):
    facts = run_facts("model", evaluators=2)
    one, facts["audits"] = facts["audits"][0], facts["audits"][:1]
    one |= {"label": "audit", "defenses": []}
    one["target"]["given"] = facts["evaluators"][1]["given"] = True
    print_scores(facts)
    text = capsys.readouterr().out
    assert "given model" in text
    assert "evaluators' own accuracy on held-out images: net1 90.0%\n" in text
    given = "on the private images given, which a given model may have been trained on"
    assert f"evaluators' own accuracy {given}: net2 90.0%\n" in text
    assert f"\naccuracy {given}\n" in text
    one["target"]["given"] = False
    print_scores(facts)
    assert "\naccuracy on held-out images\n" in capsys.readouterr().out


def test_columns_and_warnings_are_explained(capsys):
    facts = run_facts("features")
    facts["audits"][1]["controls"]["warnings"].append("the attack stopped early")
    print_scores(facts)
    text = capsys.readouterr().out
    assert "toy: 2 people attacked, 3 images each" in text
    assert "similarity: 0.70 is another image of the same person, 0.02 another person" in text
    assert "own accuracy on held-out images: net1 90.0%, net2 90.0%, net3 90.0%" in text
    assert "note (all audits): the evaluators disagree\n" in text
    assert f"note ({LABELS[1]}): the attack stopped early\n" in text


def test_names_are_not_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_table("[b]x", [{"name": "[/b] [red]:smile:"}], left=["name"])
    assert "[/b] [red]:smile:" in capsys.readouterr().out


def test_costs(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    step = {"step": "target", "label": "audit", "work": "2 epochs", "done": True, "seconds": 0}
    costs = {
        "steps": [step, step | {"done": False, "seconds": 8000}],
        "seconds": 8000,
        "memory_mib": 1536,
        "memory_step": "target",
        "memory_unknown": "",
    }
    print_costs(costs)
    text = capsys.readouterr().out
    assert "│  done │" in text
    assert "│ 2.2 h │" in text
    message = "no problems; about 2.2 h on this machine, about 1.5 GiB of memory (target)"
    assert message in text.splitlines()
    print_costs(costs | {"memory_unknown": "my:Model uses a Python loop"})
    text = capsys.readouterr().out
    assert "at least 1.5 GiB" in text
    assert "the memory estimate is incomplete: my:Model uses a Python loop" in text


@pytest.mark.parametrize(("stream", "kind"), [(Terminal, Bars), (io.StringIO, Lines)])
def test_bars_are_drawn_on_a_terminal_only(monkeypatch, stream, kind):
    monkeypatch.setattr(sys, "stderr", stream())
    assert type(progress()) is kind


def test_bars_show_running_steps(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress() as bars:
        bars(Event("split", "a", "cached"))
        bars(Event("target", "b", "start"))
        bars(Event("target", "b", "progress", 3, 7, "accuracy 0.25"))
    text = sys.stderr.getvalue()
    assert all(word in text for word in ("target", "3/7", "accuracy 0.25"))
    assert "split" not in text


def test_without_a_terminal_a_line_is_printed_per_start_end_and_30_seconds():
    stream, seconds = io.StringIO(), iter([0, 1, 2, 31, 40, 61, 62, 70, 90, 99])
    with Lines(stream, clock=lambda: next(seconds)) as lines:
        for event in (
            Event("split", "a" * 64, "cached"),  # at 0 s
            Event("target", "b" * 64, "start"),  # at 1 s
            Event("target", "b" * 64, "progress", 1, 9),
            Event("target", "b" * 64, "progress", 2, 9, "accuracy 0.25"),  # at 31 s
            Event("target", "b" * 64, "progress", 3, 9),
            Event("target", "b" * 64, "progress", 4, 9),  # at 61 s
            Event("prior", "c" * 64, "resume"),
            Event("prior", "c" * 64, "progress", 5, 6),
            Event("target", "b" * 64, "done"),
            Event("prior", "c" * 64, "waiting", note="process 3 on x is making it"),
        ):
            lines(event)
    assert stream.getvalue().splitlines() == [
        "target bbbbbbbb: started",
        "target bbbbbbbb: 2/9 after 30 s (accuracy 0.25)",
        "target bbbbbbbb: 4/9 after 60 s",
        "prior cccccccc: resumed",
        "target bbbbbbbb: done after 89 s",
        "prior cccccccc: waiting (process 3 on x is making it)",
    ]
