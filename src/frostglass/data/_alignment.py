"""Alignment of pairs of images, and how alike two aligned images are."""

import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)
MOST_MOVED = 0.25  # of half a side, for shifts; also the limit of scaling and rotation
MOST_BENT = 0.05  # limit of stretch and shear: without one, any oval would fit any other
MOST_STEP = 0.1
EDGE = 0.09  # share of a side that is not compared, at each edge: shifts and rotations fill it
GAINS = (1.15, 1.3, 1.5)  # changes of brightness that may have clipped bright pixels
BLURS = (0.8, 1.2)  # in pixels: what a copy may have lost when it was resized
SMOOTHING = 0.7  # in pixels, of both images: most of what JPEG adds is finer
WINDOW = 5  # pixels a side, within which structure is compared
NOISE = 4e-4  # variance of a window that counts half
FLAT = 0.01  # standard deviation below which an image is nothing but shading
COLOURED = 0.02  # root mean square of colour, below which an image is grey


def grey(images: Tensor) -> Tensor:
    """Return the brightness of images, (N, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    return (images * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


def align(x: Tensor, y: Tensor, warp: Tensor, steps: int) -> Tensor:
    """Improve affine warps (N, 2, 3) that map grey images `x` onto `y`, by Gauss-Newton steps.

    Each step fits brightness and contrast too, because a difference in them would move the warp.
    """
    side = x.shape[-1]
    one_u_v = _surfaces(side)[:3]
    area = interior(side).flatten()
    target = y.flatten(2).transpose(1, 2)
    for _ in range(steps):
        moved, inside = warped(x, warp)
        padded = F.pad(moved, (1, 1, 1, 1), mode="replicate") * (side / 4)
        slope_u = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]).flatten(2)
        slope_v = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]).flatten(2)
        flat = moved.flatten(2)
        columns = [flat, torch.ones_like(flat), slope_u * one_u_v, slope_v * one_u_v]
        system = torch.cat(columns, dim=1)
        weighted = system * (inside.flatten(2) * area)
        normal = weighted @ system.transpose(1, 2) + 1e-3 * torch.eye(8)
        fit = torch.linalg.solve(normal, weighted @ target)[..., 0]
        moves = (fit[:, 2:] / fit[:, :1].clamp(min=0.2)).clamp(-MOST_STEP, MOST_STEP)
        shift, linear = moves.view(-1, 2, 3).split([1, 2], dim=2)
        # The slopes are those of the warped image, so the step is applied before the warp.
        warp = _limited(warp + warp[:, :, :2] @ torch.cat([linear, shift], dim=2))
    return warp


def _limited(warp: Tensor) -> Tensor:
    """Keep warps near the identity, with little stretch and shear."""
    a, b, u, c, d, v = warp.flatten(1).unbind(1)
    scale = 1 + ((a + d) / 2 - 1).clamp(-MOST_MOVED, MOST_MOVED)
    turn = ((c - b) / 2).clamp(-MOST_MOVED, MOST_MOVED)
    stretch = ((a - d) / 2).clamp(-MOST_BENT, MOST_BENT)
    shear = ((b + c) / 2).clamp(-MOST_BENT, MOST_BENT)
    u, v = u.clamp(-MOST_MOVED, MOST_MOVED), v.clamp(-MOST_MOVED, MOST_MOVED)
    rows = [scale + stretch, shear - turn, u, shear + turn, scale - stretch, v]
    return torch.stack(rows, dim=1).view(-1, 2, 3)


def warped(x: Tensor, warp: Tensor) -> tuple[Tensor, Tensor]:
    """Return warped images, and 1 where they have content and 0 elsewhere, (N, 1, H, W)."""
    grid = F.affine_grid(warp, list(x.shape), align_corners=False)
    inside = (grid.abs() <= 1).all(-1).float()[:, None]
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False), inside


def interior(side: int) -> Tensor:
    """Return 1 where images are compared and 0 at their edges, (side, side)."""
    edge = max(1, round(side * EDGE))
    return F.pad(torch.ones(side - 2 * edge, side - 2 * edge), (edge,) * 4)


def brightened(x: Tensor, gain: Tensor) -> Tensor:
    """Multiply each image by its gain, and clip."""
    return (x * gain[:, None, None, None]).clamp(max=1)


def gains(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gains of images x and y that make them fit best, and their correlation then.

    At most one of the two gains is not 1: the image that was not clipped is clipped like the other.
    """
    best = correlation(x, y, weight)
    first, second = torch.ones_like(best), torch.ones_like(best)
    for gain in GAINS:
        amount = torch.full_like(best, gain)
        for one, other, changed, kept in ((x, y, first, second), (y, x, second, first)):
            value = correlation(brightened(one, amount), other, weight)
            better = value > best
            best = torch.maximum(best, value)
            changed[better], kept[better] = gain, 1.0
    return first, second, best


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Blur images by a Gaussian of standard deviation `sigma` pixels; edges are repeated."""
    side, reach = x.shape[-1], round(3 * sigma)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2).repeat(side, 1)
    sources = (torch.arange(side)[:, None] + offsets).clamp(0, side - 1)
    matrix = torch.zeros(side, side).scatter_add(1, sources, weights / weights[0].sum())
    return matrix @ x @ matrix.T


def equally_blurred(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blur one image of each pair as the other may have been blurred, if they fit better then."""
    best, (first, second) = correlation(x, y, weight), (x, y)
    for sigma in BLURS:
        for one, other in ((blurred(x, sigma), y), (x, blurred(y, sigma))):
            value = correlation(one, other, weight)
            better = (value > best)[:, None, None, None]
            best = torch.maximum(best, value)
            first, second = torch.where(better, one, first), torch.where(better, other, second)
    return first, second


