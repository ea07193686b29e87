"""Analyses of the papers: each explains why a model leaks or does not, as tables and figures."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.analyses.base import (
        Analysis,
        AnalysisMethod,
        Axis,
        Context,
        Curve,
        Figure,
        Table,
        analyses,
        analyze,
    )
    from frostglass.analyses.fisher import Fisher
    from frostglass.analyses.head_ranks import HeadRanks
    from frostglass.analyses.toy_world import ToyWorld

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
