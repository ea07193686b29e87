"""The command `robustness`: check, call the library, print."""

import json
from pathlib import Path
from typing import Any

from frostglass.auditing.experiment import experiments
from frostglass.cli.progress import progress
from frostglass.cli.run import check_machine, check_writable, default_folder, prepare
from frostglass.cli.tables import percent, print_table, with_interval
from frostglass.core.errors import ConfigError, RunError
from frostglass.plan.problems import problems as plan_problems
from frostglass.plan.threads import device_problems
from frostglass.robustness.output import FILES, summary, write_measured
from frostglass.robustness.run import measure_all, problems
from frostglass.store.store import Store


def robustness_settings(
    settings: dict[str, Any],
    store: Path,
    out: Path | None,
    *,
    as_json: bool,
    threads: int | None,
    devices: int | None,
) -> None:
    """Measure the models of a config, write the folder, print the table."""
    prepare(threads)
    check_machine(store)
    chosen = experiments(settings)
    if lines := problems(chosen) or plan_problems(chosen, attacks=False):
        raise ConfigError(lines)
    if lines := device_problems(chosen, devices):
        raise ConfigError(lines)
    folder = _folder(out, chosen[0][1].name)
    with progress() as listener:
        result = measure_all(settings, Store(store, listener=listener, devices=devices))
    try:
        write_measured(result, folder)
    except OSError as error:
        raise RunError(
            f"cannot write {folder} ({error.strerror}): the results are in {store}; give another "
            "--out"
        ) from error
    facts = summary(result)
    if as_json:
        print(json.dumps(facts | {"folder": str(folder)}))
    else:
        print_robustness(facts)
        print(f"numbers: {folder / FILES[0]}")
    if result.failed:
        raise RunError("; ".join(f"FAILED: {reason}" for reason in result.failed))


def _folder(out: Path | None, name: str) -> Path:
    """Return the folder of the run; refuse one with files of something else."""
    folder = out or default_folder(f"{name}-robustness")
    check_writable("--out", folder)
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    if foreign := sorted(name for name in names if name[0] != "." and name not in FILES):
        raise ConfigError(
            f"--out {folder} contains files of something else, such as {foreign[0]}: give a new "
            "folder, or that of an earlier robustness run"
        )
    return folder


def print_robustness(facts: dict[str, Any]) -> None:
    """Print a row per measurement and a column per model, and what the rows mean."""
    models = facts["models"]
    rows = [
        {"": name} | {model["title"]: with_interval(model["rates"][name]) for model in models}
        for name in models[0]["rates"]
    ]
    seeds = len(models[0]["seeds"])
    print_table(f"{facts['name']}: {seeds} seed{'s' * (seeds > 1)}", rows, left=[""])
    print(
        "adversarial examples (95% interval over people and seeds): share of correctly classified "
        "images of which the model then says another class, or the targeted one"
    )
    if rates := {threat["rate"] for threat in facts["threats"].values() if "rate" in threat}:
        print(
            "backdoors: share of images of other classes that the model calls the backdoor's class "
            f"when they have the trigger, after {', '.join(map(percent, sorted(rates)))} of the "
            "training images were poisoned; not poisoned: the same trigger, the clean model"
        )
    counts = (f"{name} {rate['images']}" for name, rate in models[0]["rates"].items())
    print(f"images tried ({models[0]['title']}): {', '.join(counts)}")
