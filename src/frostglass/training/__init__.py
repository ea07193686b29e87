"""Train classifiers, undefended or with any defenses."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.training.loop import accuracy, train_target
    from frostglass.training.settings import Training

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
