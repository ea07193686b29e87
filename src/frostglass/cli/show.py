"""The commands `list`, `show`, `convert` and `doctor`."""

import json
import os
import platform
import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from frostglass.auditing.run_folder import versions
from frostglass.cli.catalogue import EXAMPLE_WORDS, KINDS, PAPERS, attackers_of, describe, entries
from frostglass.cli.main import raise_on_interrupt
from frostglass.cli.papers import show_table
from frostglass.cli.run import check_device, existing, is_writable
from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest
from frostglass.networks.stylegan2.nvidia import KIND, convert_stylegan2
from frostglass.published import reading as published
from frostglass.runtime.device import default_device
from frostglass.runtime.environment import kernels
from frostglass.store.store import Store

COLUMNS, INDENT = 100, " " * 6  # of what a parameter means
HANGING: Any = {"subsequent_indent": INDENT, "break_long_words": False, "break_on_hyphens": False}
MODEL_SOURCES = """\
timm:NAME        any classifier of timm
torchvision:NAME any classifier of torchvision
MODULE:FUNCTION  a function of your own"""


def list_kind(kind: str | None, *, as_json: bool) -> None:
    """Print all methods, or those of one kind."""
    rows = [entry for each in ([kind] if kind else [*KINDS, PAPERS]) for entry in entries(each)]
    if as_json:
        print(json.dumps(rows))
        return
    if kind is None:
        for each in (*KINDS, PAPERS):
            names = ", ".join(row["name"] for row in rows if row["kind"] == each)
            print(f"{each:<10} {names}")
        print("what each is: frostglass list KIND; one in full: frostglass show NAME")
        return
    for row in rows:
        surface = f"[{row['surface']}] " if "surface" in row else ""
        print(f"{row['name']:<16} {surface}{row['summary']}")
    if kind == "models":
        print(MODEL_SOURCES)


def show_method(name: str, *, as_json: bool) -> None:
    """Print a method with its parameters, paper and deviations; or a published table."""
    if name in published.names():
        show_table(published.table(name), as_json=as_json)
        return
    facts = describe(name)
    if as_json:
        print(json.dumps(facts, default=str))
        return
    print(f"{facts['name']} ({facts['kind']}, {facts['file']})\n\n{facts['text']}")
    if facts["cost"] and "Cost: " not in facts["text"]:
        print(f"\nCost at the defaults ({EXAMPLE_WORDS}): {facts['cost']}")
    if known_by := attackers_of(facts):
        line = f"Attackers who know it: {known_by}."
        print("\n" + textwrap.fill(line, COLUMNS, subsequent_indent="    "))
    if facts["parameters"]:
        print("\nParameters:")
        for one in facts["parameters"]:
            value = "" if one["required"] else f" = {one['default']!r}"
            required = ", required" if one["required"] else ""
            print(f"  {one['name']}{value}  ({one['type']}{required})")
            if meaning := facts["meanings"].get(one["name"]):
                print(textwrap.fill(meaning, COLUMNS, initial_indent=INDENT, **HANGING))
    if facts["variants"]:
        print(f'\nVariants, for example variant = "{facts["variants"][0]["name"]}":')
        for one in facts["variants"]:
            sets = ", ".join(f"{key} = {json.dumps(value)}" for key, value in one["sets"].items())
            print(f"  {one['name']:<13} {one['why']} ({sets})")


def convert_weights(kind: str, source: Path, out: Path, *, force: bool, as_json: bool) -> None:
    """Write the averaged generator of a published pickle as safetensors, and describe it."""
    if kind != KIND:
        raise ConfigError(f"no conversion named {kind!r}: {nearest(kind, [KIND])}")
    raise_on_interrupt()
    generator = convert_stylegan2(source, out, force=force)
    settings = generator.settings
    count = sum(parameter.numel() for parameter in generator.parameters())
    if as_json:
        print(json.dumps(asdict(settings) | {"parameters": count, "file": str(out)}))
        return
    print(
        f"{out}: StyleGAN2, {settings.colours}x{settings.resolution}x{settings.resolution}, "
        f"z {settings.z_dim}, w {settings.w_dim}, {settings.layers} mapping layers, "
        f"{settings.num_ws} styles, {count:,} parameters"
    )


def diagnose(store: Path, *, as_json: bool) -> None:
    """Print facts about this machine, after a tiny forward and backward pass."""
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.zeros(1, 3, 16, 16)).sum().backward()
    check_device()
    Store(store)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "memory_gib": _memory_gib(),
        "free_disk_gib": round(shutil.disk_usage(existing(store)).free / 2**30, 1),
        "cuda": torch.cuda.is_available(),
        "device": str(default_device()),
        "store": str(store),
        "store_writable": is_writable(store),
        "terminal": sys.stderr.isatty(),
    }
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:<15} {text}")


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError):  # not POSIX
        return None
