"""More models than the target in a search by gradients: LOMMA's students, added or subtracted."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from frostglass.attacks._search.descent import Descent, confidence
from frostglass.attacks._search.fields import Weight
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.start import Bonus
from frostglass.core.method import Variants
from frostglass.core.objective import class_margins
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

LOMMA: Variants = {
    "lomma": (
        'with LOMMA\'s logit loss, students and p_reg, which come with prior.name = "students"',
        {"loss": "logit", "students": True, "regulariser": "mean"},
    ),
}
SUBTRACT: Variants = {
    "subtract": (
        "for decoys: what the target calls y and its students do not; set prior.name = "
        '"students" with prior.draws',
        {"loss": "margin", "subtract": 0.5},
    ),
}


@parameters
class AugmentedDescent(Descent):
    """Base of the attacks whose class loss may include students and a feature regulariser.

    The class loss is the mean over {target, students} of loss(l, y) + λ_r · mean((φ - p)²), where φ
    is the target's penultimate feature and p its mean over public images, or a draw around it.
    With `subtract` = w it is loss(T, y) - w · mean over students of min(loss(S, y), enough): it
    finds what the target calls y and a student, which learned the target's answers on other
    people, does not. Starts and kept images are then those with the largest m(T) - w · mean of
    max(m(S), -enough), where m(l) = l_y - max_{j≠y} l_j.

    Args:
        students: use the students of a `students` prior beside the target.
        subtract: w, the weight of the students' loss that is subtracted; 0 for none. Below 1, an
            image that target and students call y alike is still better than one neither does.
        enough: loss of a student beyond which nothing is gained; without a bound the search would
            rather fool the students than convince the target.
        regulariser: p_reg, from the statistics of a `students` prior: "mean" (LOMMA's code),
            "sampled" (its paper: a draw per image and step) or "off".
        regulariser_weight: λ_r; 1 in LOMMA's configs.
        reduction: of the squared distance, "mean" over features (LOMMA's code) or "sum" (paper).
    """

    students: bool = False
    subtract: Weight = 0.0
    enough: Weight = 10.0
    regulariser: Literal["mean", "sampled", "off"] = "off"
    regulariser_weight: Weight = 1.0
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.students and self.subtract:
            raise ValueError(
                f"students adds the students' loss and subtract ({self.subtract:g}) takes it away: "
                "set students to false, or subtract to 0"
            )

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if (self.students or self.subtract) and not prior.students:
            asked, off = ("students is true", "students to false")
            if self.subtract:
                asked, off = f"subtract is {self.subtract:g}", "subtract to 0"
            problems.append(
                f"{self.name}.{asked}, but the prior has no students: use prior.name = "
                f'"students", or set attack.{off}'
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
        value = self._losses([logits], labels)
        if self.students or self.subtract:
            outputs = [student(images) for student in prior.students]
            if self.students:
                value = self._losses([logits, *outputs], labels)
            else:
                value = value - self.subtract * self._losses(outputs, labels, self.enough)
        if self._regularised:
            distance = (features - self._usual_features(prior, features, rng)) ** 2
            distance = distance.mean(1) if self.reduction == "mean" else distance.sum(1)
            value = value + self.regulariser_weight * distance
        return value, confidence(logits, labels)

    def _losses(self, outputs: Sequence[Tensor], labels: Tensor, most: float = math.inf) -> Tensor:
        """Return the mean class loss (N,) over networks, each at most `most`."""
        losses = [self.loss_from(logits, labels) for logits in outputs]
        return torch.stack(losses).clamp(max=most).mean(0)

    def bonus(self, prior: Prior) -> Bonus | None:
        if not self.subtract:
            return None

        def unlike_students(images: Tensor) -> Tensor:
            margins = [class_margins(student(images)) for student in prior.students]
            return -self.subtract * torch.stack(margins).clamp(min=-self.enough).mean(0)

        return unlike_students

    def _usual_features(self, prior: Prior, features: Tensor, rng: RowRng) -> Tensor:
        """Return p, the features that those of an image are kept near."""
        assert prior.features is not None  # as `prior_problems` checks
        mean, spread = prior.features.to(features)
        return mean + spread * rng.normal(len(mean)) if self.regulariser == "sampled" else mean
