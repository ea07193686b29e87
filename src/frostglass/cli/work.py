"""What the commands do: set up, call the library, print."""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from frostglass.audit.catalogue import KINDS, describe, entries
from frostglass.audit.config import Experiment, experiments
from frostglass.audit.features import is_about_features
from frostglass.audit.grid import A, Run, run_all, summary, versions, write_run
from frostglass.cli.progress import Bars
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.registry import nearest
from frostglass.networks.stylegan2.nvidia import KIND, convert_stylegan2
from frostglass.plan.cost import estimate, problems
from frostglass.report.build import build_report
from frostglass.report.runs import FILES
from frostglass.runtime.device import default_device
from frostglass.runtime.memory import keep_freed_memory
from frostglass.store.store import Store


def demo_settings() -> dict[str, Any]:
    """The config of the demo, which ships with the package."""
    import tomllib

    return tomllib.loads(resources.files("frostglass.audit").joinpath("demo.toml").read_text())


def prepare(threads: int | None) -> None:
    """What this process does before long work."""
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
    redact: bool,
) -> None:
    """Run a config, write its run folder and report, print the scores; fails when an audit proves nothing."""
    if is_about_features(settings):
        from frostglass.cli.features import run_feature_settings

        run_feature_settings(settings, store, out, as_json=as_json, threads=threads, redact=redact)
        return
    prepare(threads)
    folder = run_folder(out, _ready(settings, store)[0][1].name)
    with Bars() as bars:
        result = run_all(settings, Store(store, listener=bars))
    conclude(
        result, folder, store, write_run, summary, _print_scores, as_json=as_json, redact=redact
    )


def conclude(
    result: Run[A],
    folder: Path,
    store: Path,
    write: Callable[[Run[A], Path], Path],
    summarise: Callable[[Run[A]], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    *,
    as_json: bool,
    redact: bool,
) -> None:
    """Write what a run of any kind found, with its report, and print it; fails when an audit failed or proves nothing."""
    try:
        write(result, folder)
    except OSError as error:
        raise RunError(
            f"cannot write {folder} ({error.strerror}): what was computed is in {store}; give another --out"
        ) from error
    page = build_report([folder], folder / "report.html", redact=redact)
    facts = summarise(result)
    if as_json:
        print(json.dumps(facts | {"report": str(page)}))
    else:
        show(facts)
        print(f"report: {page}")
    if result.failed or result.vacuous:
        raise RunError(
            "; ".join(
                [
                    *(f"FAILED: {reason}" for reason in result.failed),
                    *(f"VACUOUS: {reason}" for reason in result.vacuous),
                ]
            )
        )


def _ready(settings: dict[str, Any], store: Path) -> list[tuple[str, Experiment]]:
    """The experiments of a config, after everything that can be refused without computing has been."""
    chosen = experiments(settings)
    check_machine(store)
    if found := problems(chosen):
        raise ConfigError(found)
    return chosen


def check_machine(store: Path) -> None:
    """Refuse a store that cannot be used, and a device that is not there."""
    Store(store)
    check_writable("--store", store)
    check_device()


def check_device() -> None:
    try:
        torch.zeros(1, device=default_device())
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"FROSTGLASS_DEVICE names no device of this machine ({reason}): set it to cpu, or leave it out"
        ) from error


def run_folder(out: Path | None, name: str) -> Path:
    """Where the run goes; refused now if it cannot be written, and not after hours of work."""
    if out is None and not re.fullmatch(r"\w[\w .+-]*", name):
        raise ConfigError(
            f"name: expected letters, digits, spaces, '.', '+' or '-', because the run's folder is named so; got {name!r}"
        )
    folder = out or Path("runs") / name
    check_writable("--out", folder)
    if strange := _not_of_a_run(folder):
        raise ConfigError(
            f"--out {folder} holds other things than a run, such as {strange}: give a new folder, or that of an earlier run"
        )
    return folder


def _not_of_a_run(folder: Path) -> str:
    """The name of something in a folder that no run wrote; "" if there is nothing, or if it lies beside a whole run."""
    names = (
        sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if folder.is_dir()
        else []
    )
    if set(FILES) <= set(names):
        return ""
    return next(
        (name for name in names if name not in FILES or name == "run.json"), ""
    )  # that comes last; what a killed run left has none


def check_writable(option: str, folder: Path) -> None:
    if not _writable(folder):
        raise ConfigError(f"{option} {folder} cannot be made or written: give a folder of your own")


def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself, which need not exist yet."""
    place = _existing(folder)
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(
        place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place)
    )


def _print_scores(facts: dict[str, Any]) -> None:
    judges = [f"top1_{number}" for number in range(1, len(facts["evaluators"]) + 1)]
    table = Table(
        title=f"{facts['name']}: {len(facts['identities'])} people attacked", title_justify="left"
    )
    for column in (
        "audit",
        "accuracy",
        *(f"judge {number} (95 % interval)" for number in range(1, len(judges) + 1)),
        "prior only",
        "target",
        "queries",
        "seconds",
    ):
        # A long label wraps; a figure never loses a digit.
        table.add_column(
            column,
            justify="left" if column == "audit" else "right",
            no_wrap=column != "audit",
            overflow="fold",
        )
    for audit in facts["audits"]:
        scores = audit["scores"]
        table.add_row(
            audit["label"],
            f"{audit['target']['accuracy']['test']:.1%}",
            *(with_interval(scores[judge]) for judge in judges),
            " ".join(f"{audit['prior_only'][judge]['value']:.1%}" for judge in judges),
            f"{scores['target_top1']['value']:.1%}",
            f"{audit['queries']:,}",
            f"{audit['seconds']:.0f}",
        )
    console(130).print(table)
    accuracy = ", ".join(f"{e['model']} {e['accuracy']['test']:.1%}" for e in facts["evaluators"])
    print(
        "judge N: rebuilt people it recognises; prior only: the same for blind draws; target: pictures the attacked model itself accepts"
    )
    print(f"judges' own accuracy on held-out pictures: {accuracy}")
    for audit in facts["audits"]:
        for warning in audit["controls"]["warnings"]:
            print(f"note ({audit['label']}): {warning}")


def console(width: int) -> Console:
    """Stdout, at least this wide; brackets and colons in a user's names mean nothing to it."""
    return Console(width=max(width, Console().width), markup=False, emoji=False, highlight=False)


