"""The ranks of trained heads."""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.models.taps import STEPS
from frostglass.runtime.hooks import ReplacesHead


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix, the largest first."""
    matrix = matrix.double().cpu()
    if not bool(matrix.isfinite().all()):
        raise RunError("the head has weights that are not finite: its rank is undefined")
    return torch.linalg.svdvals(matrix)


def numeric_rank(values: Tensor, shape: tuple[int, int], tolerance: float | None = None) -> int:
    """Count singular values above a tolerance; by default that of a matrix in single precision."""
    least = max(shape) * torch.finfo(torch.float32).eps if tolerance is None else tolerance
    return int((values > least * values[0]).sum()) if values[0] > 0 else 0


def effective_rank(values: Tensor) -> float:
    """Return exp of the entropy of the normalised singular values: equal ones count 1 each."""
    share = values[values > 0] / values.sum()
    return math.exp(-(share * share.log()).sum().item()) if len(share) else 0.0


def head_parts(target: Target) -> dict[str, Tensor]:
    """Return the matrices of the head: one, or several where a defense replaced it."""
    modules = dict(target.module.named_modules())
    replaced = [
        name
        for name, part in modules.items()
        if isinstance(part, ReplacesHead) and part.replaces_head
    ]
    scopes = {name: modules[name] for name in replaced or [target.head]}
    found = {
        f"{name}.{inner}".strip("."): layer.weight.detach().flatten(1)
        for name, scope in scopes.items()
        for inner, layer in scope.named_modules()
        if isinstance(layer, STEPS)
    }
    if not found:
        raise RunError(f"the head {target.head!r} has no linear layer: its rank is undefined")
    return found


@analyses.register
@parameters
class HeadRanks(AnalysisMethod):
    """Matrix rank of each trained head, its effective rank and its singular values.

    Only targets are trained; nothing is attacked. A head that a defense put in has several linear
    layers, each in a row of its own. The effective rank is exp of the entropy of the normalised
    singular values.

    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814,
        Table 19: every head has full rank (512, MID 256) but CALoR's two, which have rank 30.
    Differs: the effective rank is not in the paper. For the rank sweep of Table 18 see rank_sweep.

    Args:
        tolerance: singular values below this share of the largest count as zero; by default the
            rounding of single precision times the larger side.
    """

    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None

    title = "ranks of heads"

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        curves = []
        for subject in context.subjects:
            accuracy = subject.target.info["accuracy"]["test"]
            for name, matrix in head_parts(subject.target).items():
                values = singular_values(matrix)
                outputs, inputs = matrix.shape
                rank = numeric_rank(values, (outputs, inputs), self.tolerance)
                size = (inputs, outputs, rank, effective_rank(values))
                rows.append((subject.label, name, *size, accuracy))
                share = values[: max(rank, 1)] / values[0].clamp(min=1e-300)
                places = tuple(range(1, len(share) + 1))
                curves.append(Curve(f"{subject.label}: {name}", places, tuple(share.tolist())))
        head = ("model", "layer", "inputs", "outputs", "rank", "effective rank", "accuracy")
        figure = Figure(
            "Singular values of heads",
            Axis("singular value, the largest first →"),
            Axis("relative to the largest", log=bool(all(min(c.y) > 0 for c in curves))),
            tuple(curves),
        )
        return Analysis((Table("ranks of heads", head, tuple(rows)),), (figure,))
