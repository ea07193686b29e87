"""Frostglass: train image models that cannot be inverted, and prove it by attacking them.

The public names are imported on first use, because torch takes seconds.
"""

import importlib
from typing import Any

_HOMES = {
    "Attack": "frostglass.attacks.base",
    "Audit": "frostglass.audit.pipeline",
    "Defense": "frostglass.defenses.base",
    "Experiment": "frostglass.audit.config",
    "Prior": "frostglass.priors.base",
    "Reconstructions": "frostglass.core.types",
    "Score": "frostglass.metrics.base",
    "Split": "frostglass.core.types",
    "Store": "frostglass.store.store",
    "Target": "frostglass.core.types",
    "ModelView": "frostglass.core.views",
    "invert": "frostglass.attacks.base",
    "make_split": "frostglass.data._splits",
    "run": "frostglass.audit.pipeline",
    "wrap": "frostglass.models.wrap",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"frostglass has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
