"""The halves of a split model, to ship."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.deploy.client import Client, split_model
    from frostglass.deploy.server import Server

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
