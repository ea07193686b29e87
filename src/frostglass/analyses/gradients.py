"""The size of the gradient that an attack gets."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.analyses._descent import LossName, Search, people_labels
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, Subject, analyses
from frostglass.auditing.experiment import Experiment
from frostglass.core.parameters import parameters
from frostglass.metrics._stats import interval
from frostglass.runtime.freezing import frozen


def image_gradients(search: Search, images: Tensor) -> Tensor:
    """Return the norm of the gradient of the loss in each image, (N,)."""
    with frozen(search.target.module):
        points = images.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(search.losses(points).sum(), points)
    return slope.flatten(1).norm(dim=1).double().cpu()


@analyses.register
@parameters
class Gradients(AnalysisMethod):
    """Norm of the gradient that an attack gets, over its steps, for each model.

    The search is Adam in the latents of the config's prior. The norm is that of the loss's gradient
    in the image. With heads of several activations in the grid (calor.activation) it compares
    these: a saturating one passes less.

    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814,
        Figure 6: part of CALoR's effect is that tanh attenuates gradients.
    Differs: loss and place of the gradient are our choice: cross-entropy unless loss says
        otherwise, in the image.

    Args:
        people: attacked people, from the first on. steps: steps at which the norm is measured.
        loss, lr: of the search.
    """

    people: Annotated[int, Field(ge=2)] = 10
    steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (
        0, 10, 20, 40, 80,
    )  # fmt: skip
    loss: LossName = "ce"
    lr: Annotated[float, Field(gt=0)] = 0.05

    title = "gradients of the attack"
    surfaces: ClassVar[frozenset[str]] = frozenset({"model"})

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        return [
            f"people: expected at most {count}, the private people of the data, got {self.people}"
            for count in sorted({experiment.data.counts()[0] for experiment in chosen})
            if self.people > count
        ]

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        curves = []
        for subject in context.subjects:
            own = self.measured(subject)
            rows += [(subject.label, *row) for row in own]
            steps, norms, low, high, _ = (tuple(column) for column in zip(*own, strict=True))
            curves.append(Curve(subject.label, steps, norms, low, high))
        head = ("model", "step", "gradient norm", "low", "high", "confidence")
        positive = all(value > 0 for curve in curves for value in curve.low)
        figure = Figure(
            "Gradient that the attack gets",
            Axis("step of the search →"),
            Axis("norm of the gradient in the image", log=positive),
            tuple(curves),
        )
        return Analysis((Table("gradients", head, tuple(rows)),), (figure,))

    def measured(self, subject: Subject) -> list[tuple[float, float, float, float, float]]:
        """Return step, mean norm with its interval, and mean confidence."""
        target = subject.target
        labels = people_labels(target, self.people, len(subject.split.classes))
        search = Search(target, subject.prior, labels, self.loss, self.lr)
        result = []
        for step, latents in search.visit(search.start(subject.experiment.seed), self.steps):
            with torch.no_grad():
                images = search.images(latents)
                logits = target.module(target.fit(images))
            norms = image_gradients(search, images)
            sure = logits.softmax(1).gather(1, labels[:, None]).mean().item()
            result.append((float(step), norms.mean().item(), *interval(norms), sure))
        return result
