"""Negative label smoothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Self

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.defenses.base import Batch, Defense, Part, Term, TrainingProgress, defenses
from frostglass.defenses.strengths import Range, Real


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Return (1 - α)(-ln p_y) + (α / C) Σ_k (-ln p_k), averaged over the batch."""
    log_p = logits.log_softmax(1)
    return -((1 - alpha) * log_p.gather(1, labels[:, None])[:, 0] + alpha * log_p.mean(1)).mean()


@defenses.register
@parameters
class LabelSmoothing(Defense):
    """Negative label smoothing: train beyond certainty, so that confidence does not guide a search.

    L = (1 - α)(-ln p_y) + (α / C) Σ_k (-ln p_k) with α < 0. The loss has no lower bound: every
    wrong logit is pushed down by |α| / C without end, so the loss becomes negative and logits
    grow. Positive α is ordinary smoothing and makes inversion easier.

    Use: a baseline that costs nothing. It misleads attacks with cross-entropy, and hid nobody from
        the Poincaré loss in our trials: audit it with several losses.
    Cost: an epoch takes 1.01 times as long (a small `cnn`).
    Paper: Struppek et al., Be Careful What You Smooth For, ICLR 2024, arXiv 2310.06549.
    Differs: the official ramp is written for 100 epochs (0 until epoch 50, rising until 75, then
        α); here it is at the same shares of any number of epochs, and as there the ramp reaches
        only half of α before it jumps. `full_from` moves it: the ramp begins at two thirds of
        that share. `ramp = false` is constant α, as in MIBench.

    Args:
        alpha: smoothing factor; published strengths are -0.3, -0.02 and -0.01, 0 is plain
            cross-entropy.
        ramp: use the official schedule.
        full_from: share of the training after which α is at full strength, officially 0.75.
    """

    alpha: Annotated[float, Field(ge=-10, le=1, allow_inf_nan=False)] = -0.05
    ramp: bool = True
    full_from: Annotated[float, Field(gt=0, lt=1)] = 0.75

    title = "LS"
    disabled: ClassVar = {"alpha": 0.0}
    adaptive: ClassVar = ("margin", "poincare")
    unkeyed: ClassVar = {"full_from": 0.75}

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"alpha": Real(-0.5, -0.01)}

    def brief(self) -> Self:
        return replace(self, ramp=False)  # at full strength from the first epoch

    def replaces(self) -> frozenset[Part]:
        return frozenset({"classification loss"}) if self.alpha else frozenset()

    def alpha_at(self, progress: TrainingProgress) -> float:
        """Return the factor in this epoch: α(e + 1 - B) / (E - B) on a ramp that begins at B.

        Officially that is half of the E epochs, and three quarters are its end.
        """
        # The official ramp is for negative factors only.
        if not self.ramp or self.alpha > 0 or progress.fraction >= self.full_from:
            return self.alpha
        share = 2 * self.full_from / 3
        if progress.fraction < share:
            return 0.0
        begin = share * progress.epochs
        return self.alpha * max(0.0, progress.epoch + 1 - begin) / (progress.epochs - begin)

    def losses(self, batch: Batch) -> dict[str, Term]:
        if not self.alpha:
            return {}
        alpha = self.alpha_at(batch.progress)
        if not alpha:
            return {"cross_entropy": Term(1.0, F.cross_entropy(batch.logits, batch.labels))}
        loss = smoothed_cross_entropy(batch.logits, batch.labels, alpha)
        return {"smoothed_cross_entropy": Term(1.0, loss)}

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        return self.alpha_at(progress) == self.alpha
