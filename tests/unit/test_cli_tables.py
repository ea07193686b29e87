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
    # The last evaluator is an embedder, which has no classes.
    told = {f"top1_{number}": scored(0.1 * number) for number in evaluators[:-1]}
    told |= {f"verified_{number}": scored(0.1 * number + 0.05) for number in evaluators}
    return {
        "label": label,
        "surface": surface,
        "images_per_person": 3,
        "target": {"accuracy": {"test": 0.917}, "given": False},
        "defenses": [],
        "utility": {"mean_mcc": 0.71, "mean_auc": 0.93},
        "scores": {
            **told,
            "target_top1": scored(0.875),
            "similarity": scored(0.62),
            "ssim": scored(0.44),
        },
        "prior_only": {"verified_3": scored(0.062), "similarity": scored(0.12)},
        "evaluators": [evaluator(number) for number in evaluators],
        "controls": {
            "warnings": ["the classifiers disagree"],
            "references": {"same_person": 0.7, "different_people": 0.02},
        },
        "queries": 12345678,
        "seconds": 98765.4,
    }


def evaluator(number):
    verifier = {"rates": [0.01, 0.001], "true_accepts": [0.97, 0.9]}
    accuracy = {"test": 0.9} if number < 3 else None
    facts = {"model": f"net{number}", "accuracy": accuracy, "verifier": verifier}
    return facts | {"excluded": "weak" if number == 1 else "", "decides": number == 3}


def run_facts(surface):
    numbers = range(1, 4)
    return {
        "name": "toy",
        "identities": ["a", "b"],
        "not_run": [],
        "evaluators": [evaluator(number) for number in numbers],
        "audits": [audit(label, surface, numbers) for label in LABELS],
    }


VALUES = {
    "model": [
        *("35% (29.9–43.1%)", "6.2%", "10%, 20%", "91.7%", "87.5%", "12,345,678", "98765"),
    ],
    "features": [
        *("0.71", "0.93", "0.62 (0.57 to 0.70)", "0.12", "35%", "10%, 20%", "0.44"),
        *("12,345,678", "98765"),
    ],
}


@pytest.mark.parametrize("surface", VALUES)
@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_no_column_and_no_digit_is_lost_on_any_terminal(monkeypatch, capsys, surface, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_scores(run_facts(surface))
    table = capsys.readouterr().out.partition("recognised: share")[0]
    assert max(map(len, table.splitlines())) <= columns
    for value in VALUES[surface]:
        assert len(re.findall(rf"(?<![\d.]){re.escape(value)}", table)) >= len(LABELS)
    assert all(word in table for label in LABELS for word in label.split())
    assert "…" not in table


@pytest.mark.parametrize(("columns", "look"), [(80, "blocks"), (90, "plain"), (200, "framed")])
def test_a_table_that_does_not_fit_loses_its_frame_or_becomes_blocks(
    monkeypatch, capsys, columns, look
):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_scores(run_facts("model"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: 2 people attacked"
    assert any("┃" in line for line in lines) is (look == "framed")
    titles = ["audit", "recognised", "prior", "only", "top-1", "accuracy", "target"]
    assert (lines[1].split() == [*titles, "queries", "seconds"]) is (look == "plain")
    if look == "blocks":
        assert lines[1:5] == [
            "undefended",
            "  recognised  35% (29.9–43.1%)",
            "  prior only  6.2%",
            "  top-1       10%, 20%",
        ]


def test_a_given_model_is_called_so_and_its_accuracy_is_not_called_held_out(capsys):
    facts = run_facts("model")
    one, facts["audits"] = facts["audits"][0], facts["audits"][:1]
    one |= {"label": "audit", "defenses": []}
    one["target"]["given"] = True
    print_scores(facts)
    text = capsys.readouterr().out
    assert "given model" in text
    given = "on the private images given, which a given model may have been trained on"
    assert f"\naccuracy: {given}\n" in text
    one["target"]["given"] = False
    print_scores(facts)
    assert "\naccuracy: on held-out images\n" in capsys.readouterr().out


def test_columns_and_warnings_are_explained(capsys):
    facts = run_facts("features")
    facts["audits"][1]["controls"]["warnings"].append("the attack stopped early")
    print_scores(facts)
    text = capsys.readouterr().out
    assert "toy: 2 people attacked, 3 images each" in text
    assert "similarity: 0.70 is another image of the same person, 0.02 another person" in text
    assert (
        "recognised: share that a face verifier (evaluator 3, net3) accepts as the person, at a "
        "false-accept rate of 1%"
    ) in text
    assert "top-1: share that each classifier of the private people ranks first, which is" in text
    assert (
        "evaluators on held-out images: 1 net1 (90% correct, accepts 97%, excluded), "
        "2 net2 (90% correct, accepts 97%), 3 net3 (accepts 97%)"
    ) in text
    assert "note (all audits): the classifiers disagree\n" in text
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
        "not_estimated": ["robustness", "analyze"],
    }
    print_costs(costs)
    text = capsys.readouterr().out
    assert "│  done │" in text
    assert "│ 2.2 h │" in text
    message = "no problems; about 2.2 h on this machine, about 1.5 GiB of memory (target)"
    assert message in text.splitlines()
    last = "this is `frostglass run`; not estimated: robustness, analyze"
    assert text.splitlines()[-1] == last
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
