"""Gradients through an argmin: the derivative of z*(F) = argmin_z L(F, z), however z* was found.

Where ∂L/∂z = 0, the implicit function theorem gives dz*/dF = -H⁻¹ ∂²L/∂z∂F with H = ∂²L/∂z². Every
row is a problem with its own H: a loss is one value per row, and nothing here mixes rows. H is
never built; only its products with vectors are computed, by double backpropagation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # multiplies each row (N, ...) by its own symmetric matrix


@dataclass(frozen=True)
class Solution:
    """Approximate solutions of H x = v, one per row, and the number of terms (N,) used for each."""

    solution: Tensor
    terms: Tensor


@dataclass(frozen=True)
class Hypergradient:
    """(dz*/dF)ᵀ dL_outer/dz, shaped like the features.

    `slope` (N,) is ‖∂L_inner/∂z‖, which is 0 where the theorem holds exactly; `terms` (N,) is that
    of `Solution`.
    """

    gradient: Tensor
    slope: Tensor
    terms: Tensor


def dots(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner product of each pair of rows, (N,)."""
    return (one * other).flatten(1).sum(1)


def expand_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Reshape values (N,) so that they multiply rows (N, ...)."""
    return values.reshape(-1, *[1] * (rows.ndim - 1))


def largest_curvature(product: Product, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Estimate the largest |eigenvalue| (N,) of each row's matrix by power iteration.

    Also returns its directions (N, ...), of length 1. The estimate is a lower bound. Directions
    from an earlier call are a good `start` if the matrices have changed little.
    """
    direction = start / expand_rows(start.flatten(1).norm(dim=1), start)
    size = torch.zeros_like(start.flatten(1)[:, 0])
    for _ in range(iterations):
        image = product(direction)
        size = image.flatten(1).norm(dim=1)
        direction = torch.where(
            expand_rows(size > 0, image),
            image / expand_rows(size.clamp(min=torch.finfo(size.dtype).tiny), image),
            direction,
        )
    return size, direction


def neumann(product: Product, vector: Tensor, alpha: float | Tensor, terms: int) -> Solution:
    """Return α Σ_{j=0..terms} (I - αH)ʲ v; `alpha` may be one value per row, (N,).

    The series converges to H⁻¹v if 0 < αλ < 2 for each eigenvalue λ of H. Truncated, it solves an
    eigendirection up to the factor 1 - (1 - αλ)^(terms+1), so that near-null directions are damped.
    A row whose term is longer than the previous one has negative curvature (or α is too large): it
    stops there, since later terms would only grow.
    """
    rate = expand_rows(
        torch.as_tensor(alpha, dtype=vector.dtype, device=vector.device).expand(len(vector)), vector
    )
    term, total = vector, vector.clone()
    length = term.flatten(1).norm(dim=1)
    used, going = torch.zeros(len(vector), dtype=torch.long, device=vector.device), length > 0
    for _ in range(terms):
        following = term - rate * product(term)
        longer = following.flatten(1).norm(dim=1)
        going = going & (longer <= length)
        if not going.any():
            break
        term, length = following, longer
        total = torch.where(expand_rows(going, total), total + term, total)
        used = used + going
    return Solution(rate * total, used)


def conjugate_gradient(
    product: Product, vector: Tensor, damping: float | Tensor, terms: int
) -> Solution:
    """Return (H + δI)⁻¹ v by at most `terms` steps of conjugate gradients.

    `damping` δ may be one value per row, (N,). A row stops when it is solved up to rounding, or
    when the curvature along its search direction is not positive.
    """
    added = expand_rows(
        torch.as_tensor(damping, dtype=vector.dtype, device=vector.device).expand(len(vector)),
        vector,
    )
    solution, residual, direction = torch.zeros_like(vector), vector, vector
    size = first = dots(residual, residual)
    used, going = torch.zeros(len(vector), dtype=torch.long, device=vector.device), first > 0
    rounding = torch.finfo(vector.dtype).eps ** 2
    for _ in range(terms):
        image = product(direction) + added * direction
        bend = dots(direction, image)
        going = going & (bend > 0)
        if not going.any():
            break
        stride = expand_rows(torch.where(going, size / bend, 0.0), vector)
        solution, residual = solution + stride * direction, residual - stride * image
        used = used + going
        left = dots(residual, residual)
        direction = residual + expand_rows(torch.where(going, left / size, 0.0), vector) * direction
        size, going = left, going & (left > rounding * first)
    return Solution(solution, used)


def hypergradient(
    inner: Callable[[Tensor, Tensor], Tensor],
    outer: Callable[[Tensor], Tensor],
    features: Tensor,
    latents: Tensor,
    solve: Callable[[Product, Tensor], Solution],
) -> Hypergradient:
    """Differentiate `outer(z*)` in the features, for z* = argmin of `inner(features, latents)`.

    Both losses are one value per row, (N,). (dz*/dF)ᵀ v = -(∂²L_inner/∂z∂F)ᵀ H⁻¹ v with
    v = ∂L_outer/∂z; `solve(product, v)` returns H⁻¹ v. No graph is left behind.
    """
    features, latents = features.detach().requires_grad_(), latents.detach().requires_grad_()
    (vector,) = torch.autograd.grad(outer(latents).sum(), latents)
    (slope,) = torch.autograd.grad(inner(features, latents).sum(), latents, create_graph=True)

    def product(rows: Tensor) -> Tensor:
        return torch.autograd.grad(slope, latents, rows, retain_graph=True)[0]

    solved = solve(product, vector)
    (through,) = torch.autograd.grad(slope, features, solved.solution)
    return Hypergradient(-through, slope.detach().flatten(1).norm(dim=1), solved.terms)
