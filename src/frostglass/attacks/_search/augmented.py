"""LOMMA's parts for any search by gradients: more models than the target, and usual features."""

from typing import Literal

import torch
from torch import Tensor

from frostglass.attacks._search.descent import Descent, confidence
from frostglass.attacks._search.fields import Weight
from frostglass.attacks._search.row_rng import RowRng
from frostglass.core.method import Variants
from frostglass.core.objective import loss_of
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

LOMMA: Variants = {
    "lomma": (
        'with LOMMA\'s logit loss, students and p_reg, which come with prior.name = "students"',
        {"loss": "logit", "students": True, "regulariser": "mean"},
    ),
}


@parameters
class AugmentedDescent(Descent):
    """Base of the attacks whose class loss may include LOMMA's students and feature regulariser.

    The class loss is the mean over {target, students} of loss(l, y) + λ_r · mean((φ - p)²), where φ
    is the target's penultimate feature and p its mean over public images, or a draw around it.

    Args:
        students: use the students of a `students` prior beside the target.
        regulariser: p_reg, from the statistics of a `students` prior: "mean" (LOMMA's code),
            "sampled" (its paper: a draw per image and step) or "off".
        regulariser_weight: λ_r; 1 in LOMMA's configs.
        reduction: of the squared distance, "mean" over features (LOMMA's code) or "sum" (paper).
    """

    students: bool = False
    regulariser: Literal["mean", "sampled", "off"] = "off"
    regulariser_weight: Weight = 1.0
    reduction: Literal["mean", "sum"] = "mean"

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if self.students and not prior.students:
            problems.append(
                f"{self.name}.students is true, but the prior has no students: use prior.name = "
                '"students", or set attack.students to false'
            )
        if self._regularised and prior.features is None:
            problems.append(
                f"{self.name}.regulariser needs feature statistics, but the prior has none: use "
                'prior.name = "students", or set attack.regulariser to "off"'
            )
        return problems

    @property
    def _regularised(self) -> bool:
        return self.regulariser != "off" and self.regulariser_weight > 0

    def class_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        logits, features = view.logits_and_features(images)
        students = prior.students if self.students else ()
        outputs = [logits, *(student(images) for student in students)]
        losses = [loss_of(self.loss, output, labels, aim=self.aim) for output in outputs]
        value = torch.stack(losses).mean(0)
        if self._regularised:
            distance = (features - self._usual_features(prior, features, rng)) ** 2
            distance = distance.mean(1) if self.reduction == "mean" else distance.sum(1)
            value = value + self.regulariser_weight * distance
        return value, confidence(logits, labels)

    def _usual_features(self, prior: Prior, features: Tensor, rng: RowRng) -> Tensor:
        """Return p, the features that those of an image are kept near."""
        assert prior.features is not None  # as `prior_problems` checks
        mean, spread = prior.features.to(features)
        return mean + spread * rng.normal(len(mean)) if self.regulariser == "sampled" else mean
