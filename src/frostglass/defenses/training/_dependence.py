"""Dependence of two variables in a batch, measured on kernel matrices: HSIC and COCO.

A measure works on Gram matrices, (m, m) for a batch of m. It has two halves: `prepare` runs once
for each variable and `combine` once for each pair, so that images and labels are prepared once for
all layers. Everything stays on the features' device and is computed in single precision at least,
also under autocast: half precision cannot resolve the kernels' differences. A network that has
diverged yields NaN instead of a linear algebra error, and the training loop reports it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from frostglass.core.types import Images, Target
from frostglass.models.base import as_seen
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture

SIGMA = 5.0
EPSILON = 1e-5
SMALLEST = 1e-12  # the root of a norm is constant below this, where its slope has no bound

MeasureName = Literal["hsic_nocco", "hsic_trace", "coco_frobenius", "coco_spectral"]
Norm = Literal["frobenius", "spectral"]


@dataclass(frozen=True)
class Measure:
    """A dependence measure: called with two Gram matrices, or half by half."""

    prepare: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        return self.combine(self.prepare(one), self.prepare(other))


def gaussian_gram(features: Tensor, sigma: float = SIGMA) -> Tensor:
    """Return K_ij = exp(-‖a_i - a_j‖² / (2 σ² d)) of flattened features of d numbers each."""
    with _full_precision(features):
        rows = _at_least_single(features).flatten(1)
        # A shift changes neither distances nor gradients, and keeps large features from cancelling.
        rows = rows - rows.detach().mean(0)
        products = rows @ rows.T
        squares = products.diagonal()
        distances = (squares[:, None] + squares - 2 * products).clamp_min(0)
        return (distances / (-2 * sigma**2 * rows.shape[1])).exp()


def linear_gram(labels: Tensor) -> Tensor:
    """Return Y Yᵀ for one-hot Y: 1 where two labels are the same, else 0."""
    return (labels[:, None] == labels).to(torch.get_default_dtype())


def centred(gram: Tensor) -> Tensor:
    """Return H K H with H = I - 11ᵀ/m: the kernel of the features with their mean subtracted."""
    gram = _at_least_single(gram)
    rows = gram.mean(1)
    return gram - rows[:, None] - rows + rows.mean()


def normalised(gram: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return R = K̃ (K̃ + ε m I)⁻¹ of the centred kernel K̃.

    A direction of variance t counts t / (t + ε m): nearly 1, however large t is.
    """
    with _full_precision(gram):
        middle = centred(gram)
        identity = torch.eye(len(middle), dtype=middle.dtype, device=middle.device)
        # Unlike `cholesky`, `cholesky_ex` neither raises nor waits for the device.
        factor, failed = torch.linalg.cholesky_ex(middle + epsilon * len(middle) * identity)
        return torch.cholesky_solve(middle, factor.masked_fill(failed != 0, torch.nan))


def hsic_nocco(one: Tensor, other: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return the normalised HSIC, Tr(R_K R_L), a soft count of shared directions.

    It is at most m - 1, and at most identities - 1 against labels.
    """
    return measure("hsic_nocco", epsilon)(one, other)


def hsic_trace(one: Tensor, other: Tensor) -> Tensor:
    """Return the biased estimator of HSIC, Tr(K H L H) / (m - 1)²; 0 for a single sample."""
    return measure("hsic_trace")(one, other)


def coco(one: Tensor, other: Tensor, norm: Norm = "frobenius") -> Tensor:
    """Return the constrained covariance, √‖K̃ L̃‖ / m.

    The published code uses the Frobenius norm, the paper the spectral norm.
    """
    return measure("coco_frobenius" if norm == "frobenius" else "coco_spectral")(one, other)


def measure(name: MeasureName, epsilon: float = EPSILON) -> Measure:
    """Return the measure of that name; `epsilon` is that of hsic_nocco."""
    if name == "hsic_nocco":
        return Measure(partial(normalised, epsilon=epsilon), _trace)
    if name == "hsic_trace":
        return Measure(centred, _covariance)
    size = torch.linalg.vector_norm if name == "coco_frobenius" else _spectral
    return Measure(centred, partial(_correlation, size=size))


def layer_dependence(
    target: Target,
    images: Images,
    batches: Sequence[Tensor],
    names: tuple[str, ...],
    dependence: Measure,
    sigma: float = SIGMA,
) -> dict[str, tuple[float, float]]:
    """Return d(X, Z) and d(Z, Y) of each named layer, the mean over batches of image indices."""
    device = device_of(target.module)
    sums = {name: torch.zeros(2) for name in names}
    for index in batches:
        pixels = images.floats(index).to(device)
        with frozen(target.module), torch.no_grad(), capture(target.module, names) as layers:
            target.module(pixels)
        seen = dependence.prepare(gaussian_gram(as_seen(target.module, pixels), sigma))
        labels = dependence.prepare(linear_gram(images.labels[index].to(device)))
        for name, output in layers.items():
            layer = dependence.prepare(gaussian_gram(output, sigma))
            pair = dependence.combine(seen, layer), dependence.combine(layer, labels)
            sums[name] += torch.stack(pair).cpu() / len(batches)
    return {name: (pair[0].item(), pair[1].item()) for name, pair in sums.items()}


def _trace(one: Tensor, other: Tensor) -> Tensor:
    """Return Tr(A B) of symmetric matrices."""
    return (one * other).sum()


def _covariance(one: Tensor, other: Tensor) -> Tensor:
    return _trace(one, other) / max(len(one) - 1, 1) ** 2


def _correlation(one: Tensor, other: Tensor, size: Callable[[Tensor], Tensor]) -> Tensor:
    with _full_precision(one):
        return size(one @ other).clamp_min(SMALLEST).sqrt() / len(one)


def _spectral(matrix: Tensor) -> Tensor:
    finite = matrix.isfinite().all()
    return torch.linalg.matrix_norm(torch.where(finite, matrix, 0), 2).where(finite, torch.nan)


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
