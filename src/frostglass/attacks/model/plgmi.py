"""PLG-MI: pseudo-label guided model inversion."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.descent import Descent, confidence
from frostglass.attacks._search.fields import AtLeastOne, Count, Weight
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks.base import attacks
from frostglass.core.objective import LossName
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.data._augment import DRAWS, viewed


@attacks.register
@parameters
class Plgmi(Descent):
    """Pseudo-label guided inversion: searches a class-conditional generator on augmented images.

    L(z) = Σ over `shown` independent views v of loss(T(v(G(z, y))), y), where v crops, recolours,
    mirrors and turns the image. The `conditional` prior must be fitted to each target anew.

    Use: to compare with CALoR's tables, where it is among the strongest. Its prior is trained again
        for every model.
    Paper: Yuan et al., Pseudo Label-Guided Model Inversion Attack via Conditional Generative
        Adversarial Network, AAAI 2023, arXiv 2302.09814.
    Differs: any prior is accepted, also one that takes no label. The views are one affine sampling
        with bilinear weights where the published code crops, resizes and turns one after the other.
        The published generator ends in tanh, whose values below 0 go to the target as they are;
        the `conditional` prior's images lie in [0, 1].

    Args:
        shown: views of an image at each step; 2 published, 0 shows the image as it is.
    """

    title = "PLG-MI"

    loss: LossName = "margin"
    weight: Weight = 1.0
    critic_weight: Weight = 0.0
    coupling: AtLeastOne = 1
    lr: Annotated[float, Field(gt=0)] = 0.1
    steps: Count = 600
    shown: Count = 2

    @property
    def views(self) -> int:
        return max(1, self.shown)

    def class_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        if not self.shown:
            return super().class_loss(view, prior, images, labels, rng)
        seen = [view.logits(viewed(images, rng.uniform(DRAWS))) for _ in range(self.shown)]
        losses = [self.loss_from(logits, labels) for logits in seen]
        sure = [confidence(logits, labels) for logits in seen]
        return torch.stack(losses).sum(0), torch.stack(sure).mean(0)
