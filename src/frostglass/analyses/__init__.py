"""Analyses of the papers: each explains why a model leaks or does not, as tables and figures."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.analyses._result import Analysis, Axis, Curve, Figure, Table
    from frostglass.analyses.adaptive_epochs import AdaptiveEpochs
    from frostglass.analyses.base import AnalysisMethod, Context, analyses, analyze
    from frostglass.analyses.bottleneck import Bottleneck
    from frostglass.analyses.checkpoints import Checkpoints
    from frostglass.analyses.confidence import Confidence
    from frostglass.analyses.fisher import Fisher
    from frostglass.analyses.fsim_utility import FsimUtility
    from frostglass.analyses.gradients import Gradients
    from frostglass.analyses.head_ranks import HeadRanks
    from frostglass.analyses.layer_dependence import LayerDependence
    from frostglass.analyses.lda_layers import LdaLayers
    from frostglass.analyses.likelihood import Likelihood
    from frostglass.analyses.rank_sweep import RankSweep
    from frostglass.analyses.server_training import ServerTraining
    from frostglass.analyses.toy_world import ToyWorld
    from frostglass.analyses.tsne import Tsne
    from frostglass.analyses.unilateral import Unilateral

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
