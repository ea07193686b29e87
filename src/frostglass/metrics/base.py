"""The contract of metrics: evidence goes in, one row per identity and candidate comes out."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import Method
from frostglass.core.pixels import ByteImages, as_bytes, images_at_once
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.evaluators.verifier import Verifier, enrol
from frostglass.metrics._stats import interval
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

CHUNK = 128
# Columns with these prefixes are shares of 1.
SHARES = ("verified", "strict", "top1", "top5", "target_")


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
        return f"{name}: {value} ({between}), {len(self.values)} people"

    def _repr_html_(self) -> str:
        return _html([(*self._cells(), str(len(self.values)))])


@dataclass(frozen=True)
class Rows:
    """One row per (identity, candidate): `columns` maps a name to values (I, K).

    Every averaging convention can be derived from them. Candidates are in the order of the attack's
    guesses; `draws` (I, K) gives the draw number of each, where draws have an order.
    """

    labels: Tensor
    columns: Mapping[str, Tensor]
    draws: Tensor | None = None
    key: str = ""

    def score(self, name: str) -> Score:
        """Average over candidates, then over identities."""
        return Score.of(name, self.columns[name].double().mean(1))

    def __repr__(self) -> str:
        candidates = next((values.shape[1] for values in self.columns.values()), 0)
        names = ", ".join(self.columns) or "no columns"
        return f"Rows: {len(self.labels)} people × {candidates} candidates: {names}"

    def _repr_html_(self) -> str:
        people = str(len(self.labels))
        return _html([(*self.score(name)._cells(), people) for name in self.columns])


def _html(rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("score", "value", "95 % interval", "people"))
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


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
    """

    reconstructions: Reconstructions
    target: Target
    evaluators: Sequence[Target]
    split: Split
    victims: Tensor | None = None
    embedder: Target | None = None
    embeds: bool = False
    verifiers: Sequence[Verifier] = ()

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
    def originals(self) -> Tensor:
        """The true image of each of `images`, in the same order."""
        return self.per_candidate(self.true_images)

    @property
    def true_images(self) -> Tensor:
        """The victims' images (I, P, C, H, W); an error if there are none."""
        if self.victims is None:
            raise ConfigError(
                "no true images to compare with: only attacks on features reconstruct given "
                "images. Remove this metric."
            )
        return self.victims

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


class Metric(Method):
    """A frozen set of parameters that measures columns of rows.

    `surfaces` says in which audits the metric can be measured: "model", "features", or both.
    `needs` names the networks it uses besides evaluators: "embedder".
    """

    surfaces: ClassVar[frozenset[str]] = frozenset({"model", "features"})
    needs: ClassVar[frozenset[Asset]] = frozenset()

    @abstractmethod
    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        """Measure named values (I, K), one per identity and candidate."""


metrics = Registry("metric", "frostglass.metrics", contract=Metric)


def outputs(classifier: Target, images: Tensor | ByteImages | Images) -> tuple[Tensor, Tensor]:
    """Return logits and features of many images, in evaluation mode and without gradients."""
    device = device_of(classifier.module)
    logits, features = [], []
    with frozen(classifier.module), torch.no_grad():
        size = images_at_once(images.shape[-3:], CHUNK)
        for index in torch.arange(len(images)).split(size):
            batch = images.floats(index) if isinstance(images, Images) else images[index]
            some_logits, some_features = classifier.outputs(batch.to(device))
            logits.append(some_logits.cpu())
            features.append(some_features.cpu())
    return torch.cat(logits), torch.cat(features)


def nearest(queries: Tensor, references: Tensor) -> Tensor:
    """Return the Euclidean distance from each query to its nearest reference.

    Matrix products find the nearest but are inaccurate near zero, so its distance is recomputed.
    """
    return torch.cat(
        [
            (part - references[torch.cdist(part, references).argmin(1)]).norm(dim=1)
            for part in queries.split(1024)
        ]
    )


def measure(chosen: Sequence[Metric], evidence: Evidence) -> Rows:
    """Measure all columns of the chosen metrics; a value that is not finite raises RunError.

    A metric that is silently skipped would make a defense look better than it is.
    """
    columns: dict[str, Tensor] = {}
    for metric in chosen:
        for name, values in metric.columns(evidence).items():
            if broken := int((~values.isfinite()).sum()):
                raise RunError(
                    f"metric {metric.name}: {name} is not finite for {broken} reconstructions"
                )
            columns[name] = values.float()
    reconstructions = evidence.reconstructions
    return Rows(labels=reconstructions.labels, columns=columns, draws=reconstructions.draws)
