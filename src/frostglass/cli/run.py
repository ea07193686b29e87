"""The commands `demo`, `run` and `check`: check, call the library, print."""

import gc
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from frostglass.analyses._files import FOLDER as ANALYSES
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.run import Run, run_all, within
from frostglass.auditing.run_folder import FILES, NUMBERS, summary, write_run
from frostglass.cli.main import raise_on_interrupt
from frostglass.cli.progress import progress
from frostglass.cli.tables import print_advice, print_answers, print_costs, print_scores
from frostglass.cli.workers import Spread
from frostglass.core.errors import BudgetReached, ConfigError, RunError
from frostglass.core.value_log import ValueLog, open_log
from frostglass.plan.cheaper import cheaper
from frostglass.plan.estimate import estimate
from frostglass.plan.problems import problems
from frostglass.plan.threads import device_problems
from frostglass.report.build import build_report
from frostglass.runtime.device import default_device
from frostglass.runtime.memory import keep_freed_memory
from frostglass.store.store import Store

REPORT = ("report.html", "report.json")


def prepare(threads: int | None) -> None:
    """Set up this process for long work."""
    raise_on_interrupt()
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)


def run_settings(
    settings: dict[str, Any],
    store: Path,
    out: Path | None,
    *,
    as_json: bool,
    threads: int | None,
    spread: Spread,
    redact: bool,
    images: bool = True,
    time_budget: str | None = None,
    log: str | None = None,
) -> None:
    """Run a config, write its run folder and report, print the scores."""
    within(time_budget)  # refuse what is no time before anything is computed
    prepare(threads)
    chosen = checked(experiments(settings), store, spread.devices)
    folder = run_folder(out, chosen[0][1].name)
    with progress() as listener, logged(log, folder.name) as values:
        steps = Store(store, listener=listener, devices=spread.devices)
        steps.log = values
        with spread.over(steps, chosen, threads):
            result = run_all(settings, steps, time_budget=time_budget)
    conclude(result, folder, store, as_json=as_json, redact=redact, images=images)


@contextmanager
def logged(target: str | None, name: str) -> Iterator[ValueLog | None]:
    """Open the log that --log or FROSTGLASS_LOG names, and close it whatever happens."""
    log = open_log(target, name)
    try:
        yield log
    finally:
        if log:
            log.close()


def conclude(
    result: Run, folder: Path, store: Path, *, as_json: bool, redact: bool, images: bool = True
) -> None:
    """Write and print a run; raise if an audit failed, proves nothing or was not run."""
    try:
        write_run(result, folder)
    except OSError as error:
        raise RunError(
            f"cannot write {folder} ({error.strerror}): the results are in {store}; give another "
            "--out"
        ) from error
    page = build_report([folder], folder / "report.html", redact=redact, images=images)
    facts = summary(result)
    written = json.loads(page.with_suffix(".json").read_bytes())["answers"]
    answers = [each for study in written for each in study["thresholds"]]
    if as_json:
        print(json.dumps(facts | {"report": str(page)} | ({"answers": answers} if answers else {})))
    else:
        print_scores(facts)
        print_answers(answers)
        print(f"report: {page}")
    failures = [f"FAILED: {reason}" for reason in result.failed]
    failures += [f"VACUOUS: {reason}" for reason in result.vacuous]
    if failures:
        raise RunError("; ".join(failures))
    if result.not_run:
        raise BudgetReached(
            f"not run: {'; '.join(result.not_run)}. Run the same command again to go on"
        )


def report_runs(
    runs: list[Path], out: Path, store: Path | None, *, as_json: bool, **look: Any
) -> None:
    """Write a report; raise after that if a run differs from the store that made it."""
    path = build_report(runs, out, store=store, **look)
    origins = json.loads(path.with_suffix(".json").read_bytes())["origins"]
    print(json.dumps({"report": str(path), "origins": origins}) if as_json else path)
    if differing := [each["text"] for each in origins if each["status"] == "differs"]:
        raise RunError(" ".join(differing))


def check_settings(settings: dict[str, Any], store: Path, *, as_json: bool) -> None:
    """Report every problem of a config, or estimate its time and memory."""
    prepare(None)
    # Collections would search the many objects of imported packages again and again.
    gc.freeze()
    try:
        chosen = checked(experiments(settings), store)
        gc.freeze()  # these checks imported more of torch
        costs = estimate(chosen, Store(store))
    finally:
        gc.unfreeze()
    if as_json:
        print(json.dumps(costs))
    else:
        print_costs(costs)
        print_advice(cheaper(costs, chosen))


def checked(
    chosen: list[tuple[str, Experiment]], store: Path, devices: int | None = None
) -> list[tuple[str, Experiment]]:
    """Return experiments after refusing everything that can be refused without computing."""
    check_machine(store)
    if lines := problems(chosen) + device_problems(chosen, devices):
        raise ConfigError(lines)
    return chosen


def check_machine(store: Path) -> None:
    """Refuse a device that is not there and a store that cannot be used.

    A finished store may be read-only: a step that is missing there is refused when it is needed.
    """
    check_device()  # first: a store asks for the device
    if not Store(store).exists:
        check_writable("--store", store)


def check_device() -> None:
    try:
        torch.zeros(1, device=default_device())
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"FROSTGLASS_DEVICE names no device of this machine ({reason}): set it to cpu, or "
            "unset it"
        ) from error


def run_folder(out: Path | None, name: str) -> Path:
    """Return the folder of the run; refuse now one that cannot be written after hours of work."""
    folder = out or default_folder(name)
    check_writable("--out", folder)
    if foreign := _foreign_file(folder):
        raise ConfigError(
            f"--out {folder} contains files of something else, such as {foreign}: give a new "
            "folder, or that of an earlier run"
        )
    return folder


def default_folder(name: str) -> Path:
    """Return the folder that the name of a config stands for."""
    if not re.fullmatch(r"\w[\w .+-]*", name):
        raise ConfigError(
            "name: expected letters, digits, spaces, '.', '+' or '-', because it names the run's "
            f"folder; got {name!r}"
        )
    return Path("runs") / name


def _foreign_file(folder: Path) -> str:
    """Return the name of a file that no run wrote; "" if there is none, or beside a whole run."""
    if not folder.is_dir():
        return ""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if set(NUMBERS) <= set(names):
        return ""
    # run.json is the last of the numbers: a killed run leaves the others without it.
    own = {*FILES, *REPORT, ANALYSES} - {"run.json"}
    return next((name for name in names if name not in own), "")


def check_writable(option: str, folder: Path) -> None:
    if not is_writable(folder):
        raise ConfigError(f"{option} {folder} cannot be created or written: give another folder")


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which need not exist yet."""
    place = existing(folder)
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    places = (folder.absolute(), *folder.absolute().parents)
    return next(place for place in places if os.path.lexists(place))
