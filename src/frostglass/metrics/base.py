"""A score is a measured value with one row per identity and an interval; a metric turns evidence into columns of such rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.metrics._stats import interval
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

metrics = Registry("metric", "frostglass.metrics")
CHUNK = 128


@dataclass(frozen=True)
class Score:
    """The mean over identities of `values` (one per identity), with its bootstrap interval."""

    name: str
    value: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, name: str, values: Tensor) -> "Score":
        low, high = interval(values)
        return cls(
            name=name,
            value=values.double().mean().item(),
            low=low,
            high=high,
            values=tuple(values.tolist()),
        )


@dataclass(frozen=True)
class Rows:
    """One row per (identity, candidate): `columns` maps a name to values (I, K); every averaging convention can be derived from them.

    Candidates are in the order of the target's liking; `draws` (I, K) says which draw each was, where draws have an order.
    """

    labels: Tensor
    columns: Mapping[str, Tensor]
    draws: Tensor | None = None
    key: str = ""

    def score(self, name: str) -> Score:
        """Mean over candidates, then over identities."""
        return Score.of(name, self.columns[name].double().mean(1))


@dataclass(frozen=True)
class Evidence:
    """What metrics may look at. Evaluators are judges only: nothing is ever selected with them.

    `victims` (I, P, C, H, W) in [0, 1] are the true pictures where each candidate was rebuilt from one of them: of a person's K candidates the first K / P belong
    to the first picture, and so on. `embedder` tells people apart who are in none of the sets.
    """

    found: Reconstructions
    target: Target
    evaluators: Sequence[Target]
    split: Split
    victims: Tensor | None = None
    embedder: Target | None = None

    @cached_property
    def pictures(self) -> Tensor:
        """All reconstructions in one row, as a viewer would get them: 8-bit pictures."""
        return self.found.images.flatten(0, 1).mul(255).round().div(255)

    @cached_property
    def target_logits(self) -> Tensor:
        return outputs(self.target, self.pictures)[0]

    @cached_property
    def evaluator_outputs(self) -> list[tuple[Tensor, Tensor]]:
        return [outputs(evaluator, self.pictures) for evaluator in self.evaluators]

    @cached_property
    def originals(self) -> Tensor:
        """The true picture behind each of `pictures`, in the same order."""
        return self.handed_on(self.true_pictures)

    @property
    def true_pictures(self) -> Tensor:
        """The victims' pictures, which must be there."""
        if self.victims is None:
            raise ConfigError(
                "no victims' pictures to compare with: only an attack on features rebuilds given pictures, leave this metric out"
            )
        return self.victims

    def handed_on(self, values: Tensor) -> Tensor:
        """What is known of each true picture, (I, P, ...), handed on to every candidate for it, flat as `pictures`."""
        people, candidates = self.found.images.shape[:2]
        if len(values) != people or not values.shape[1] or candidates % values.shape[1]:
            raise RunError(
                f"{len(values)} people with {values.shape[1]} pictures each cannot be behind {people} people with {candidates} candidates each: "
                "as many people and a whole number of tries for each picture are needed"
            )
        if self.found.draws is not None:
            raise RunError(
                "these candidates are sorted by the target's liking: which picture each was rebuilt from is not known any more"
            )
        return values.repeat_interleave(candidates // values.shape[1], 1).flatten(0, 1)

    def table(self, flat: Tensor) -> Tensor:
        """A value per picture as (I, K)."""
        return flat.unflatten(0, self.found.images.shape[:2])


class Metric(Protocol):
    """A frozen set of parameters that measures columns of rows."""

    name: ClassVar[str]

    def columns(self, evidence: Evidence) -> dict[str, Tensor]: ...


def outputs(judge: Target, images: Tensor | Images) -> tuple[Tensor, Tensor]:
    """Logits and features of many pictures, in evaluation mode and without gradients."""
    device = device_of(judge.module)
    logits, features = [], []
    with frozen(judge.module), torch.no_grad():
        for index in torch.arange(len(images)).split(CHUNK):
            batch = images.floats(index) if isinstance(images, Images) else images[index]
            some_logits, some_features = judge.outputs(batch.to(device))
            logits.append(some_logits.cpu())
            features.append(some_features.cpu())
    return torch.cat(logits), torch.cat(features)


def nearest(queries: Tensor, references: Tensor) -> Tensor:
    """Euclidean distance from each query to its nearest reference.

    The nearest is found by matrix products, whose distances are too coarse near zero, so the distance itself is computed again.
    """
    return torch.cat(
        [
            (part - references[torch.cdist(part, references).argmin(1)]).norm(dim=1)
            for part in queries.split(1024)
        ]
    )


def measure(chosen: Sequence[Metric], evidence: Evidence) -> Rows:
    """All columns of all chosen metrics; a value that is not finite fails the step, because a skipped metric flatters a defense."""
    columns: dict[str, Tensor] = {}
    for metric in chosen:
        for name, values in metric.columns(evidence).items():
            if not values.isfinite().all():
                raise RunError(
                    f"metric {metric.name}: {name} is not finite for {int((~values.isfinite()).sum())} reconstructions"
                )
            columns[name] = values.float()
    return Rows(labels=evidence.found.labels, columns=columns, draws=evidence.found.draws)