def correlation(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted correlation of the grey values of images, (N,)."""
    x, y, weight = grey(x).flatten(1), grey(y).flatten(1), weight.flatten(1)
    total = weight.sum(1, keepdim=True).clamp(min=1)
    x = (x - (x * weight).sum(1, keepdim=True) / total) * weight
    y = (y - (y * weight).sum(1, keepdim=True) / total) * weight
    return (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt().clamp(min=1e-6)


def structure(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return how well grey values agree within windows, (N,); 0 for images of mere shading.

    It is the mean of 2 cov / (var + var) over all windows in which either image has contrast, at
    equal contrast of the whole images. What only one image shows counts against it, however small.
    """
    x, y = (_without_shading(grey(image), weight) for image in (x, y))
    area = weight.flatten(1).sum(1).clamp(min=1)
    levels = [((image**2 * weight).flatten(1).sum(1) / area).sqrt() for image in (x, y)]
    ratio = (levels[1].clamp(min=1e-3) / levels[0].clamp(min=1e-3)).sqrt()[:, None, None, None]
    x, y = x * ratio, y / ratio
    whole = (_window_means(weight) > 1 - 1e-4).float()
    mean_x, mean_y = _window_means(x), _window_means(y)
    covariance = (_window_means(x * y) - mean_x * mean_y) * whole
    variance = (_window_means(x * x + y * y) - mean_x**2 - mean_y**2) / 2 * whole
    shared = (covariance / (variance + NOISE)).flatten(1).sum(1)
    most = (variance / (variance + NOISE)).flatten(1).sum(1)
    return shared / most.clamp(min=1e-6) * (torch.minimum(*levels) > FLAT)


def colour(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine between the colours of images, and whether both have any, (N,) each."""
    one, other = (((image - grey(image)) * weight).flatten(1) for image in (x, y))
    size = weight.flatten(1).sum(1).clamp(min=1).sqrt()
    lengths = one.square().sum(1).sqrt(), other.square().sum(1).sqrt()
    cosine = (one * other).sum(1) / (lengths[0] * lengths[1]).clamp(min=1e-6)
    return cosine, torch.minimum(*lengths) / size > COLOURED


def _without_shading(x: Tensor, weight: Tensor) -> Tensor:
    """Subtract the quadratic surface that fits best: two plain walls are not copies."""
    surfaces = _surfaces(x.shape[-1])
    weighted = surfaces * weight.flatten(2)
    normal = weighted @ surfaces.T + 1e-3 * torch.eye(len(surfaces))
    fit = torch.linalg.solve(normal, weighted @ x.flatten(2).transpose(1, 2))
    return x - (fit.transpose(1, 2) @ surfaces).view_as(x)


def _surfaces(side: int) -> Tensor:
    """Return the terms of a quadratic surface over [-1, 1] x [-1, 1], (6, side * side)."""
    axis = (torch.arange(side) + 0.5) / side * 2 - 1
    v, u = (each.flatten() for each in torch.meshgrid(axis, axis, indexing="ij"))
    return torch.stack([torch.ones_like(u), u, v, u * v, u * u, v * v])


def _window_means(x: Tensor) -> Tensor:
    side = x.shape[-1]
    matrix = torch.ones(side, side).triu().tril(WINDOW - 1)[: side - WINDOW + 1] / WINDOW
    return matrix @ x @ matrix.T
