"""The command `harden`: check, call the library, print."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostglass.auditing.config_file import read_config
from frostglass.cli.progress import progress
from frostglass.cli.run import check_machine, check_writable, default_folder, prepare
from frostglass.cli.tables import print_table
from frostglass.cli.workers import Spread
from frostglass.core.errors import ConfigError, RunError
from frostglass.hardening.final import EVERYBODY
from frostglass.hardening.goal import Goal, goal_of
from frostglass.hardening.harden import Hardening, plan_hardening, run_plan
from frostglass.hardening.space import described
from frostglass.hardening.study import SETTINGS, Trial
from frostglass.plan.threads import device_problems
from frostglass.store.step import Event, Kind
from frostglass.store.store import Store


@dataclass(frozen=True)
class Request:
    """The options of the command, as they were given."""

    accuracy: float | None
    protect: bool
    utility: float | None
    measure: str | None
    defenses: str | None
    budget: str
    seeds: int
    attacks: Path | None


def harden_settings(
    settings: dict[str, Any],
    store: Path,
    out: Path | None,
    request: Request,
    *,
    as_json: bool,
    threads: int | None,
    spread: Spread,
    redact: bool,
) -> None:
    """Tune, measure, write the folder, print the final table; raise if it proves nothing."""
    prepare(threads)
    check_machine(store)
    plan = plan_hardening(
        settings,
        _goal(request),
        defenses=_names(request.defenses),
        budget=request.budget,
        seeds=request.seeds,
        attacks=_cases(request.attacks),
    )
    if lines := device_problems([(plan.exp.name, plan.exp)], spread.devices):
        raise ConfigError(lines)
    folder = _folder(out, plan.exp.name)
    with progress() as listener:

        def watch(number: int, trial: Trial | None) -> None:
            kind: Kind = "done" if trial else "start"
            note = _sentence(trial, plan.goal) if trial else ""
            listener(Event("trial", str(number), kind, note=note))

        steps = Store(store, listener=listener, devices=spread.devices)
        with spread.over(steps, [("", plan.exp)], threads):
            result = run_plan(plan, steps, folder, redact=redact, watch=watch)
    print(json.dumps(result.facts)) if as_json else _print(result, plan.goal)
    failures = [f"FAILED: {reason}" for reason in result.final.failed]
    failures += [f"VACUOUS: {reason}" for reason in result.final.vacuous]
    if failures:
        raise RunError("; ".join(failures))


def _goal(request: Request) -> Goal:
    """Return what is asked for; each surface has an option of its own for it."""
    if request.protect and request.accuracy is not None:
        raise ConfigError(
            "--accuracy is that of whole models: give the least --utility with --protect instead"
        )
    if not request.protect:
        for option, value in (("--utility", request.utility), ("--measure", request.measure)):
            if value is not None:
                raise ConfigError(
                    f"{option} is about protected features: add --protect, or give --accuracy "
                    "alone for a whole model"
                )
    if (request.utility if request.protect else request.accuracy) is None:
        raise ConfigError(
            "--utility: required with --protect, the least MCC of the server's answers that you "
            "accept, such as 0.8 (AUC with --measure auc)"
            if request.protect
            else "--accuracy: required, the least that you accept, such as 0.95; for features that "
            "leave a device give --protect --utility"
        )
    return goal_of(request.accuracy, request.utility, request.measure or "mcc")


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--defenses: expected names with commas, such as calor,bido; got none")
    return names


def _cases(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None:
        return None
    values = read_config(path)
    cases = values.get("case")
    if set(values) != {"case"} or not isinstance(cases, list):
        raise ConfigError(f"--attacks {path}: expected [[case]] tables and nothing else")
    return cases


def _folder(out: Path | None, name: str) -> Path:
    """Return the folder of the study; refuse one with files of something else."""
    folder = out or default_folder(f"{name}-harden")
    check_writable("--out", folder)
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    foreign = sorted(name for name in names if not name.startswith("."))
    if foreign and SETTINGS not in names:
        raise ConfigError(
            f"--out {folder} contains files of something else, such as {foreign[0]}: give a new "
            "folder, or that of an earlier hardening"
        )
    return folder


def _sentence(trial: Trial, goal: Goal) -> str:
    outcome = trial.outcome
    words = [] if outcome.utility is None else [f"{goal.title} {goal.text(outcome.utility)}"]
    words += [outcome.reason] if outcome.leak is None else [f"verified {outcome.leak:.1%}"]
    return f"{described(trial.tables)}: {', '.join(words)}"


def _print(result: Hardening, goal: Goal) -> None:
    facts = result.facts
    for population, models in result.final.models.items():
        rows = [
            {
                "model": described(model.settings) or model.title,
                goal.title: str(model.utility),
                goal.leak.title: str(model.leak),
                goal.widest.title: str(model.widest),
                "strongest attack": model.attack,
            }
            for model in models
        ]
        which = "all people" if population == EVERYBODY else f"the {population} of the people"
        print_table(f"models of {which}, {facts['seeds']} seeds", rows, ["model"])
    for title, better in facts["dominated"].items():
        print(f"dominated: {title}, by {better}")
    for title, reason in facts["not_compared"].items():
        print(f"not compared: {title}: {reason}")
    for title, reason in facts["left_out"].items():
        print(f"left out: {title}: {reason}")
    print(f"recommended: {described(result.recommended.tables)}")
    if facts["recommended"]["remark"]:
        print(facts["recommended"]["remark"])
    print(f"model: {facts['model']}")
    print(f"report: {facts['report']}")
