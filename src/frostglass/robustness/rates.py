"""Shares of images, with intervals over people and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from frostglass.metrics._stats import interval_over_seeds


@dataclass(frozen=True)
class Rate:
    """How many of a person's images were tried, and how many of these succeeded, (S, I) counts.

    S are seeds, I people. The value is the share of all images that were tried. Images of a person
    are not independent, so intervals are over people, and over seeds if there are several.
    """

    hits: Tensor
    tried: Tensor
    queries: int = 0
    key: str = ""

    @classmethod
    def of(cls, hits: Tensor, tried: Tensor, labels: Tensor, people: int, queries: int) -> "Rate":
        """Count the images (N,) of each person."""

        def count(rows: Tensor) -> Tensor:
            return torch.bincount(labels[rows], minlength=people)[None]

        return cls(count(hits & tried), count(tried), queries)

    @classmethod
    def joined(cls, rates: Sequence["Rate"]) -> "Rate":
        """Return the rates of several seeds as one."""
        return cls(
            torch.cat([rate.hits for rate in rates]),
            torch.cat([rate.tried for rate in rates]),
            sum(rate.queries for rate in rates),
        )

    @property
    def value(self) -> float:
        return int(self.hits.sum()) / self.images

    @property
    def images(self) -> int:
        """Number of images that were tried, over all seeds."""
        return int(self.tried.sum())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval.

        A person has r + (hits - r · tried) / mean(tried) instead of a share of their own: the mean
        of these is the value r, although people have different numbers of images, or none.
        """
        kept = self.tried.sum(0) > 0
        hits, tried = self.hits[:, kept].double(), self.tried[:, kept].double()
        share = hits.sum() / tried.sum()
        low, high = interval_over_seeds(share + (hits - share * tried) / tried.mean())
        return max(low, 0.0), min(high, 1.0)

    def __repr__(self) -> str:
        low, high = (f"{100 * bound:.1f}" for bound in self.interval)
        return f"{100 * self.value:.1f} % ({low} to {high}), {self.images} images"
