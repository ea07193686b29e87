"""The contract of metrics: evidence goes in, one row per identity and candidate comes out."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.assets import Asset
from frostglass.core.display import table
from frostglass.core.errors import ConfigError, DataError, RunError
from frostglass.core.method import Method
from frostglass.core.pixels import ByteImages, RowsInOne, as_bytes, shown_together
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Reconstructions, Split, Target, match_shape
from frostglass.evaluators.verifier import Verifier, enrol
from frostglass.metrics._stats import interval
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

# Columns with these prefixes are shares of 1.
HEADER = ("score", "value", "95 % interval", "people")
SHARES = (
    *("verified", "strict", "top1", "top5", "target_"),
    *("precision", "recall", "coverage", "knowledge", "outcome_"),
)


@dataclass(frozen=True)
class Score:
    """The mean over identities of `values` (one per identity), with its bootstrap interval.

    A value of the whole set, such as FID, has no `values`; its interval is a jackknife's.
    """

    name: str
    value: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, name: str, values: Tensor) -> "Score":
        low, high = interval(values)
        mean = values.double().mean().item()
        return cls(name=name, value=mean, low=low, high=high, values=tuple(values.tolist()))

    def _cells(self) -> tuple[str, str, str]:
        """Name, value and interval as text; shares are in percent."""
        if self.name.startswith(SHARES):
            value, low, high = (f"{100 * x:.1f}" for x in (self.value, self.low, self.high))
            return self.name, f"{value} %", f"{low} to {high}"
        return self.name, f"{self.value:.4g}", f"{self.low:.4g} to {self.high:.4g}"

    def __repr__(self) -> str:
        name, value, between = self._cells()
        people = f"{len(self.values)} people" if self.values else "the whole set"
        return f"{name}: {value} ({between}), {people}"

    def _repr_html_(self) -> str:
        return table(HEADER, [(*self._cells(), len(self.values) or "all")])


@dataclass(frozen=True)
class Rows:
    """One row per (identity, candidate): `columns` maps a name to values (I, K).

    Every averaging convention can be derived from them. Candidates are in the order of the attack's
    guesses; `draws` (I, K) gives the draw number of each, where draws have an order. `summaries`
    are scores of the whole set that no row has.
    """

    labels: Tensor
    columns: Mapping[str, Tensor]
    draws: Tensor | None = None
    key: str = ""
    summaries: Mapping[str, Score] = field(default_factory=dict)

    def score(self, name: str) -> Score:
        """Average over candidates, then over identities; or return a summary."""
        if name in self.summaries:
            return self.summaries[name]
        return Score.of(name, self.columns[name].double().mean(1))

    def __repr__(self) -> str:
        candidates = next((values.shape[1] for values in self.columns.values()), 0)
        names = ", ".join((*self.columns, *self.summaries)) or "no columns"
        return f"Rows: {len(self.labels)} people × {candidates} candidates: {names}"

    def _repr_html_(self) -> str:
        rows = [(*self.score(name)._cells(), len(self.labels)) for name in self.columns]
        return table(HEADER, [*rows, *((*e._cells(), "all") for e in self.summaries.values())])


@dataclass(frozen=True)
class Evidence:
    """What metrics may look at. Evaluators only measure: nothing is ever selected with them.

    Args:
        reconstructions: the reconstructions to measure.
        target: the attacked model.
        evaluators: classifiers of the private people, then embedders (targets without classes)
            that never saw them; no attack has access to either.
        split: the private and public images.
        victims: true images (I, P, C, H, W) in [0, 1], if each candidate reconstructs one of them.
            Of a person's K candidates the first K / P belong to the first image, and so on.
        embedder: a network that distinguishes people and was trained on others than the private.
        embeds: whether the latents of the reconstructions are embeddings of the embedder.
        verifiers: one per evaluator, as `enrol` returns them; computed if needed and not given.
        draws: two sets of prior-only draws, as many images as reconstructions.
    """

    reconstructions: Reconstructions
    target: Target
    evaluators: Sequence[Target]
    split: Split
    victims: Tensor | None = None
    embedder: Target | None = None
    embeds: bool = False
    verifiers: Sequence[Verifier] = ()
    draws: tuple[Tensor | ByteImages, Tensor | ByteImages] | None = None

    @cached_property
    def enrolled(self) -> list[Verifier]:
        """One verifier per evaluator."""
        return list(self.verifiers) or [enrol(each, self.split) for each in self.evaluators]

    @cached_property
    def images(self) -> ByteImages:
        """All reconstructions (I · K, C, H, W), rounded to 8 bits as saved images are.

        They are read where they are indexed: take some at a time, such as `images.split(128)`.
        """
        return as_bytes(self.reconstructions.images).flatten(0, 1)

    @property
    def labels(self) -> Tensor:
        """The attacked class of each of `images`."""
        candidates = self.reconstructions.images.shape[1]
        return self.reconstructions.labels.repeat_interleave(candidates)

    @cached_property
    def target_logits(self) -> Tensor:
        return outputs(self.target, self.images)[0]

    @cached_property
    def evaluator_outputs(self) -> list[tuple[Tensor, Tensor]]:
        """Logits and features of `images` by each classifier; embedders come after those."""
        return [outputs(each, self.images) for each in self.evaluators if each.classes]

    @cached_property
    def private(self) -> Images:
        """The private training images of the attacked people; everyone must have some."""
        images, people = self.split.train, self.reconstructions.labels
        own = images.at(torch.isin(images.labels, people).nonzero().flatten())
        if missing := sorted(set(people.tolist()) - set(own.labels.tolist())):
            raise DataError(
                f"expected private training images of everyone attacked, got none of "
                f"{images.names[missing[0]]!r}: add images, or attack others"
            )
        return own

    @cached_property
    def private_features(self) -> Tensor:
        """The first evaluator's features of `private` (N, F)."""
        return finite(outputs(self.first_evaluator, self.private)[1], "private images")

    @cached_property
    def features(self) -> Tensor:
        """The first evaluator's features of `images` (I · K, F)."""
        _ = self.first_evaluator
        return finite(self.evaluator_outputs[0][1], "reconstructions")

    @property
    def first_evaluator(self) -> Target:
        """The classifier whose features images are compared in."""
        if not self.evaluators or not self.evaluators[0].classes:
            raise ConfigError(
                "expected a classifier as the first evaluator, whose features images are compared "
                "in, got none. Add one."
            )
        return self.evaluators[0]

    def by_person(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each attacked person's place, and places of their `images` and `private` images."""
        candidates = self.reconstructions.images.shape[1]
        for place, label in enumerate(self.reconstructions.labels.tolist()):
            mine = torch.arange(place * candidates, (place + 1) * candidates)
            yield place, mine, (self.private.labels == label).nonzero().flatten()

    @cached_property
    def originals(self) -> Tensor:
        """The true image of each of `images`, in the same order.

        In an audit of a model, the person's private training image with the least mean square
        difference: no reconstruction is of one image.
        """
        if self.victims is not None:
            return self.per_candidate(self.victims)
        result = []
        for _, mine, own in self.by_person():
            private = self.private.floats(own)
            ours = match_shape(self.images[mine], self.private.shape)
            error = torch.stack([(private - each).square().mean((1, 2, 3)) for each in ours])
            result.append(private[error.argmin(1)])
        return torch.cat(result)

    def per_candidate(self, values: Tensor) -> Tensor:
        """Repeat a value of each true image (I, P, ...) for its candidates, flat as `images`."""
        people, candidates = self.reconstructions.images.shape[:2]
        if len(values) != people or not values.shape[1] or candidates % values.shape[1]:
            raise RunError(
                f"expected {people} people and a number of images that divides {candidates} "
                f"candidates, got {len(values)} people with {values.shape[1]} images each"
            )
        if self.reconstructions.draws is not None and values.shape[1] > 1:
            raise RunError(
                "expected candidates in the order of the true images, got candidates in the order "
                "of guesses: they cannot be assigned to images"
            )
        return values.repeat_interleave(candidates // values.shape[1], 1).flatten(0, 1)

    def table(self, flat: Tensor) -> Tensor:
        """Reshape one value per image to (I, K)."""
        return flat.unflatten(0, self.reconstructions.images.shape[:2])

    def per_person(self, values: Tensor) -> Tensor:
        """Repeat one value per person (I,) for all candidates, (I, K)."""
        return values[:, None].expand(*self.reconstructions.images.shape[:2])


class Metric(Method):
    """A frozen set of parameters that measures columns of rows.

    `surfaces` says in which audits the metric can be measured: "model", "features", or both.
    `uses_draws` says whether it compares with draws of the prior.
    """

    surfaces: ClassVar[frozenset[str]] = frozenset({"model", "features"})
    uses_draws: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Asset]:
        """Networks it uses besides evaluators: "embedder"."""
        return frozenset()

    def problems(self, candidates: int) -> list[str]:
        """List what keeps it from being measured with so many candidates per person."""
        return []

    def check_files(self) -> None:
        """Raise unless the files it reads can be used; called before anything is computed."""
        return

    @abstractmethod
    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        """Measure named values (I, K), one per identity and candidate.

        A value of each person is repeated for all candidates.
        """

    def summaries(self, evidence: Evidence) -> dict[str, Score]:
        """Measure values of the whole set, which no row has."""
        return {}


metrics = Registry("metric", "frostglass.metrics", contract=Metric)


def outputs(classifier: Target, images: Tensor | ByteImages | Images) -> tuple[Tensor, Tensor]:
    """Return logits and features of many images, in evaluation mode and without gradients."""
    device = device_of(classifier.module)
    logits, features = RowsInOne(len(images)), RowsInOne(len(images))
    with frozen(classifier.module), torch.no_grad():
        for index in shown_together(torch.arange(len(images)), images.shape[-3:]):
            batch = images.floats(index) if isinstance(images, Images) else images[index]
            some_logits, some_features = classifier.outputs(batch.to(device))
            logits.add(some_logits.cpu())
            features.add(some_features.cpu())
    return logits.tensor, features.tensor


def finite(features: Tensor, what: str) -> Tensor:
    """Return features as they are; raise if a row holds NaN or infinity."""
    if broken := int((~features.isfinite()).any(1).sum()):
        raise RunError(
            f"expected finite features, got NaN or infinity for {broken} of {len(features)} "
            f"{what}: check the weights and the input range of the evaluator"
        )
    return features


def measure(chosen: Sequence[Metric], evidence: Evidence) -> Rows:
    """Measure all columns of the chosen metrics; a value that is not finite raises RunError.

    A metric that is silently skipped would make a defense look better than it is.
    """
    if not evidence.reconstructions.images.shape[:2].numel():
        raise RunError(
            f"expected reconstructions of each person, got images of shape "
            f"{tuple(evidence.reconstructions.images.shape)}: there is nothing to measure"
        )
    columns: dict[str, Tensor] = {}
    summaries: dict[str, Score] = {}
    for metric in chosen:
        for name, values in metric.columns(evidence).items():
            if broken := int((~values.isfinite()).sum()):
                raise RunError(
                    f"metric {metric.name}: {name} is not finite for {broken} reconstructions"
                )
            columns[name] = values.float()
        for name, score in metric.summaries(evidence).items():
            if not all(map(math.isfinite, (score.value, score.low, score.high))):
                raise RunError(f"metric {metric.name}: {name} is not finite")
            summaries[name] = score
    labels, draws = evidence.reconstructions.labels, evidence.reconstructions.draws
    return Rows(labels=labels, columns=columns, draws=draws, summaries=summaries)
