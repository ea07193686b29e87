"""Near copies between two sets of images: candidates by an index, verified by alignment."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.data._images import fingerprints

SIDE = 24  # pixels a side of the images that are compared
CANDIDATES = 4  # nearest public images of each private one, each way it is looked at
PROBES = 8  # cells of the index that are searched for an image
STEPS = 6  # of the alignment
ALIKE = 0.985
GAINS = (1.0, 1.15, 1.3, 1.5)
LUMA = (0.299, 0.587, 0.114)
ZOOM = 0.9
ROWS_AT_ONCE = 1024


def near_copies(private: Tensor, public: Tensor) -> list[tuple[int, int]]:
    """Return rows of private images that are near copies of a public one, with the best match."""
    best: dict[int, tuple[float, int]] = {}
    ours, theirs = thumbnails(private), thumbnails(public)
    for row, match, alike in _verified(ours, theirs, *_candidates(ours, theirs)):
        if alike >= ALIKE and alike > best.get(row, (0.0, 0))[0]:
            best[row] = (alike, match)
    return [(row, best[row][1]) for row in sorted(best)]


def thumbnails(pixels: Tensor) -> Tensor:
    """Return images as float32 (N, C, SIDE, SIDE) in [0, 1]."""
    size = (SIDE, SIDE)
    return torch.cat(
        [
            F.interpolate(
                part.float() / 255, size=size, mode="bilinear", antialias=True, align_corners=False
            )
            for part in pixels.split(ROWS_AT_ONCE)
        ]
    )


def zoomed(images: Tensor) -> Tensor:
    grid = F.affine_grid(
        torch.tensor([[[ZOOM, 0, 0], [0, ZOOM, 0.0]]]).expand(len(images), 2, 3),
        list(images.shape),
        align_corners=False,
    )
    return F.grid_sample(images, grid, align_corners=False)


def descriptor(images: Tensor) -> Tensor:
    return fingerprints(images * 255)


def _candidates(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows, matches, flipped"""
    rows, matches, flips = [], [], []
    near_t = descriptor(theirs)
    zoom_t = descriptor(zoomed(theirs))
    for flip in (False, True):
        mine = ours.flip(-1) if flip else ours
        near, zoom = descriptor(mine), descriptor(zoomed(mine))
        for a, b in ((near, near_t), (zoom, near_t), (near, zoom_t)):
            found = nearest(a, b)
            rows.append(torch.arange(len(ours))[:, None].expand_as(found).flatten())
            matches.append(found.flatten())
            flips.append(torch.full_like(matches[-1], flip))
    table = torch.stack([torch.cat(rows), torch.cat(matches), torch.cat(flips)], 1)
    table = table[table[:, 1] >= 0].unique(dim=0)
    return table[:, 0], table[:, 1], table[:, 2]


def nearest(queries: Tensor, points: Tensor) -> Tensor:
    return torch.cat(
        [
            (q @ points.T).topk(min(CANDIDATES, len(points)), 1).indices
            for q in queries.split(ROWS_AT_ONCE)
        ]
    )


def _verified(
    ours: Tensor, theirs: Tensor, rows: Tensor, matches: Tensor, flips: Tensor
) -> Iterator[tuple[int, int, float]]:
    for part in torch.arange(len(rows)).split(ROWS_AT_ONCE):
        x = ours[rows[part]]
        x = torch.where(flips[part].bool()[:, None, None, None], x.flip(-1), x)
        alike = likeness(x, theirs[matches[part]])
        yield from zip(rows[part].tolist(), matches[part].tolist(), alike.tolist(), strict=True)


def luma(images: Tensor) -> Tensor:
    """(N, 1, H, W)"""
    if images.shape[1] == 1:
        return images
    return (images * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


def likeness(x: Tensor, y: Tensor) -> Tensor:
    """Correlation of y with x, aligned, at the best gain."""
    warp = align(luma(x), luma(y))
    moved, inside = warped(x, warp)
    best = torch.zeros(len(x))
    for gain in GAINS:
        best = torch.maximum(best, correlation(luma((moved * gain).clamp(max=1)), luma(y), inside))
        best = torch.maximum(best, correlation(luma(moved), luma((y * gain).clamp(max=1)), inside))
    return best


def warped(x: Tensor, warp: Tensor) -> tuple[Tensor, Tensor]:
    grid = F.affine_grid(warp, list(x.shape), align_corners=False)
    inside = (grid.abs() <= 1).all(-1).float().flatten(1)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False), inside


def align(x: Tensor, y: Tensor) -> Tensor:
    """Gauss-Newton."""
    count, _, side, _ = x.shape
    warp = torch.eye(2, 3).repeat(count, 1, 1)
    axis = (torch.arange(side) + 0.5) / side * 2 - 1
    v, u = (g.flatten() for g in torch.meshgrid(axis, axis, indexing="ij"))
    basis = torch.stack([u, v, torch.ones_like(u)])  # (3, n)
    target = y.flatten(1)
    for _ in range(STEPS):
        moved, inside = warped(x, warp)
        slope_y, slope_x = torch.gradient(moved[:, 0], spacing=2 / side, dim=(1, 2))
        columns = torch.cat(
            [
                moved.flatten(2),
                torch.ones(count, 1, side * side),
                slope_x.flatten(1)[:, None] * basis,
                slope_y.flatten(1)[:, None] * basis,
            ],
            1,
        )  # (N, 8, n)
        weighted = columns * inside[:, None]
        system = weighted @ columns.transpose(1, 2) + 1e-4 * torch.eye(8)
        answer = torch.linalg.solve(system, (weighted @ target[:, :, None]))[..., 0]
        gain = answer[:, :1].clamp(min=0.2)
        # The gradient is of the warped image, so the step composes with the warp.
        step = (answer[:, 2:] / gain).view(count, 2, 3).clamp(-0.1, 0.1)
        warp = compose(warp, step)
    return warp


def compose(warp: Tensor, step: Tensor) -> Tensor:
    """warp(u + step(u))"""
    linear = warp[:, :, :2]
    return warp + linear @ step


def correlation(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    x, y = x.flatten(1), y.flatten(1)
    total = weight.sum(1, keepdim=True).clamp(min=1)
    x = (x - (x * weight).sum(1, keepdim=True) / total) * weight
    y = (y - (y * weight).sum(1, keepdim=True) / total) * weight
    value = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)).clamp(min=1e-6)
    return value * (total[:, 0] > 0.6 * x.shape[1])
