"""A head with several units for each class, one for each person who is trained as that class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PeopleHead(nn.Module):
    """A class's logit is the log-sum-exp of its units: p(class) is the sum of p(unit).

    Unit number `class · units_per_class + member` belongs to that class. `separate` returns all
    units instead of the classes.
    """

    replaces_head = True

    def __init__(self, features: int, classes: int, units_per_class: int):
        super().__init__()
        self.units_per_class = units_per_class
        self.separate = False
        self.units = nn.Linear(features, classes * units_per_class)

    def forward(self, features: Tensor) -> Tensor:
        units = self.units(features.flatten(1))
        return units if self.separate else by_class(units, self.units_per_class).logsumexp(2)


def by_class(units: Tensor, each: int) -> Tensor:
    """Return units (N, C · each) as (N, C, each)."""
    return units.unflatten(1, (-1, each))


def within_class(units: Tensor, people: Tensor, each: int) -> Tensor:
    """Return the mean of -ln p(unit | class) of people's numbers, which are those of their units.

    Cross-entropy of the classes and this are together cross-entropy of all units.
    """
    rows = torch.arange(len(people), device=people.device)
    return F.cross_entropy(by_class(units, each)[rows, people // each], people % each)
