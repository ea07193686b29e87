"""Verification: does an image pass as a given person, at a stated false-accept rate?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.pixels import ByteImages, per_image
from frostglass.core.types import Images, Split, Target
from frostglass.data._impostors import held_out_people
from frostglass.networks.embedding import embed, public_centre
from frostglass.store.files import read_tensors, write_tensors

BEST = 5  # cosines to a person's references that are averaged
RATES = (0.01, 0.001)  # false-accept rates asked for
FALSE_ACCEPTS = 10  # expected among the comparisons behind a rate, or it is not supported
MAX_IMPOSTORS = 4000  # public images; half of them calibrate, the other half check
NO_FACE = -1.0  # the match of an image in which an embedder finds no face


@dataclass(frozen=True)
class Verifier:
    """What an evaluator needs to verify people: their references, and thresholds.

    The match of an image with a person is the mean of the best five cosines between its embedding
    and those of the person's references (fewer, if someone has fewer). An image passes if its match
    exceeds the threshold. Thresholds are set on public people (impostors): at each of `rates` at
    most that share of comparisons passes. `impostor_share` is the same share on other public
    people, `true_accepts` that of held-out private images with their own person.

    Args:
        centre: mean feature of public images (F,).
        references: embeddings (N, F) of private images; `labels` (N,) says whose.
        rates, thresholds, true_accepts, impostor_share: one value per false-accept rate.
        genuine, comparisons, impostors: how many private images, comparisons with public images
            and public images the values rest on.
    """

    centre: Tensor
    references: Tensor
    labels: Tensor
    rates: Tensor
    thresholds: Tensor
    true_accepts: Tensor
    impostor_share: Tensor
    genuine: int
    comparisons: int
    impostors: int
    key: str = ""

    def matches(
        self, evaluator: Target, images: Tensor | ByteImages, people: Sequence[int]
    ) -> Tensor:
        """Return how well images match people, (images, people)."""

        def match(rows: Tensor) -> Tensor:
            embeddings = embed(evaluator, images[rows], self.centre)
            return _best_cosines(embeddings, self.references, self.labels, people)

        matches = per_image(match, torch.arange(len(images)), images.shape[1:])
        # Other NaN stay: a metric that is not finite fails its step.
        return matches.nan_to_num(nan=NO_FACE) if _detects(evaluator) else matches

    def facts(self) -> dict[str, object]:
        """Return the calibration as plain values."""
        names = ("rates", "thresholds", "true_accepts", "impostor_share")
        values: dict[str, object] = {name: vars(self)[name].tolist() for name in names}
        return values | {
            "genuine": self.genuine, "comparisons": self.comparisons, "impostors": self.impostors,
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        counts = {name: vars(self)[name] for name in ("genuine", "comparisons", "impostors")}
        write_tensors(folder / "verifier.safetensors", tensors, counts)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "Verifier":
        tensors, counts = read_tensors(folder / "verifier.safetensors")
        values: dict[str, Any] = {**tensors, **counts}
        return cls(**values)


def enrol(evaluator: Target, split: Split) -> Verifier:
    """Enrol the private people with an evaluator, and calibrate its thresholds.

    References are the private images that evaluators may know; held-out ones are the genuine.
    """
    strangers = impostors(evaluator, split.public)
    centre = public_centre(evaluator, strangers)
    if not centre.is_meta and not centre.isfinite().all():
        raise DataError(
            f"expected faces in the public images, but {evaluator.info['model']} finds none in "
            f"{len(strangers)} of them: use larger or better images, or another evaluator"
        )
    known = split.known_to_evaluators
    references = _embeddings(evaluator, known, centre)
    usable = _with_face(references)
    references, labels = references[usable], known.labels[usable]
    missing = sorted(set(range(len(known.names))) - set(labels.tolist()))
    if missing and not references.is_meta:  # a dry run has fewer people than names
        raise DataError(
            f"expected a face in the images of each person, but {evaluator.info['model']} finds "
            f"none in those of {known.names[missing[0]]!r}: use better images, or another evaluator"
        )
    people = range(len(known.names))

    held_out = _embeddings(evaluator, split.test, centre)
    genuine = _best_cosines(held_out, references, labels, people)
    genuine = genuine.gather(1, split.test.labels[:, None].to(genuine.device)).cpu()
    embeddings = _embeddings(evaluator, strangers, centre)
    usable = _with_face(embeddings)
    against = _best_cosines(embeddings[usable], references, labels, people).cpu()
    half = _halves(strangers.at(usable.nonzero().flatten()))
    calibrating, checking = against[half].flatten(), against[~half].flatten()
    checking = checking if len(checking) else calibrating  # a single public image
    images = int(half.sum())
    rates = [supported(rate, len(calibrating), images) for rate in RATES]
    limits = torch.stack([threshold(calibrating, rate) for rate in rates])
    return Verifier(
        centre.cpu(),
        references.cpu(),
        labels,
        torch.tensor(rates),
        limits,
        torch.stack([(genuine > limit).float().mean() for limit in limits]),
        torch.stack([(checking > limit).float().mean() for limit in limits]),
        genuine=len(genuine),
        comparisons=len(calibrating),
        impostors=images,
    )


def impostors(evaluator: Target, public: Images) -> Images:
    """Return the public images to calibrate with: of people the evaluator was not trained on."""
    if evaluator.info.get("trained_on") == "public":
        public = held_out_people(public)
    elif (evaluator.info.get("first_stage") or {}).get("data") == "public":
        raise ConfigError(
            f"{evaluator.info['model']} was trained on all public people first, and thresholds "
            'need some that it does not know: train it without start = "public", or name it as an '
            "evaluator of an experiment, which leaves some out"
        )
    chosen = torch.linspace(0, len(public) - 1, min(MAX_IMPOSTORS, len(public))).long()
    return public.at(chosen)


def supported(rate: float, comparisons: int, images: int) -> float:
    """Return the rate, or the finest one that so many comparisons and images support."""
    return max(rate, min(1.0, FALSE_ACCEPTS / max(1, comparisons)), 1 / max(1, images))


def threshold(scores: Tensor, rate: float) -> Tensor:
    """Return the lowest value that at most this share of scores exceed."""
    ranked = scores.sort(descending=True).values
    return ranked[min(int(rate * len(ranked)), len(ranked) - 1)]


def _embeddings(evaluator: Target, images: Images, centre: Tensor) -> Tensor:
    index, shape = torch.arange(len(images)), images.shape
    embeddings = per_image(lambda rows: embed(evaluator, images.floats(rows), centre), index, shape)
    if not (embeddings.is_meta or _detects(evaluator) or embeddings.isfinite().all()):
        raise DataError(
            f"expected finite embeddings, got NaN or infinity from {evaluator.info['model']}: "
            "check its weights and its input range"
        )
    return embeddings


def _detects(evaluator: Target) -> bool:
    """Return whether an evaluator looks for a face first, and embeds NaN where it finds none."""
    return bool(evaluator.info.get("detects"))


def _best_cosines(
    embeddings: Tensor, references: Tensor, labels: Tensor, people: Sequence[int]
) -> Tensor:
    """Return the mean of the best cosines of each embedding to each person's references."""
    best = min(BEST, int(labels.bincount().min()))
    references = references.to(embeddings.device)
    columns = [
        (embeddings @ references[labels == person].T).topk(best, dim=1).values.mean(1)
        for person in people
    ]
    return torch.stack(columns, 1)


def _with_face(embeddings: Tensor) -> Tensor:
    """Mark the embeddings of images with a face; a dry run has no values to look at."""
    if embeddings.is_meta:
        return torch.ones(len(embeddings), dtype=torch.bool)
    return embeddings.isfinite().all(1).cpu()


def _halves(images: Images) -> Tensor:
    """Mark the images of every other person; the first half where people are unknown or alone."""
    people, number = images.labels.unique(return_inverse=True)
    if len(people) < 2:
        return torch.arange(len(images)) < (len(images) + 1) // 2
    return number % 2 == 0
