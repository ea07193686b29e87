"""The likelihood of successful and failed reconstructions."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.analyses._audits import LeakageAnalysis, vacuous_notes
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import Context, analyses
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters


def shares_in_bins(values: Tensor, edges: Tensor) -> Tensor:
    """Return the share of values in each bin [edge, next edge); the last has its upper edge too."""
    place = (torch.bucketize(values, edges, right=True) - 1).clamp(0, len(edges) - 2)
    return torch.bincount(place, minlength=len(edges) - 1).double() / len(values)


@analyses.register
@parameters
class Likelihood(LeakageAnalysis):
    """How likely the model finds reconstructions that succeed, and those that fail.

    ln p(y|x) under the attacked model, of reconstructions that the evaluator accepts and of those
    that it does not. Where both are as likely, the model no longer says which reconstruction is
    right: a search that climbs the likelihood gains nothing.

    Paper: Ho et al., Model Inversion Robustness: Can Transfer Learning Help? (TL-DMI), CVPR 2024,
        arXiv 2405.05588, Figures 6 and 7.
    Differs: success is decided by the audit's evaluator, not by a classifier's top-1 alone, unless
        score says so. The table has the probability that a successful reconstruction is the
        likelier of two (AUC), which is not in the paper.

    Args:
        bins: of the histogram.
    """

    bins: Annotated[int, Field(ge=2)] = 12

    title = "likelihood of reconstructions"

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        figures, notes = [], []
        for subject in context.subjects:
            values, success = self.reconstructions(subject)
            sides = {"successful": values[success], "failed": values[~success]}
            counts = [len(part) for part in sides.values()]
            means = [part.mean().item() if len(part) else None for part in sides.values()]
            rows.append((subject.label, *counts, *means, ordering(*sides.values())))
            notes += [
                f"{subject.label}: no reconstruction is {name}"
                for name, part in sides.items()
                if not len(part)
            ]
            figures.append(self.histogram(subject.label, sides))
        head = (
            "model", "successful", "failed", "mean ln p of successful", "mean ln p of failed",
            "AUC",
        )  # fmt: skip
        table = Table("likelihood of reconstructions", head, tuple(rows))
        return Analysis((table,), tuple(figures), (*vacuous_notes(context.subjects), *notes))

    def histogram(self, label: str, sides: dict[str, Tensor]) -> Figure:
        low = min(part.min().item() for part in sides.values() if len(part))
        edges = torch.linspace(min(low, -1e-3), 0.0, self.bins + 1, dtype=torch.double)
        middles = tuple(((edges[1:] + edges[:-1]) / 2).tolist())
        curves = [
            Curve(name, middles, tuple(shares_in_bins(part, edges).tolist()))
            for name, part in sides.items()
            if len(part)
        ]
        across = Axis("ln p(y|x) of the reconstruction →")
        upward = Axis("share of reconstructions →", percent=True)
        return Figure(f"Likelihood of reconstructions: {label}", across, upward, tuple(curves))


def ordering(higher: Tensor, lower: Tensor) -> float | None:
    """Return how often a value of the first is above one of the second; ties count half."""
    if higher.isnan().any() or lower.isnan().any():
        raise ConfigError("the likelihood of some reconstructions is NaN: audit another model")
    if not len(higher) or not len(lower):
        return None
    gap = higher[:, None] - lower
    return ((gap > 0).double() + 0.5 * (gap == 0).double()).mean().item()
