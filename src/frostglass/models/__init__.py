"""Networks: the registry of architectures, checkpoints and cuts."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.models.base import models
    from frostglass.models.checkpoint import load_weights, save_weights
    from frostglass.models.cut import halves

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
