"""What a config would run, how long that takes on this machine, and how much memory."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import produce
from frostglass.auditing.steps import SPLIT
from frostglass.core.errors import ConfigError, FrostglassError
from frostglass.models.base import MODEL_ERRORS
from frostglass.plan.dry_run import DryRunStore, Planned
from frostglass.plan.ledger import MIB, Cost, Ledger
from frostglass.plan.memory import advice, machine_memory, memory_problems, process_memory
from frostglass.plan.time import remembered, this_machine
from frostglass.runtime.seeding import seeded
from frostglass.store.executor import Assignment
from frostglass.store.keys import digest, fingerprint, plain
from frostglass.store.manifest import MANIFEST
from frostglass.store.store import Store

NOT_ESTIMATED = ("harden", "robustness", "analyze")  # other commands that compute
CONTROLS = 1.0  # seconds per audit for what is not stored: controls and bootstrap intervals


def estimate(chosen: Sequence[tuple[str, Experiment]], store: Store) -> dict[str, Any]:
    """Dry-run all experiments; return their steps, seconds and peak memory as plain values.

    That is what `frostglass run` computes; `not_estimated` names other commands. `memory_unknown`
    says why memory and seconds may be larger: what could not be dry-run. Raises ConfigError if the
    run needs more memory than the machine has. A store remembers the dry run.
    """
    base, machine = process_memory(), this_machine(store.root)
    result = remembered(store.root, lambda: _key(chosen, store), lambda: _planned(chosen, store))
    rows = []
    for step in result["steps"]:
        done = (store.root / step["step"] / step["key"] / MANIFEST).is_file()
        seconds = 0.0 if done else machine.seconds(Cost(**step["cost"]))
        row = {name: step[name] for name in ("step", "label", "key", "work")}
        rows.append(row | {"done": done, "seconds": seconds})
    done = not result["unknown"] and all(row["done"] for row in rows)
    controls = {"step": "controls", "label": "each audit", "key": "", "done": done}
    controls |= {"work": f"{len(chosen)} audits", "seconds": 0 if done else CONTROLS * len(chosen)}
    rows.append(controls)
    memory = base + result["memory"]
    if problems := memory_problems(result, memory, machine_memory(store.device)):
        raise ConfigError(problems)
    return {
        "steps": rows,
        "seconds": sum(row["seconds"] for row in rows),
        "memory_mib": memory / MIB,
        "memory_step": result["largest"],
        "memory_unknown": result["unknown"],
        "not_estimated": list(NOT_ESTIMATED),
    }


def memory_of_steps(
    chosen: Sequence[tuple[str, Experiment]], store: Store
) -> Callable[[Assignment], int]:
    """Return a function that estimates the bytes of memory with which a worker makes a step.

    A step that the dry run did not reach is taken for the largest of its kind.
    """
    base = process_memory()
    result = remembered(store.root, lambda: _key(chosen, store), lambda: _planned(chosen, store))
    needed: dict[str, int] = {}
    for step in result["steps"]:
        memory = base + int(step["cost"]["memory"])
        needed[step["key"]] = memory
        needed[step["step"]] = max(memory, needed.get(step["step"], 0))
    return lambda each: needed.get(each.key) or needed.get(each.step, 0)


def _key(chosen: Sequence[tuple[str, Experiment]], store: Store) -> str:
    """Hash what a dry run depends on: experiments, files, stored splits, and the code."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    files: dict[str, Any] = {}
    for _, exp in chosen:
        if (name := f"{exp.data} {exp.split} {exp.seed}") not in files:
            prints = fingerprint(exp.data)
            options: Any = {"fractions": exp.split, "files": prints, "seed": exp.seed}
            files[name] = prints, store.has(SPLIT, exp.data, **options)
        methods = (exp.target, *exp.evaluators, exp.embedder, exp.perceptual, exp.prior)
        for method in (*methods, exp.attacker_prior, *exp.defenses):
            if method is not None and (name := repr(method)) not in files:
                files[name] = fingerprint(method)
    experiments = [plain([label, exp], "experiment", False) for label, exp in chosen]
    return digest(
        {
            "code": [version("frostglass"), torch.__version__, code.hexdigest()],
            "all": experiments,
            "files": files,
        }
    )


def _planned(chosen: Sequence[tuple[str, Experiment]], store: Store) -> dict[str, Any]:
    """Return the result of a dry run as plain values."""
    planned, unknown = dry_run(chosen, store)
    steps = [
        {
            "step": step.task.step.name,
            "label": label,
            "key": step.task.key,
            "work": step.work,
            "cost": asdict(step.cost),
        }
        for label, _, step in planned
    ]
    result = {"steps": steps, "unknown": unknown, "memory": 0, "largest": "", "advice": ""}
    if planned:
        _, exp, step = max(planned, key=lambda entry: entry[2].cost.memory)
        result |= {"memory": step.cost.memory, "largest": step.title, "advice": advice(step, exp)}
    return result


def dry_run(
    chosen: Sequence[tuple[str, Experiment]], store: Store
) -> tuple[list[tuple[str, Experiment, Planned]], str]:
    """Return the steps of all experiments, each once, and why some could not be dry-run."""
    ledger = Ledger()
    dry = DryRunStore(store.root, ledger)
    steps: list[tuple[str, Experiment, Planned]] = []
    with seeded(0, "dry run"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of networks that are never used
        for label, experiment in chosen:
            try:
                with ledger:
                    produce(experiment, dry)
            except (*MODEL_ERRORS, FrostglassError):
                if not dry.unknown:
                    raise
            steps += [
                (label, experiment, step) for step in list(dry.planned.values())[len(steps) :]
            ]
    return steps, dry.unknown
