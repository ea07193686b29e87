"""Precision, recall, density and coverage of each person's reconstructions."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.metrics._neighbours import prdc
from frostglass.metrics.base import Evidence, Metric, metrics


@metrics.register
@parameters
class Prdc(Metric):
    """Do the reconstructions of a person lie among the person's own images, and cover them?

    Of each person alone, among the first evaluator's features, with B(a) the ball around a that
    reaches its k-th nearest neighbour in its own set. Column `precision`: 1 if a reconstruction
    lies in B of any private training image of the person. Column `density`: in how many of them,
    divided by k; it may exceed 1. Column `recall`, one value per person: the share of private
    images in B of any reconstruction. Column `coverage`, one value per person: the share of private
    images whose B holds a reconstruction. Precision and density say how faithful reconstructions
    are, recall and coverage how much of the person's variety they show.

    Use: to see how varied the reconstructions of a person are.
    Paper: Kynkäänniemi et al., Improved Precision and Recall Metric, NeurIPS 2019,
    arXiv 1904.06991; Naeem et al., Reliable Fidelity and Diversity Metrics, ICML 2020,
    arXiv 2002.09797. Per class with k = 3: Struppek et al., Plug & Play Attacks, ICML 2022,
    arXiv 2201.12179.

    Differs: PPA's code takes class 0 for all classes together, and averages density over real
    images, where its definition averages over generated ones.

    Args:
        neighbours: k. Everyone needs more private images, and more reconstructions, than this.
    """

    title: ClassVar[str] = "Precision, recall, density, coverage"

    neighbours: Annotated[int, Field(ge=1)] = 3

    def problems(self, candidates: int) -> list[str]:
        if candidates > self.neighbours:
            return []
        return [
            f"prdc with {self.neighbours} neighbours needs at least {self.neighbours + 1} "
            f"reconstructions of each person, got {candidates}: keep more, or lower "
            "prdc.neighbours"
        ]

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        rows: dict[str, list[Tensor]] = {}
        for place, mine, own in evidence.by_person():
            if min(len(mine), len(own)) <= self.neighbours:
                label = int(evidence.reconstructions.labels[place])
                raise DataError(
                    f"prdc with {self.neighbours} neighbours needs at least {self.neighbours + 1} "
                    f"private training images and reconstructions of each person, got "
                    f"{len(own)} and {len(mine)} of "
                    f"{evidence.split.classes[label]!r}: lower prdc.neighbours"
                )
            measured = prdc(
                evidence.private_features[own], evidence.features[mine], self.neighbours
            )
            for name, values in measured.items():
                rows.setdefault(name, []).append(values)
        columns = {}
        for name, parts in rows.items():
            if name in ("precision", "density"):
                columns[name] = torch.stack(parts)
            else:
                columns[name] = evidence.per_person(torch.stack([part.mean() for part in parts]))
        return columns
