"""More models than the target in a search by gradients: LOMMA's students, added or subtracted."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
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
from frostglass.data._augment import covered, covering, mean_colour

LOMMA: Variants = {
    "lomma": (
        'with LOMMA\'s logit loss, students and p_reg, which come with prior.name = "students"',
        {"loss": "logit", "students": True, "regulariser": "mean"},
    ),
}
# What an attacker who knows of a newer defense would change.
NEWER: Variants = {
    "students": (
        "for Trap-MID: students decide alone, which learned the target's answers on images without "
        'triggers; set prior.name = "students" with prior.draws',
        {
            "loss": "margin",
            "students": True,
            "alone": True,
            "regulariser": "off",
        },
    ),
    "erased": (
        "for MIDRE: a random box of each image is erased at each step, as in its training; with a "
        "new box at each step few searches stop early",
        {"erase": 0.4},
    ),
}
SUBTRACT: Variants = {
    "subtract": (
        "for decoys: what the target calls y and its students do not; set prior.name = "
        '"students" with prior.draws',
        {"loss": "margin", "subtract": 0.5, "students": False},
    ),
}


@parameters
class AugmentedDescent(Descent):
    """Base of the attacks whose class loss may include students and a feature regulariser.

    The class loss is the mean over {target, students} of loss(l, y) + λ_r · mean((φ - p)²), where φ
    is the target's penultimate feature and p its mean over public images, or a draw around it.
    With `alone` the target is left out of that mean.
    With `subtract` = w it is loss(T, y) - w · mean over students of min(loss(S, y), enough): it
    finds what the target calls y and a student, which learned the target's answers on other
    people, does not. Starts and kept images are then those with the largest m(T) - w · mean of
    max(m(S), -enough), where m(l) = l_y - max_{j≠y} l_j.

    Args:
        students: use the students of a `students` prior beside the target.
        alone: with `students`, leave the target out of the class loss; it is asked to choose
            starts and to rank images, and for the regulariser. What the target alone knows, such
            as a trapdoor, is then not found.
        erase: a box of each image is filled with ImageNet's mean colour at each step, as MIDRE
            trains its network, but its share of the area is drawn between 0 and this one; 0 shows
            whole images.
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
    alone: bool = False
    erase: Annotated[float, Field(ge=0, lt=1)] = 0.0
    subtract: Weight = 0.0
    enough: Weight = 10.0
    regulariser: Literal["mean", "sampled", "off"] = "off"
    regulariser_weight: Weight = 1.0
    reduction: Literal["mean", "sum"] = "mean"

    unkeyed: ClassVar[Mapping[str, Any]] = {**Descent.unkeyed, "alone": False, "erase": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alone and not self.students:
            raise ValueError(
                "alone leaves the search to students, but students is false: set it to true, or "
                "alone to false"
            )
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

    @property
    def asks(self) -> bool:
        return not self.alone or self._regularised

    def class_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        images = self._erased(images, rng)
        taught = prior.students if self.students or self.subtract else ()
        outputs = [student(images) for student in taught]
        asked, features = view.logits_and_features(images) if self.asks else (None, images)
        own = [] if asked is None or self.alone else [asked]
        if self.subtract:
            value = self._losses(own, labels)
            value = value - self.subtract * self._losses(outputs, labels, self.enough)
        else:
            value = self._losses([*own, *outputs], labels)
        if self._regularised:
            distance = (features - self._usual_features(prior, features, rng)) ** 2
            distance = distance.mean(1) if self.reduction == "mean" else distance.sum(1)
            value = value + self.regulariser_weight * distance
        sure = [confidence(logits, labels) for logits in own or outputs]
        return value, torch.stack(sure).mean(0)

    def _erased(self, images: Tensor, rng: RowRng) -> Tensor:
        """Fill a random box of each image, for an attacker who knows that training did."""
        if not self.erase:
            return images
        share, top, left = rng.uniform(self.looks, 3).flatten(0, 1).unbind(1)
        boxes = covering(self.erase * share, (top, left), images.shape[2:])
        return covered(images, boxes, mean_colour(images.shape[1]))

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
