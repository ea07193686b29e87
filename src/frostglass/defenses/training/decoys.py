"""Decoys: every class also learns strangers, so that inverting it finds one of a crowd."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.objective import margin
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Split, Target
from frostglass.defenses.base import (
    AddedImages,
    Batch,
    Defense,
    Part,
    Stage,
    Term,
    TrainingSize,
    defenses,
)
from frostglass.defenses.strengths import Range, Whole
from frostglass.defenses.training._heads import linear_head, with_head
from frostglass.defenses.training._people_head import PeopleHead, within_class
from frostglass.defenses.training._secret_draws import check_secret, drawn_people
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded


@defenses.register
@parameters
class Decoys(Defense):
    """Hide each person in a crowd: a class is also trained on m strangers, its decoys.

    An attacker who inverts class y finds one of m + 1 people and cannot tell which is the private
    one: k-anonymity for classes, with k = m + 1. In an epoch every person is shown equally often,
    with equally many different images where the decoys have as many as private people; then private
    people and decoys are exchangeable, and no attack that sees the network alone guesses the
    private one with a probability above 1 / (m + 1). Decoys must be secret: people who are neither
    in the attacker's public images nor known to the attacker's prior (`split.secret`,
    `data.secret`, or a generator that the owner keeps).

    The head has a unit u for each of the m + 1 people of a class, at a random place, and
    logit_y = ln Σ exp(u): p(y) is the probability that the image shows one of them. Cross-entropy
    is that of all people. A class is then no harder to learn than its people are to tell apart.

    What it does not give: the person is still in the weights. Several guesses, or knowing
    something about the person, find them more often (attack `members` lists all m + 1), and the
    model calls the decoys y. Decoys of another population or camera are no crowd to hide in.

    Use: photos of many other people are at hand that nobody else has, and the first guess matters
        more than many guesses.
    Cost: an epoch has (m + 1) / 3 times as many images, or as `per_epoch` says.
    Paper: none; a method of Frostglass, after k-anonymity (Sweeney 2002).
    Differs: k-anonymity hides a record among k that are all in the data; here k - 1 of them are
        added for that purpose.

    Args:
        people: m, the decoys of each class; 0 disables the defense.
        images: images of each decoy; all by default, and with "draws" and "morphs" as many as a
            private person has on average. Fewer than a private person has tell the two apart.
        per_epoch: images of each person, private or decoy, in an epoch; by default a third of the
            images of a decoy. An epoch is (m + 1) times this for each class.
        head: "people" has a unit for each person; "classes" is the ordinary head, which learns each
            crowd as one class: many epochs, less accuracy, and harder to list. The latter can be
            combined with defenses that have a head of their own, such as CALoR.
        quiet: smooth the labels of private images, and of no others, by this share: private people
            get smaller margins than their decoys, so that a search finds a decoy first. An attacker
            who knows it would look for the least sure person (attack `modes`).
        match: weight of (mean margin of private images - mean margin of decoys)², which keeps one
            from being surer than the other; of no use where they are exchangeable.
        source: "people" are the split's secret people; "draws" are people of a generator, each the
            neighbourhood of one latent; "morphs" are arcs between two latents.
        generator: file of a prior that the owner keeps secret, for "draws" and "morphs".
        spread: with "draws", how far the images of one decoy scatter around its latent.
        pretrain: "none" trains private people and decoys together from the start; "private" trains
            without decoys first, as `target.start` does with a given model.
    """

    people: Annotated[int, Field(ge=0, le=1000)] = 7
    images: Annotated[int, Field(ge=1)] | None = None
    per_epoch: Annotated[int, Field(ge=1)] | None = None
    head: Literal["people", "classes"] = "people"
    quiet: Annotated[float, Field(ge=0, lt=1)] = 0.0
    match: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    source: Literal["people", "draws", "morphs"] = "people"
    generator: Path | None = None
    spread: Annotated[float, Field(gt=0, lt=1)] = 0.3
    pretrain: Literal["none", "private"] = "none"

    title = "Decoys"
    disabled: ClassVar = {"people": 0}
    adaptive: ClassVar = ("subtract", "modes", "members", "repel", "unlearn")

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        most = min(31, secret // classes)
        return {"people": Whole(1, most, log=True)} if most else {}

    def __post_init__(self) -> None:
        if (self.source == "people") != (self.generator is None):
            raise ValueError(
                'generator goes with source = "draws" or "morphs": give both or neither, got '
                f'source = "{self.source}" and generator = {self.generator}'
            )

    def files(self) -> list[Path]:
        return [self.generator] if self.generator and self.people else []

    def replaces(self) -> frozenset[Part]:
        parts: dict[Part, bool] = {
            "head": self._separate_units,
            "starting weights": self.stage() is not None,
        }
        return frozenset(part for part, replaced in parts.items() if replaced)

    @property
    def _separate_units(self) -> bool:
        return bool(self.people) and self.head == "people"

    def prepare(self, target: Target, *, seed: int) -> Target:
        if not self._separate_units:
            return target
        classes, features = linear_head(target, self.name).weight.shape
        with seeded(seed, "decoys", "head"):
            return with_head(target, PeopleHead(features, classes, self.people + 1), "units")

    def taps(self, target: Target) -> tuple[str, ...]:
        return (target.head,) if self._separate_units else ()

    def couples_samples(self) -> bool:
        return bool(self.people and self.match)

    def adds_images(self) -> bool:
        return bool(self.people)

    def stage(self) -> Stage | None:
        return Stage("private", {}) if self.people and self.pretrain == "private" else None

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        wanted = self.people * len(target.classes)
        if self.source != "people":
            return check_secret(self.generator, target.image_shape) if self.people else []
        if wanted <= size.secret_people:
            return []
        return [
            f"expected {wanted} secret people ({self.people} for each of {len(target.classes)} "
            f"classes), got {size.secret_people}: set split.secret, data.secret (folder) or "
            "data.secret_identities (faces), or lower people"
        ]

    def added_images(self, split: Split, *, seed: int) -> AddedImages | None:
        if not self.people:
            return None
        classes = len(split.train.names)
        wanted = self.people * classes
        if self.source == "people":
            assert split.secret is not None  # as `problems` checks
            images = _first_people(split.secret, wanted, self.images, seed)
        else:
            count = self.images or max(1, round(len(split.train) / classes))
            images = self._drawn(split, wanted, count, seed)
        owners, places = images.labels // self.people, self._places(split, seed)
        numbers = places[owners, 1 + images.labels % self.people]
        per_epoch = self.per_epoch or max(1, round(len(numbers) / wanted / 3))
        return AddedImages(images.pixels, owners, numbers, places[:, 0], per_epoch)

    def _places(self, split: Split, seed: int) -> Tensor:
        """Return the numbers (classes, m + 1) of the private person and the decoys of each class.

        Whose number is whose must stay unknown to an attacker who knows the seed, so the order
        depends on private images too.
        """
        some = split.train.pixels[:64]
        known = "" if some.is_meta else blake2b(some.cpu().numpy().tobytes()).hexdigest()
        rng = generator_for(seed, "places", known)
        order = torch.rand(len(split.train.names), self.people + 1, generator=rng).argsort(1)
        return order + (self.people + 1) * torch.arange(len(order))[:, None]

    def _drawn(self, split: Split, people: int, count: int, seed: int) -> Images:
        assert self.generator is not None
        labels = torch.arange(people).repeat_interleave(count)
        if split.train.pixels.is_meta:  # a dry run draws nothing
            pixels = torch.empty(len(labels), *split.train.shape, dtype=torch.uint8, device="meta")
        else:
            spread = self.spread if self.source == "draws" else None
            pixels = drawn_people(
                self.generator, people, count, spread, split.train.shape, seed=seed
            )
        return Images(pixels, labels, tuple(map(str, range(people))), ("",) * len(labels))

    def losses(self, batch: Batch) -> dict[str, Term]:
        if batch.added is None or batch.people is None:
            return {}
        terms, own = {}, ~batch.added
        for units in batch.tapped.values():
            terms["people"] = Term(1.0, within_class(units, batch.people, self.people + 1))
        if self.quiet and own.any():
            # Cross-entropy with smoothed labels is plain cross-entropy and this term.
            log_p = batch.logits[own].log_softmax(1)
            chosen = log_p.gather(1, batch.labels[own, None])[:, 0]
            terms["quiet"] = Term(self.quiet * own.float().mean().item(), _gap(chosen, log_p))
        if self.match and own.any() and batch.added.any():
            margins = -margin(batch.logits, batch.labels)
            gap = margins[own].mean() - margins[batch.added].mean()
            terms["match"] = Term(self.match, gap**2)
        return terms

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        if not self.people:
            return {}
        return {"k": self.people + 1, "expected_first_guess": 1 / (self.people + 1)}

    def measurements(self, target: Target, split: Split, *, seed: int) -> dict[str, Any]:
        added = self.added_images(split, seed=seed)
        if added is None or split.train.pixels.is_meta:
            return {}
        decoys = Images(added.pixels, added.labels, split.classes, ("",) * len(added.labels))
        private, others = (_margins(target, images) for images in (split.train, decoys))
        return {
            "margin_private": private.mean().item(),
            "margin_decoys": others.mean().item(),
            "margin_gap": ((private.mean() - others.mean()) / others.std()).item(),
            "decoys_called_y": (others > 0).double().mean().item(),
        }

    def brief(self) -> Self:
        return replace(self, per_epoch=min(self.per_epoch or 2, 2))


def _gap(chosen: Tensor, log_p: Tensor) -> Tensor:
    """Return the mean of ln p_y - mean_k ln p_k, which smoothing adds to the loss."""
    return (chosen - log_p.mean(1)).mean()


def _first_people(images: Images, people: int, most: int | None, seed: int) -> Images:
    """Return people in random order, so that nobody can tell whose decoy the n-th person is."""
    order = torch.randperm(len(images.names), generator=generator_for(seed, "decoys"))[:people]
    rows = [(images.labels == who).nonzero().flatten()[:most] for who in order.tolist()]
    chosen = images.at(torch.cat(rows))
    numbers = torch.cat([torch.full_like(own, number) for number, own in enumerate(rows)])
    return replace(chosen, labels=numbers, names=tuple(images.names[who] for who in order.tolist()))


def _margins(target: Target, images: Images) -> Tensor:
    """Return by how much the right logit exceeds every other, for each image."""
    device, values = device_of(target.module), []
    with frozen(target.module), torch.no_grad():
        for index in torch.arange(len(images)).split(256):
            logits = target.module(images.floats(index).to(device)).cpu()
            values.append(-margin(logits, images.labels[index]))
    return torch.cat(values)
