"""Who a judge says a rebuilt picture shows."""

from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.metrics.accuracy import verdicts
from frostglass.metrics.base import Evidence, metrics


@metrics.register
@parameters
class Recognition:
    """Does a judge recognise the person in a rebuilt picture? Columns `top1_N`, `top5_N` by each evaluator N, as of `accuracy`, whose target columns need a
    target that tells people apart; that of split inference may tell attributes.

    With five people or fewer, top-5 is always 1 and says nothing.

    Paper: Wang et al., Crafter, NDSS 2024, arXiv 2401.07205, where an identity oracle's top-1 accuracy on reconstructions is called Eval Acc.
    """

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        if not evidence.evaluators:
            raise ConfigError(
                "recognition needs at least one evaluator, and there is none: add one"
            )
        return verdicts(evidence)
