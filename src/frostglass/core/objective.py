"""Losses that attacks minimise: one value per sample, independent of the rest of the batch."""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["ce", "logit", "margin", "poincare", "aim"]


def ce(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return -ln p_y. Its gradient vanishes once the target is confident.

    With `smoothing` s it is -(1 - s) ln p_y - s · mean of ln p_k over the other classes k.
    """
    own = F.cross_entropy(logits, labels, reduction="none")
    if not smoothing:
        return own
    others = (-logits.log_softmax(1).sum(1) - own) / (logits.shape[1] - 1)
    return (1 - smoothing) * own + smoothing * others


def logit(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -l_y. It is unbounded below, so it needs a regulariser."""
    return -logits.gather(1, labels[:, None])[:, 0]


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return max_{j≠y} l_j - l_y. Its gradient stays when the target is already confident."""
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.masked_fill(F.one_hot(labels, logits.shape[1]).bool(), -torch.inf)
    return others.amax(1) - own


def class_margins(logits: Tensor) -> Tensor:
    """Return l_k - max_{j≠k} l_j of every class k, (N, K): minus the margin loss of each."""
    top = logits.topk(2, dim=1)
    is_top = top.indices[:, :1] == torch.arange(logits.shape[1], device=logits.device)
    return logits - torch.where(is_top, top.values[:, 1:], top.values[:, :1])


def poincare(logits: Tensor, labels: Tensor, xi: float = 1e-4) -> Tensor:
    """Return the distance in the Poincaré ball between l / ‖l‖₁ and the (shrunken) one-hot label.

    It is invariant to the scale of the logits. Both norms are kept inside the ball and the arcosh
    argument above 1, so that value and gradient stay finite for all-equal, all-zero and one-hot
    logits.
    """
    u = logits / logits.abs().sum(1, keepdim=True).clamp(min=1e-12)
    v = (F.one_hot(labels, logits.shape[1]).to(logits.dtype) - xi).clamp(0, 1)
    inside = (1 - (u**2).sum(1)).clamp(min=1e-6) * (1 - (v**2).sum(1)).clamp(min=1e-9)
    return torch.acosh((1 + 2 * ((u - v) ** 2).sum(1) / inside).clamp(min=1 + 1e-7))


def aimed(logits: Tensor, labels: Tensor, aim: float) -> Tensor:
    """Return (ln p_y - ln aim)², which is least at a confidence of exactly `aim`."""
    return (logits.log_softmax(1).gather(1, labels[:, None])[:, 0] - math.log(aim)) ** 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": ce,
    "logit": logit,
    "margin": margin,
    "poincare": poincare,
}


def loss_of(
    name: LossName, logits: Tensor, labels: Tensor, *, aim: float, smoothing: float = 0.0
) -> Tensor:
    """Return the named loss of each sample; only "aim" uses `aim`, only "ce" `smoothing`."""
    if name == "aim":
        return aimed(logits, labels, aim)
    return ce(logits, labels, smoothing) if name == "ce" else LOSSES[name](logits, labels)
