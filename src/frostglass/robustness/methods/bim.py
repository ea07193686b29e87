"""BIM: several small steps along the sign of the gradient."""

from typing import ClassVar

from frostglass.core.parameters import parameters
from frostglass.robustness.base import threats
from frostglass.robustness.methods._sign_steps import IteratedSteps


@threats.register
@parameters
class Bim(IteratedSteps):
    """Basic iterative method: FGSM in steps of length α, clipped to ε around the image.

    x ← clip(x + α · sign(∇ loss(T(x), y))) to [x₀ - ε, x₀ + ε] and [0, 1], from x₀ on.

    Use: to compare with CALoR's Table 16; PGD is the stronger test.
    Paper: Kurakin et al., Adversarial Examples in the Physical World, ICLR workshop 2017,
        arXiv 1607.02533; used by CALoR, Appendix F.
    Differs: the paper steps by one level of 255 and chooses the number of steps by ε; `step_size`
        and `steps` are those of common libraries (2/255 and 10); CALoR's are not known here.
    """

    title: ClassVar[str] = "BIM"
