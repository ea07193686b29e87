"""FGSM: one step along the sign of the gradient."""

from typing import ClassVar

from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.core.views import ModelView
from frostglass.robustness.base import Victims, threats
from frostglass.robustness.methods._sign_steps import SignSteps


@threats.register
@parameters
class Fgsm(SignSteps):
    """Fast gradient sign method: one step of length ε along the sign of the loss's gradient.

    x' = clip(x + ε · sign(∇ loss(T(x), y))); targeted: x' = clip(x - ε · sign(∇ loss(T(x), t))).

    Use: a first look, one gradient an image; no evidence of robustness.
    Paper: Goodfellow et al., Explaining and Harnessing Adversarial Examples, ICLR 2015,
        arXiv 1412.6572; used by CALoR, Appendix F.
    """

    title: ClassVar[str] = "FGSM"

    def perturb(self, view: ModelView, victims: Victims, *, seed: int) -> Tensor:
        return self.step(view, victims, victims.images, self.epsilon)
