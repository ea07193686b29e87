"""Frostglass: train image models that cannot be inverted, and prove it by attacking them.

Public names are imported on first use, because importing torch takes seconds.
"""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.analyses._result import Analysis
    from frostglass.analyses.base import AnalysisMethod, analyze
    from frostglass.attacks.base import Attack, invert, prior_only
    from frostglass.auditing.experiment import Experiment, experiments
    from frostglass.auditing.own_model import audit_model
    from frostglass.auditing.pipeline import audit
    from frostglass.auditing.results import Audit
    from frostglass.auditing.run import Run, run_all
    from frostglass.auditing.run_folder import write_run
    from frostglass.auditing.ship import release_folder, ship
    from frostglass.core.assets import Assets
    from frostglass.core.errors import FrostglassError
    from frostglass.core.method import AuditSize, Budget, Method
    from frostglass.core.parameters import parameters
    from frostglass.core.prior import Prior
    from frostglass.core.types import Images, Reconstructions, Split, Target
    from frostglass.core.views import FeatureView, ModelView
    from frostglass.data._splits import make_split
    from frostglass.data.base import Dataset
    from frostglass.defenses.base import Defense
    from frostglass.deploy.client import Client, split_model
    from frostglass.deploy.server import Server
    from frostglass.evaluators.embedder import Embedder, read_embedder
    from frostglass.evaluators.verifier import Verifier, enrol
    from frostglass.hardening.harden import harden
    from frostglass.metrics.base import Evidence, Metric, Rows, Score, measure
    from frostglass.models.cut import cut
    from frostglass.models.wrap import wrap
    from frostglass.plan.estimate import estimate
    from frostglass.plan.problems import problems
    from frostglass.priors._files import read_prior, write_prior
    from frostglass.priors.base import PriorMethod
    from frostglass.report.build import build_report
    from frostglass.robustness.base import Threat
    from frostglass.store.files import Work
    from frostglass.store.store import Store
    from frostglass.training.examine import examine
    from frostglass.training.loop import train_target
    from frostglass.training.settings import Training

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
