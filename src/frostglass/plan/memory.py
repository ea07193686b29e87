"""Memory of a run: its peak, and what this machine has."""

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from frostglass.auditing.experiment import Experiment
from frostglass.plan.dry_run import Planned
from frostglass.plan.ledger import MIB
from frostglass.runtime.memory import resident

FABRIC = 250 * MIB  # of lightning_fabric, which a training imports; measured


def process_memory() -> int:
    """Return the bytes that a run needs besides its tensors: this process and late imports."""
    return resident() + (0 if "lightning_fabric" in sys.modules else FABRIC)


def machine_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of this machine or its device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_problems(result: Mapping[str, Any], needed: int, there: int | None) -> list[str]:
    """Refuse a run that needs more memory than there is, and name the setting to lower."""
    if there is None or needed <= there:
        return []
    sizes = [f"{size / 1024 / MIB:.1f} GiB" for size in (needed, there)]
    return [
        f"memory: {result['largest']} needs about {sizes[0]}, this machine has {sizes[1]}. "
        f"{result['advice']}"
    ]


def advice(step: Planned, exp: Experiment) -> str:
    """Say how a step would need less memory."""
    batch = getattr(step.task.config, "batch", None)
    if batch is None:
        return "Use smaller images or a smaller model."
    return f"Lower {_section(exp, step.task.config)}.batch, which is {batch}."


def _section(exp: Experiment, config: Any) -> str:
    """Return where a config is set; what is set nowhere belongs to the attack."""
    for name in (field.name for field in fields(exp)):
        value = getattr(exp, name)
        if value == config:
            return name
        if isinstance(value, tuple) and config in value:
            return f"{name}[{value.index(config)}]"
    return "attack"