def with_interval(score: dict[str, float]) -> str:
    return f"{score['value']:.1%} ({score['low']:.1%} to {score['high']:.1%})"


def check_settings(settings: dict[str, Any], store: Path, *, as_json: bool) -> None:
    """Parse a config and estimate its cost; a config with problems raises them all."""
    prepare(None)
    if is_about_features(settings):
        from frostglass.cli.features import check_feature_settings

        check_feature_settings(settings, store, as_json=as_json)
        return
    print_costs(estimate(_ready(settings, store), Store(store)), as_json=as_json)


def print_costs(costs: dict[str, Any], *, as_json: bool) -> None:
    """What a config would run, how long that takes and how much memory."""
    if as_json:
        print(json.dumps(costs))
        return
    table = Table(title="what this config would run", title_justify="left")
    for column in ("step", "for", "work", "about"):
        table.add_column(column, justify="right" if column == "about" else "left")
    for row in costs["steps"]:
        table.add_row(
            row["step"],
            row["label"],
            row["work"],
            "done" if row["done"] else _duration(row["seconds"]),
        )
    console(110).print(table)
    unknown = costs["memory_unknown"]
    where = f" ({costs['memory_step']})" if costs["memory_step"] else ""
    memory = f"{'at least' if unknown else 'about'} {costs['memory_mib'] / 1024:.1f} GiB of memory{where}"
    print(f"no problems; about {_duration(costs['seconds'])} on this machine, {memory}")
    if unknown:
        print(f"how much more memory is not known: {unknown}")


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def list_kind(kind: str | None, *, as_json: bool) -> None:
    found = [entry for each in ([kind] if kind else KINDS) for entry in entries(each)]
    if as_json:
        print(json.dumps(found))
        return
    if kind is None:
        for each in KINDS:
            print(
                f"{each:<16} {', '.join(entry['name'] for entry in found if entry['kind'] == each)}"
            )
        print("frostglass list KIND says what each is, frostglass show NAME all about one")
        return
    for entry in found:
        print(f"{entry['name']:<16} {entry['summary']}")
    if kind == "models":
        print(
            "timm:NAME        any classifier of timm\ntorchvision:NAME any classifier of torchvision\nMODULE:FUNCTION  a function of your own"
        )


def show_method(name: str, *, as_json: bool) -> None:
    facts = describe(name)
    if as_json:
        print(json.dumps(facts, default=str))
        return
    print(f"{facts['name']} ({facts['kind']}, {facts['file']})\n\n{facts['text']}")
    if facts["parameters"]:
        print("\nParameters:")
        for parameter in facts["parameters"]:
            given = "" if parameter["required"] else f" = {parameter['default']!r}"
            print(
                f"  {parameter['name']}{given}  ({parameter['type']}{', required' if parameter['required'] else ''})"
            )
    if facts["arguments"]:
        print("\n" + facts["arguments"])
    if facts["variants"]:
        print('\nVariants, for example variant = "' + facts["variants"][0]["name"] + '":')
        for variant in facts["variants"]:
            sets = ", ".join(
                f"{name} = {json.dumps(value)}" for name, value in variant["sets"].items()
            )
            print(f"  {variant['name']:<13} {variant['why']} ({sets})")


def convert_weights(kind: str, source: Path, out: Path, *, force: bool, as_json: bool) -> None:
    """Write the averaged generator of a published pickle as safetensors, and say what it is."""
    if kind != KIND:
        raise ConfigError(f"no conversion named {kind!r}: {nearest(kind, [KIND])}")
    generator = convert_stylegan2(source, out, force=force)
    made, count = generator.settings, sum(parameter.numel() for parameter in generator.parameters())
    if as_json:
        print(json.dumps(asdict(made) | {"parameters": count, "file": str(out)}))
        return
    print(
        f"{out}: StyleGAN2, {made.colours}x{made.resolution}x{made.resolution}, z {made.z_dim}, w {made.w_dim}, "
        f"{made.layers} mapping layers, {made.num_ws} styles, {count:,} parameters"
    )


def diagnose(store: Path, *, as_json: bool) -> None:
    """Facts about this machine, and whether a tiny forward and backward pass works on it."""
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.zeros(1, 3, 16, 16)).sum().backward()
    Store(store)
    check_device()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
        if hasattr(os, "sysconf")
        else None,
        "free_disk_gib": round(shutil.disk_usage(_existing(store)).free / 2**30, 1),
        "cuda": torch.cuda.is_available(),
        "device": str(default_device()),
        "store": str(store),
        "store_writable": _writable(store),
        "terminal": sys.stderr.isatty(),
    }
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name:<15} {shown}")
