"""LOMMA: GMI and KED-MI with the logit loss, a feature regulariser and copies of the target."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.descent import ADAPTIVE, Descent, confidence
from frostglass.attacks._search.families import Diagonal, Family
from frostglass.attacks._search.fields import AtLeastOne, Count, Weight
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import at_zero
from frostglass.attacks.base import attacks
from frostglass.core.method import Variants
from frostglass.core.objective import LossName, loss_of
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

ON_KEDMI = {"on": "kedmi", "optimizer": "adam", "candidates": 1, "draws": 5}


@attacks.register
@parameters
class Lomma(Descent):
    """Logit maximisation with model augmentation: another loss, and more models, in GMI or KED-MI.

    L = mean over {target, students} of loss(l, y) + λ_r · mean((φ - p)²), times `weight`, - w · D.
    The loss is -l_y; φ is the target's penultimate feature, p the mean of φ over public images (or
    a draw around it), which bounds the unbounded logit. Students imitate the target on public
    images, so that fooling the target alone is not enough; both come with the `students` prior.

    Paper: Nguyen et al., Re-thinking Model Inversion Attacks Against Deep Neural Networks, CVPR
        2023, arXiv 2304.01669.
    Differs: the paper draws p from N(μ, σ²) and uses the squared norm; its code draws p, overwrites
        it with μ, and takes the mean over the features. The defaults are the code's; `regulariser =
        "sampled"` and `reduction = "sum"` are the paper's. The logit includes the last layer's
        bias, as in the code. MIBench samples p and uses a weight of 0.4.

    Args:
        on: the attack that is changed: "gmi", points in a box, or "kedmi", a Gaussian per person;
            variant "kedmi" also sets KED-MI's other parameters.
        students: use the students of the prior beside the target; false is the paper's logit-only
            ablation.
        regulariser: p_reg: "mean" (code), "sampled" (paper: a draw per image and step) or "off".
        regulariser_weight: λ_r; 1 in the published configs.
        reduction: of the squared distance, "mean" over features (code) or "sum" (paper).
        clamp: latents are clamped to ± this; 0 leaves them free.
        log_variance: start of a Gaussian.
        draws: images drawn from each Gaussian; 1 for points.
    """

    title = "LOMMA"
    variants: ClassVar[Variants] = {
        "kedmi": ("LOMMA on KED-MI, as published", ON_KEDMI),
        "baseline": (
            "ablation: cross-entropy on the target alone",
            {"loss": "ce", "students": False, "regulariser": "off"},
        ),
        "logit": ("ablation: the logit loss on the target alone", {"students": False}),
        "augmentation": (
            "ablation: cross-entropy on target and students",
            {"loss": "ce", "regulariser": "off"},
        ),
        **ADAPTIVE,
    }

    on: Literal["gmi", "kedmi"] = "gmi"
    loss: LossName = "logit"
    optimizer: OptimizerName = "nesterov"
    steps: Count = 2400
    students: bool = True
    regulariser: Literal["mean", "sampled", "off"] = "mean"
    regulariser_weight: Weight = 1.0
    reduction: Literal["mean", "sum"] = "mean"
    clamp: Weight = 1.0
    log_variance: Annotated[float, Field(ge=-10, le=4)] = 1.0
    draws: AtLeastOne = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on == "gmi" and self.draws > 1:
            raise ValueError(
                f'draws ({self.draws}) must be 1 with on = "gmi", where a point has one image: '
                'use variant = "kedmi" for distributions'
            )

    @property
    def reads(self) -> int:
        return self.draws

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if self.students and not prior.students:
            problems.append(
                "lomma.students is true, but the prior has no students: use prior.name = "
                '"students", or set attack.students to false'
            )
        if self._regularised and prior.features is None:
            problems.append(
                "lomma.regulariser needs feature statistics, but the prior has none: use "
                'prior.name = "students", or set attack.regulariser to "off"'
            )
        return problems

    @property
    def _regularised(self) -> bool:
        return self.regulariser != "off" and self.regulariser_weight > 0

    def family(self, prior: Prior) -> Family:
        if self.on == "gmi":
            return super().family(prior)
        return Diagonal(prior.latent, self.log_variance, self.clamp)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        if self.on == "gmi":
            return super().centres(view, prior, labels, seed=seed)
        return at_zero(prior, labels, self.candidates)

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        return state.clamp(-self.clamp, self.clamp) if self.on == "gmi" and self.clamp else state

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
