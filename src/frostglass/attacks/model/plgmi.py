"""PLG-MI: pseudo-label guided model inversion."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.descent import Descent, confidence
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks.base import attacks
from frostglass.core.objective import LossName, loss_of
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.data._augment import DRAWS, viewed


@attacks.register
@parameters
class Plgmi(Descent):
    """Pseudo-label guided inversion: a generator that was taught to draw each person, searched under random changes of its pictures.

    L(z) = Σ over `shown` independent views v of loss(T(v(G(z, y))), y), where v crops, recolours, mirrors and turns the picture; the `conditional` prior
    does the rest, and has to be fitted anew for every target.

    Paper: Yuan et al., Pseudo Label-Guided Model Inversion Attack via Conditional Generative Adversarial Network, AAAI 2023, arXiv 2302.09814.
    Differs: any prior is accepted, also one that is given no label. The views are one affine sampling with bilinear weights where the published code
        crops, resizes and turns one after the other.

    Args:
        shown: views of a picture at each step; 2 published, 0 shows the picture as it is.
    """

    loss: LossName = "margin"
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    critic_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    coupling: Annotated[int, Field(ge=1)] = 1
    lr: Annotated[float, Field(gt=0)] = 0.1
    steps: Annotated[int, Field(ge=0)] = 600
    shown: Annotated[int, Field(ge=0)] = 2

    @property
    def views(self) -> int:
        return max(1, self.shown)

    def identity(
        self, view: ModelView, prior: Prior, pictures: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        if not self.shown:
            return super().identity(view, prior, pictures, labels, rng)
        seen = [view.logits(viewed(pictures, rng.uniform(DRAWS))) for _ in range(self.shown)]
        value = torch.stack(
            [loss_of(self.loss, logits, labels, aim=self.aim) for logits in seen]
        ).sum(0)
        return value, torch.stack([confidence(logits, labels) for logits in seen]).mean(0)
