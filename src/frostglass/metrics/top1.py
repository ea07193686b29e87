"""Whom the classifiers among the evaluators name for a reconstruction."""

from typing import ClassVar

from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.metrics.accuracy import evaluator_hits
from frostglass.metrics.base import Evidence, Metric, metrics


@metrics.register
@parameters
class Top1(Metric):
    """Which of the private people does a classifier name for a reconstruction?

    Columns `top1_N`, `top5_N` by each evaluator N, as in `accuracy`, but without the target's own
    columns: those need a target that classifies people, and this metric also works for targets that
    classify attributes. Whatever comes in, some person is named: `verification` says whether the
    reconstruction would be taken for that person. With five people or fewer, top-5 is always 1 and
    says nothing.

    Use: features, as `accuracy` on models. It is no recognition.
    Paper: Wang et al., Crafter, NDSS 2024, arXiv 2401.07205, where an identity oracle's top-1
    accuracy on reconstructions is called Eval Acc.
    """

    title: ClassVar[str] = "Top-1"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        if not evidence.evaluators:
            raise ConfigError("top1 needs at least one evaluator, got none. Add one.")
        return evaluator_hits(evidence)
