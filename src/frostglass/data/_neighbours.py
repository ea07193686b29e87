"""Descriptors of images, and the nearest ones among many."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.pixels import Pixels, RowsInOne, chunks
from frostglass.data._alignment import grey
from frostglass.runtime.seeding import generator_for

SIDE = 24  # pixels a side of the thumbnail that is described
EDGE = 3  # pixels that are left out: shifts and rotations fill them
BLOCKS = 4  # a side
DIRECTIONS = 8
VALUES_AT_ONCE = 2**22
EXACT = 4096  # points; with more, only some cells are searched
PROBES = 8  # cells that are searched for a query
ROUNDS = 5  # of k-means
SAMPLE = 32  # points per cell that k-means learns from
QUERIES_AT_ONCE = 8192


def thumbnails(pixels: Tensor, side: int) -> Tensor:
    """Resize images uint8 (N, C, H, W) to floats (N, C, side, side) in [0, 1]."""
    parts = chunks(len(pixels), pixels.shape[1:], VALUES_AT_ONCE)
    return torch.cat([_resized(pixels[part].float() / 255, side) for part in parts])


def _resized(images: Tensor, side: int) -> Tensor:
    if images.shape[-2:] == (side, side):
        return images
    return F.interpolate(
        images, size=(side, side), mode="bilinear", antialias=True, align_corners=False
    )


def descriptors(pixels: Pixels, *, mirrored: bool = False) -> Tensor:
    """Return a unit vector per image uint8 (N, C, H, W), or per mirror image, (N, 128).

    A histogram of the directions of the gradient in each of 4 x 4 blocks (HOG). It hardly changes
    with brightness, contrast, colour and small shifts. A constant image has zeros.
    """
    vectors = RowsInOne(len(pixels))
    for part in chunks(len(pixels), pixels.shape[1:], VALUES_AT_ONCE):
        thumbs = _resized(grey(pixels[part].float() / 255), SIDE)[:, 0]
        vectors.add(_histograms(thumbs.flip(-1) if mirrored else thumbs))
    return vectors.tensor


def _histograms(thumbs: Tensor) -> Tensor:
    inner = slice(EDGE, SIDE - EDGE)
    after, before = slice(EDGE + 1, SIDE - EDGE + 1), slice(EDGE - 1, SIDE - EDGE - 1)
    slopes = torch.stack(
        [
            thumbs[:, inner, after] - thumbs[:, inner, before],
            thumbs[:, after, inner] - thumbs[:, before, inner],
        ],
        dim=1,
    ).flatten(2)
    size = slopes.square().sum(1, keepdim=True).sqrt()
    # Strong edges count little more than weak ones; below a level or two there is only noise.
    typical = size.square().mean(2, keepdim=True).sqrt()
    slopes, size = (each / (size + typical + 2e-3) for each in (slopes, size))
    angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
    along = torch.stack([angles.cos(), angles.sin()], dim=1) @ slopes
    votes = (along - size / 2).clamp(min=0)  # within 60 degrees
    roots = F.normalize((votes @ _blocks()).flatten(1)).sqrt()
    return F.normalize(roots - roots.mean(1, keepdim=True))


def _blocks() -> Tensor:
    """Return how much each pixel counts in each block; blocks overlap by half, (n, 16)."""
    pitch = SIDE / BLOCKS
    centres = (torch.arange(BLOCKS) + 0.5) * pitch
    pixels = (torch.arange(SIDE) + 0.5)[EDGE : SIDE - EDGE]
    share = (1 - (pixels[:, None] - centres).abs() / pitch).clamp(min=0)
    return torch.einsum("ia,jb->ijab", share, share).reshape(len(share) ** 2, BLOCKS**2)


class Neighbours:
    """An index of unit vectors.

    Up to `EXACT` vectors are all compared with a query. More are divided into cells by k-means, as
    many as the square root of their number, and a query is compared with those of the nearest
    `PROBES` cells, so time grows with the square root. Always the same for the same vectors.
    """

    def __init__(self, points: Tensor):
        self.points = points
        self.centres = points[:0]
        if len(points) > EXACT:
            self.centres = _centres(points, round(math.sqrt(len(points))))
            homes = torch.cat([(part @ self.centres.T).argmax(1) for part in points.split(4096)])
            sizes = torch.bincount(homes, minlength=len(self.centres)).tolist()
            self.cells = homes.argsort(stable=True).split(sizes)

    def nearest(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest cosines of each query, best first, and their points, (N, count) each.

        Where fewer points were compared, cosines are -1.
        """
        count = min(count, len(self.points))
        search = self._exact if len(self.points) <= EXACT else self._among_cells
        found = [search(part, count) for part in queries.split(QUERIES_AT_ONCE)]
        return torch.cat([values for values, _ in found]), torch.cat([rows for _, rows in found])

    def _exact(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        parts = [(part @ self.points.T).topk(count) for part in queries.split(1024)]
        return torch.cat([top.values for top in parts]), torch.cat([top.indices for top in parts])

    def _among_cells(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        probes = (queries @ self.centres.T).topk(min(PROBES, len(self.centres))).indices
        values = torch.full((*probes.shape, count), -1.0)
        rows = torch.zeros(values.shape, dtype=torch.long)
        for number, cell in enumerate(self.cells):
            asking, slot = (probes == number).nonzero(as_tuple=True)
            top = (queries[asking] @ self.points[cell].T).topk(min(count, len(cell)))
            values[asking, slot, : top.values.shape[1]] = top.values
            rows[asking, slot, : top.values.shape[1]] = cell[top.indices]
        best = values.flatten(1).topk(count)
        return best.values, rows.flatten(1).gather(1, best.indices)


def _centres(points: Tensor, count: int) -> Tensor:
    """Return the centres of `count` cells, by k-means on a sample."""
    rng = generator_for(0, "neighbours")
    sample = points[torch.randperm(len(points), generator=rng)[: SAMPLE * count]]
    centres = sample[:count]
    for _ in range(ROUNDS):
        homes = (sample @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add(0, homes, sample)
        centres = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums), centres)
    return centres
