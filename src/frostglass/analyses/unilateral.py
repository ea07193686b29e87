"""Unilateral dependence: what it costs to make outputs independent of images."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, Subject, analyses
from frostglass.auditing.experiment import Experiment
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.defenses.training._dependence import MeasureName, gaussian_gram, measure
from frostglass.defenses.training.bido import Bido
from frostglass.metrics.base import outputs


def output_dependence(target: Target, images: Images, name: MeasureName, batch: int) -> float:
    """Return the mean over batches of d(X, Ŷ) between images and logits."""
    logits, _ = outputs(target, images)
    order = torch.arange(len(images))
    parts = [part for part in order.split(batch) if len(part) == batch]
    if not parts:
        raise ConfigError(
            f"batch: expected at most {len(images)}, the held-out images, got {batch}"
        )
    dependence = measure(name)
    values = [
        dependence(gaussian_gram(images.floats(part)), gaussian_gram(logits[part]))
        for part in parts
    ]
    return torch.stack(values).mean().item()


def image_weight(experiment: Experiment) -> float:
    """Return the weight of BiDO's dependence on the image; 0 without BiDO."""
    return sum(each.lambda_x for each in experiment.defenses if isinstance(each, Bido))


@analyses.register
@parameters
class Unilateral(AnalysisMethod):
    """Accuracy, and dependence of outputs on images, against the weight of that dependence alone.

    The config's grid lists bido with lambda_y = 0, layers = [the head] and several lambda_x: the
    loss is cross-entropy + λ d(X, Ŷ). Only targets are trained; nothing is attacked.

    Paper: Peng et al., Bilateral Dependency Optimization: Defending Against Model-inversion
        Attacks, KDD 2022, arXiv 2206.05483, Figure 1: with COCO the accuracy is about 85 % at
        λ = 5 and 0.15 % at λ = 20, which is why BiDO adds a second term.

    Args:
        measure: the dependence d, as in bido. batch: images it is measured on at once.
    """

    measure: MeasureName = "coco_frobenius"
    batch: Annotated[int, Field(ge=4)] = 64

    title = "unilateral dependence"
    surfaces: ClassVar[frozenset[str]] = frozenset({"model"})

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        terms = [each for exp in chosen for each in exp.defenses if isinstance(each, Bido)]
        if len({each.lambda_x for each in terms}) < 2:
            return ["expected bido with several lambda_x in grid.defenses, got fewer than two"]
        return [
            f"bido.lambda_y: expected 0, because the dependence is unilateral, got {value}"
            for value in sorted({each.lambda_y for each in terms} - {0.0})
        ]

    def run(self, context: Context) -> Analysis:
        subjects = sorted(context.subjects, key=lambda subject: image_weight(subject.experiment))
        rows: list[tuple[Cell, ...]] = [self.row(subject) for subject in subjects]
        weights = tuple(float(image_weight(subject.experiment)) for subject in subjects)
        head = ("model", "lambda", "accuracy", "d(X, Y^)")
        accuracy = Curve("accuracy", weights, tuple(row[2] for row in rows))  # type: ignore[misc]
        apart = Curve("d(X, Ŷ)", weights, tuple(row[3] for row in rows))  # type: ignore[misc]
        across = Axis("weight of d(X, Ŷ) in the loss →")
        return Analysis(
            (Table("unilateral dependence", head, tuple(rows)),),
            (
                Figure(
                    "Accuracy under a unilateral penalty",
                    across,
                    Axis("accuracy →", percent=True),
                    (accuracy,),
                ),
                Figure("Dependence of outputs on images", across, Axis("d(X, Ŷ) →"), (apart,)),
            ),
        )

    def row(self, subject: Subject) -> tuple[Cell, ...]:
        target, held = subject.target, subject.split.test
        dependence = output_dependence(target, held, self.measure, self.batch)
        accuracy = target.info["accuracy"]["test"]
        return subject.label, image_weight(subject.experiment), accuracy, dependence
