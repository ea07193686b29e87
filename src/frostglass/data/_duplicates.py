"""Near copies between two sets of images: found by a descriptor, confirmed by alignment."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from frostglass.core.pixels import Pixels
from frostglass.data._alignment import (
    SMOOTHING,
    align,
    blurred,
    brightened,
    colour,
    equally_blurred,
    gains,
    grey,
    interior,
    structure,
    warped,
)
from frostglass.data._neighbours import Neighbours, descriptors, thumbnails

CANDIDATES = 2  # public images compared with each private one, and with its mirror image
PAIRS_AT_ONCE, BYTES_AT_ONCE = 512, 2**24  # of images that are compared together
SIMILAR = 0.8  # cosine of two descriptors, below which images are not compared
# Pairs are aligned at a coarse size first, where most turn out to differ.
COARSE_SIDE, COARSE_STEPS = 16, 4
ROUGH_FIT, ROUGH_COLOUR = 0.92, 0.6
FINE_SIDE, FINE_ROUNDS, FINE_STEPS = 48, 2, 2
# Limits of a copy. Colours say much: where an image is grey, structure has to say more.
STRUCTURE, COLOUR = 0.95, 0.85
GREY_STRUCTURE = 0.98


class Pair(NamedTuple):
    """A private and a public image that are similar, and how much."""

    row: int
    match: int
    structure: float
    colour: float | None  # None if an image is grey

    @property
    def copied(self) -> bool:
        if self.colour is None:
            return self.structure >= GREY_STRUCTURE
        return self.structure >= STRUCTURE and self.colour >= COLOUR


def near_copies(private: Pixels, public: Pixels) -> list[tuple[int, int]]:
    """Return rows of private images that are near copies of a public one, with the best match.

    It finds mirrored, cropped, slightly shifted or rotated, grey, brighter, re-encoded and resized
    copies; docs/audit-a-model.md says how many of each. Another photo of the same moment is not
    a copy. Images uint8 (N, C, H, W) of any size; time grows with the square root of the number of
    public images.
    """
    best: dict[int, Pair] = {}
    for pair in similar_pairs(private, public):
        if pair.copied and (pair.row not in best or pair.structure > best[pair.row].structure):
            best[pair.row] = pair
    return [(row, best[row].match) for row in sorted(best)]


def similar_pairs(private: Pixels, public: Pixels) -> Iterator[Pair]:
    """Compare each private image with the most similar public ones; yield pairs that fit."""
    index = Neighbours(descriptors(public))
    at_once = max(1, min(PAIRS_AT_ONCE, BYTES_AT_ONCE // math.prod(private.shape[1:])))
    for mirrored in (False, True):
        cosines, matches = index.nearest(descriptors(private, mirrored=mirrored), CANDIDATES)
        rows, ranks = (cosines >= SIMILAR).nonzero(as_tuple=True)
        found = matches[rows, ranks]
        for some in torch.arange(len(rows)).split(at_once):
            x, y = private[rows[some]], public[found[some]]
            yield from _compared(x.flip(-1) if mirrored else x, y, rows[some], found[some])


def _compared(x: Tensor, y: Tensor, rows: Tensor, matches: Tensor) -> Iterator[Pair]:
    """Align images x and y, uint8 (N, C, H, W), and compare those that fit roughly."""
    fit, warp = _rough_fit(x, y)
    if not len(fit):
        return
    side = min(FINE_SIDE, max(x.shape[-2:]))
    x, y = thumbnails(x[fit], side), thumbnails(y[fit], side)
    for _ in range(FINE_ROUNDS):  # brightness and position depend on each other
        first, second, _ = gains(*_moved(x, y, warp))
        a, b = brightened(x, first), brightened(y, second)
        warp = align(grey(a), grey(b), warp, FINE_STEPS)
    a, b, weight = _moved(a, b, warp)
    a, b = (blurred(each, SMOOTHING) for each in equally_blurred(a, b, weight))
    columns = (rows[fit], matches[fit], structure(a, b, weight), *colour(a, b, weight))
    for row, match, value, cosine, both in zip(*(each.tolist() for each in columns), strict=True):
        yield Pair(row, match, value, cosine if both else None)


def _rough_fit(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs are worth a closer look at a larger size, and the warps of these."""
    x, y = thumbnails(x, COARSE_SIDE), thumbnails(y, COARSE_SIDE)
    cosine, both = colour(x, y, interior(COARSE_SIDE).expand(len(x), 1, -1, -1))
    fit = (~both | (cosine >= ROUGH_COLOUR)).nonzero().flatten()
    if not len(fit):
        return fit, torch.empty(0, 2, 3)
    x, y = grey(x[fit]), grey(y[fit])
    warp = align(x, y, torch.eye(2, 3).repeat(len(x), 1, 1), COARSE_STEPS)
    _, _, value = gains(*_moved(x, y, warp))
    good = value >= ROUGH_FIT
    return fit[good], warp[good]


def _moved(x: Tensor, y: Tensor, warp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return warped images x, images y, and where to compare them, (N, 1, H, W)."""
    x, inside = warped(x, warp)
    return x, y, inside * interior(x.shape[-1])
