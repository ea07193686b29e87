"""The L1 ball around a start, which a search must not leave."""

import torch
from torch import Tensor


def project_l1(deviation: Tensor, radius: float) -> Tensor:
    """Project each row of `deviation` (N, D) onto the ball Σ|d| ≤ radius.

    Rows inside are returned unchanged. A row outside is shrunk by one θ in every coordinate, d ←
    sign(d) max(|d| - θ, 0). With |d| in descending order u and S_k the sum of its first k, θ =
    max_k (S_k - radius) / k.
    """
    sizes = deviation.abs().double()
    outside = sizes.sum(1) > radius
    if not outside.any():
        return deviation  # the usual case, without sorting
    counts = torch.arange(1, deviation.shape[1] + 1, device=deviation.device)
    sums = sizes.sort(dim=1, descending=True).values.cumsum(1)
    # Rounding must not leave the ball, or a second projection would change the row again: aim a
    # little inside.
    slack = (
        torch.finfo(deviation.dtype).eps * radius
        + torch.finfo(torch.double).eps * deviation.shape[1] ** 0.5 * sums[:, -1:]
    )
    theta = ((sums - (radius - slack).clamp(min=0)) / counts).amax(1, keepdim=True)
    shrunk = (sizes - theta).clamp(min=0).copysign(deviation.double()).to(deviation.dtype)
    return torch.where(outside[:, None], shrunk, deviation)
