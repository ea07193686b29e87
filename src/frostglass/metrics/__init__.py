"""Metrics, scores and the function that measures."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.metrics.accuracy import Accuracy
    from frostglass.metrics.base import Evidence, Metric, Rows, Score, measure, metrics
    from frostglass.metrics.centroid import Centroid
    from frostglass.metrics.distance import Distance
    from frostglass.metrics.face import Face
    from frostglass.metrics.fid import Fid
    from frostglass.metrics.knowledge import Knowledge
    from frostglass.metrics.likeness import Likeness
    from frostglass.metrics.manifold import Manifold
    from frostglass.metrics.outcome import Outcome
    from frostglass.metrics.perceptual import Perceptual
    from frostglass.metrics.pii import Pii
    from frostglass.metrics.prdc import Prdc
    from frostglass.metrics.top1 import Top1
    from frostglass.metrics.verification import Verification

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
