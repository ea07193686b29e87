"""LOMMA: GMI and KED-MI with the logit loss, a feature regulariser and distilled copies of the target."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.descent import ADAPTIVE, Descent, confidence
from frostglass.attacks._search.families import Diagonal, Family, Point
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import at_zero
from frostglass.attacks.base import attacks
from frostglass.core.objective import LossName, loss_of
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

ON_KEDMI = {"on": "kedmi", "optimizer": "adam", "candidates": 1, "draws": 5}


@attacks.register
@parameters
class Lomma(Descent):
    """Logit maximisation with model augmentation: what to maximise, and against whom, changed in GMI or KED-MI.

    L = mean over {target, students} of loss(l, y) + λ_r · mean((φ - p)²), times `weight`, - w · D. The loss is -l_y; φ is the target's penultimate feature, p the
    mean of φ over public pictures (or a draw around it), which holds the unbounded logit. Students imitate the target on public pictures, so that
    what fools the target alone is not enough; both come with the `students` prior.

    Paper: Nguyen et al., Re-thinking Model Inversion Attacks Against Deep Neural Networks, CVPR 2023, arXiv 2304.01669.
    Differs: the paper draws p from N(μ, σ²) and uses the squared norm; its code draws p, overwrites it with μ, and takes the mean over the features. The
        defaults are the code's; `regulariser = "sampled"` and `reduction = "sum"` are the paper's. The logit includes the last layer's bias, as in the code. MIBench
        samples p and uses a weight of 0.4.

    Args:
        on: the attack that is changed: "gmi", points in a box, or "kedmi", a Gaussian per person; variant "kedmi" also sets what else KED-MI does.
        students: use the students of the prior beside the target; off is the paper's logit-only ablation.
        regulariser: p_reg: "mean" (code), "sampled" (paper: one draw for each picture and step) or "off".
        regulariser_weight: λ_r; 1 in the published configs. reduction: of the squared distance, "mean" over features (code) or "sum" (paper).
        clamp: latents are kept in ± this; 0 leaves them free.
        log_variance: start of a Gaussian. draws: pictures drawn from each Gaussian; 1 where points are searched.
    """

    on: Literal["gmi", "kedmi"] = "gmi"
    loss: LossName = "logit"
    optimizer: OptimizerName = "nesterov"
    steps: Annotated[int, Field(ge=0)] = 2400
    students: bool = True
    regulariser: Literal["mean", "sampled", "off"] = "mean"
    regulariser_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    reduction: Literal["mean", "sum"] = "mean"
    clamp: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    log_variance: Annotated[float, Field(ge=-10, le=4)] = 1.0
    draws: Annotated[int, Field(ge=1)] = 1

    variants = {  # noqa: RUF012
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on == "gmi" and self.draws > 1:
            raise ValueError(
                f'draws ({self.draws}) must be 1 with on = "gmi": a point has one picture; use variant = "kedmi" for distributions'
            )

    @property
    def read_from_each(self) -> int:
        return self.draws

    def problems(self, view: ModelView, prior: Prior) -> list[str]:
        found = super().problems(view, prior)
        if self.students and not prior.students:
            found.append(
                'lomma.students is on and the prior has none: use prior.name = "students", or set attack.students to false'
            )
        if self._regularised and prior.features is None:
            found.append(
                'lomma.regulariser needs feature statistics: use prior.name = "students", or set attack.regulariser to "off"'
            )
        return found

    @property
    def _regularised(self) -> bool:
        return self.regulariser != "off" and self.regulariser_weight > 0

    def family(self, prior: Prior) -> Family:
        return (
            Diagonal(prior.latent, self.log_variance, self.clamp)
            if self.on == "kedmi"
            else Point(prior.latent)
        )

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        if self.on == "gmi":
            return super().centres(view, prior, labels, seed=seed)
        return at_zero(prior, labels, self.candidates)

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        return state.clamp(-self.clamp, self.clamp) if self.on == "gmi" and self.clamp else state

    def identity(
        self, view: ModelView, prior: Prior, pictures: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        logits, features = view.logits_and_features(pictures)
        opinions = (
            [logits, *(student(pictures) for student in prior.students)]
            if self.students
            else [logits]
        )
        value = torch.stack(
            [loss_of(self.loss, opinion, labels, aim=self.aim) for opinion in opinions]
        ).mean(0)
        if self._regularised:
            distance = (features - self._usual(prior, features, rng)) ** 2
            value = value + self.regulariser_weight * (
                distance.mean(1) if self.reduction == "mean" else distance.sum(1)
            )
        return value, confidence(logits, labels)

    def _usual(self, prior: Prior, features: Tensor, rng: RowRng) -> Tensor:
        """The feature that pictures are held near."""
        assert prior.features is not None  # `problems` has said so
        mean, spread = prior.features.to(features)
        return mean + spread * rng.normal(len(mean)) if self.regulariser == "sampled" else mean
