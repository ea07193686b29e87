"""LOMMA: GMI and KED-MI with the logit loss, a feature regulariser and copies of the target."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.augmented import NEWER, AugmentedDescent
from frostglass.attacks._search.descent import ADAPTIVE, ALL_STEPS, PUBLISHED
from frostglass.attacks._search.families import Diagonal, Family
from frostglass.attacks._search.fields import AtLeastOne, Count, Weight
from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import at_zero
from frostglass.attacks.base import attacks
from frostglass.core.method import Variants
from frostglass.core.objective import LossName
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

ON_KEDMI = {"on": "kedmi", "optimizer": "adam", "candidates": 1, "draws": 5, **ALL_STEPS}


@attacks.register
@parameters
class Lomma(AugmentedDescent):
    """Logit maximisation with model augmentation: another loss, and more models, in GMI or KED-MI.

    L = mean over {target, students} of loss(l, y) + λ_r · mean((φ - p)²), times `weight`, - w · D.
    The loss is -l_y; φ is the target's penultimate feature, p the mean of φ over public images (or
    a draw around it), which bounds the unbounded logit. Students imitate the target on public
    images, so that fooling the target alone is not enough; both come with the `students` prior.

    Use: the weights are released and the public images can teach students; the stronger form of GMI
        and KED-MI.
    Paper: Nguyen et al., Re-thinking Model Inversion Attacks Against Deep Neural Networks, CVPR
        2023, arXiv 2304.01669.
    Differs: the paper draws p from N(μ, σ²) and uses the squared norm; its code draws p, overwrites
        it with μ, and takes the mean over the features. The defaults are the code's; `regulariser =
        "sampled"` and `reduction = "sum"` are the paper's. The logit includes the last layer's
        bias, as in the code. MIBench samples p and uses a weight of 0.4. PPA, MIRROR and IF-GMI
        take students and p_reg too, an addition of ours.

    Args:
        on: the attack that is changed: "gmi", points in a box, or "kedmi", a Gaussian per person;
            variant "kedmi" also sets KED-MI's other parameters.
        students: false is the paper's logit-only ablation.
        clamp: latents are clamped to ± this; 0 leaves them free.
        log_variance: start of a Gaussian.
        draws: images drawn from each Gaussian; 1 for points.
    """

    title = "LOMMA"
    variants: ClassVar[Variants] = {
        **PUBLISHED,
        "kedmi": ("LOMMA on KED-MI, as published", ON_KEDMI),
        "baseline": (
            "ablation: cross-entropy on the target alone",
            {"loss": "ce", "students": False, "regulariser": "off", **ALL_STEPS},
        ),
        "logit": ("ablation: the logit loss on the target alone", {"students": False, **ALL_STEPS}),
        "augmentation": (
            "ablation: cross-entropy on target and students",
            {"loss": "ce", "regulariser": "off", **ALL_STEPS},
        ),
        **ADAPTIVE,
        **NEWER,
    }

    on: Literal["gmi", "kedmi"] = "gmi"
    loss: LossName = "logit"
    optimizer: OptimizerName = "nesterov"
    steps: Count = 2400
    students: bool = True
    regulariser: Literal["mean", "sampled", "off"] = "mean"
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
