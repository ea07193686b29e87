"""Confidence against leakage."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from frostglass.analyses._audits import (
    LeakageAnalysis,
    grouped,
    log_likelihood,
    score_cells,
    scored_curve,
    vacuous_notes,
)
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import Context, analyses
from frostglass.analyses.fsim_utility import strength_free
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.metrics._stats import interval
from frostglass.metrics.base import outputs


def mean_confidence(target: Target, images: Images) -> float:
    """Return the mean probability of the true class of labelled images."""
    logits, _ = outputs(target, images)
    return log_likelihood(logits, images.labels).exp().mean().item()


def success_by_confidence(
    confidence: Tensor, success: Tensor, bins: int
) -> list[tuple[float, int, float, float, float]]:
    """Return mean confidence, count, and mean success with its interval, in bins of equal count."""
    order = confidence.argsort(stable=True)
    rows = []
    for index in order.tensor_split(min(bins, len(order))):
        share = success[index].double()
        middle = confidence[index].double().mean().item()
        rows.append((middle, len(index), share.mean().item(), *interval(share)))
    return rows


@analyses.register
@parameters
class Confidence(LeakageAnalysis):
    """Does a more confident model leak more, and is a more confident reconstruction better?

    The first table and figure have a point for each model of the grid: the mean probability of the
    true class on held-out images, and the share recognised. The second have the reconstructions
    of all models in bins of equal count by the confidence of the attacked model. Intervals of bins
    are over reconstructions: if attack.keep is above 1, those of one person are not independent,
    and the intervals are too narrow.

    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814,
        Figures 3 and 8: its premise is that a less confident model leaks less.
    Differs: what varies the confidence is the config's grid, such as CALoR with several b.

    Args:
        bins: of reconstructions.
    """

    bins: Annotated[int, Field(ge=1)] = 5

    title = "confidence and leakage"

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        binned: list[tuple[Cell, ...]] = []
        curves, by_bin = [], []
        for name, members in grouped(context.subjects, strength_free).items():
            points = []
            for subject in members:
                sure = mean_confidence(subject.target, subject.split.test)
                score = self.score_of(subject)
                accuracy = subject.target.info["accuracy"]["test"]
                rows.append((subject.label, sure, accuracy, *score_cells(score)))
                points.append((sure, score))
                likelihood, success = self.reconstructions(subject)
                bins = success_by_confidence(likelihood.exp(), success, self.bins)
                binned += [(subject.label, *each) for each in bins]
                by_bin.append(_curve(subject.label, bins))
            curves.append(scored_curve(name, points, joined=len(points) > 1))
        head = ("model", "confidence", "accuracy", self.score, "low", "high")
        bin_head = ("model", "confidence", "reconstructions", self.score, "low", "high")
        models = Axis("mean confidence on held-out images →")
        images = Axis("confidence of the model in a reconstruction →")
        return Analysis(
            (
                Table("models", head, tuple(rows)),
                Table("reconstructions by confidence", bin_head, tuple(binned)),
            ),
            (
                Figure("Leakage against confidence of models", models, self.axis, tuple(curves)),
                Figure(
                    "Leakage by confidence of reconstructions", images, self.axis, tuple(by_bin)
                ),
            ),
            vacuous_notes(context.subjects),
        )


def _curve(name: str, bins: list[tuple[float, int, float, float, float]]) -> Curve:
    x, _, y, low, high = (tuple(column) for column in zip(*bins, strict=True))
    return Curve(name, x, y, low, high)
