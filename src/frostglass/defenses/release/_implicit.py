"""Gradients through an argmin: how z*(F) = argmin_z L(F, z) moves with F, whatever search found it.

Where ∂L/∂z = 0, the implicit function theorem gives dz*/dF = -H⁻¹ ∂²L/∂z∂F with H = ∂²L/∂z². Every row has a problem and an H of its own: a
loss is one value a row, and nothing here mixes rows. H is never built; only its products with vectors are taken, which double
backpropagation gives.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[
    [Tensor], Tensor
]  # rows (N, ...) to rows, each times its row's own symmetric matrix


@dataclass(frozen=True)
class Solved:
    """Approximate solutions of H x = v, a row each, and how many terms (N,) of its series a row has."""

    solution: Tensor
    terms: Tensor


@dataclass(frozen=True)
class Hypergradient:
    """(dz*/dF)ᵀ dL_outer/dz, shaped like the features; `slope` (N,) is ‖∂L_inner/∂z‖, which is 0 where the theorem holds exactly; `terms`
    (N,) as in `Solved`."""

    gradient: Tensor
    slope: Tensor
    terms: Tensor


def dots(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of each pair of rows, (N,)."""
    return (one * other).flatten(1).sum(1)


def across(values: Tensor, rows: Tensor) -> Tensor:
    """Values (N,) shaped so that they multiply rows (N, ...)."""
    return values.reshape(-1, *[1] * (rows.ndim - 1))


def largest_curvature(product: Product, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """The largest |eigenvalue| (N,) of each row's matrix by power iteration, and the directions (N, ...), of length 1, it was found in.

    The estimate comes from below. Directions found before are a good `start` where the matrices have changed a little.
    """
    direction = start / across(start.flatten(1).norm(dim=1), start)
    size = torch.zeros_like(start.flatten(1)[:, 0])
    for _ in range(iterations):
        image = product(direction)
        size = image.flatten(1).norm(dim=1)
        direction = torch.where(
            across(size > 0, image),
            image / across(size.clamp(min=torch.finfo(size.dtype).tiny), image),
            direction,
        )
    return size, direction


def neumann(product: Product, vector: Tensor, alpha: float | Tensor, terms: int) -> Solved:
    """α Σ_{j=0..terms} (I - αH)ʲ v, which tends to H⁻¹v where 0 < αλ < 2 for each eigenvalue λ of H; `alpha` may be one value a row, (N,).

    Cut off, an eigendirection is solved up to the factor 1 - (1 - αλ)^(terms+1), so that near-null directions are damped. A row whose term
    is longer than the one before has met negative curvature (or α is too large): it stops there, since later terms would only grow.
    """
    rate = across(
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
        total = torch.where(across(going, total), total + term, total)
        used = used + going
    return Solved(rate * total, used)


def conjugate_gradient(
    product: Product, vector: Tensor, damping: float | Tensor, terms: int
) -> Solved:
    """(H + δI)⁻¹ v by at most `terms` steps of conjugate gradients; `damping` δ may be one value a row, (N,).

    A row stops where it is solved to rounding, or where the curvature along its search direction is not positive.
    """
    added = across(
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
        stride = across(torch.where(going, size / bend, 0.0), vector)
        solution, residual = solution + stride * direction, residual - stride * image
        used = used + going
        left = dots(residual, residual)
        direction = residual + across(torch.where(going, left / size, 0.0), vector) * direction
        size, going = left, going & (left > rounding * first)
    return Solved(solution, used)


def hypergradient(
    inner: Callable[[Tensor, Tensor], Tensor],
    outer: Callable[[Tensor], Tensor],
    features: Tensor,
    latents: Tensor,
    method: Callable[[Product, Tensor], Solved],
) -> Hypergradient:
    """What `outer(latents)` tells about features, if latents follow them as the least of `inner(features, latents)`; both losses are one
    value a row, (N,).

    (dz*/dF)ᵀ v = -(∂²L_inner/∂z∂F)ᵀ H⁻¹ v with v = ∂L_outer/∂z; `method(product, v)` gives H⁻¹ v. No graph is left behind.
    """
    features, latents = features.detach().requires_grad_(), latents.detach().requires_grad_()
    (vector,) = torch.autograd.grad(outer(latents).sum(), latents)
    (slope,) = torch.autograd.grad(inner(features, latents).sum(), latents, create_graph=True)

    def product(rows: Tensor) -> Tensor:
        return torch.autograd.grad(slope, latents, rows, retain_graph=True)[0]

    solved = method(product, vector)
    (through,) = torch.autograd.grad(slope, features, solved.solution)
    return Hypergradient(-through, slope.detach().flatten(1).norm(dim=1), solved.terms)
