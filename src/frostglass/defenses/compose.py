"""Several defenses at once: hooks run in list order, and each part is replaced at most once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.defenses.base import (
    Batch,
    Defense,
    Opponent,
    Part,
    Term,
    TrainingProgress,
    TrainingSize,
    task_loss,
)


def conflicts(defenses: Sequence[Defense]) -> list[str]:
    """List every pair that cannot be combined, with the deepest reason."""
    pairs = list(permutations(defenses, 2))
    coupled = [pair for pair in pairs if pair[0].couples_samples() and pair[1].separates_samples()]
    incomplete = [
        f"{defense.name} replaces the batches and lacks batches(): define it"
        for defense in defenses
        if "batches" in defense.replaces() and type(defense).batches is Defense.batches
    ]
    mixing = [
        f"{one.name} looks at several samples of a batch together, and {other.name} needs the "
        "gradient of each on its own: keep one of them"
        for one, other in coupled
    ]
    leaking = [
        f"{one.name} {way}, where {other.name} adds no noise: leave that out, or keep one of them"
        for one, other in pairs
        if (way := one.non_gradient_leakage()) and other.separates_samples()
    ]
    adding = [
        f"{one.name} adds images of other people, and {other.name} counts on private ones alone: "
        "keep one of them"
        for one, other in pairs
        if one.adds_images() and other.separates_samples()
    ]
    twice = [
        f"{one.name} and {other.name} both replace the {part}: keep one of them"
        for one, other in combinations(defenses, 2)
        for part in sorted(one.replaces() & other.replaces())
        if (one, other) not in coupled and (other, one) not in coupled
    ]
    adding += [
        f"{one.name} and {other.name} both add images: keep one of them"
        for one, other in combinations(defenses, 2)
        if one.adds_images() and other.adds_images()
    ]
    releasing = [
        f"{one.name} and {other.name} both release features: keep one of them"
        for one, other in combinations(defenses, 2)
        if one.releases and other.releases
    ]
    return incomplete + mixing + leaking + adding + twice + releasing


def during_stage(defenses: Sequence[Defense]) -> tuple[Defense, ...]:
    """Return the parts of the defenses that are already active in the first stage."""
    return tuple(early for defense in defenses if (early := defense.during_stage()))


def prepare(defenses: Sequence[Defense], target: Target, *, seed: int) -> Target:
    """Apply every defense's changes to the network; the result does not depend on the list order.

    Heads are replaced first, so that others count the final head. What is inserted behind the
    encoder comes after them, so that no other defense freezes it. What changes the answers comes
    last: nobody counts it as a layer.
    """

    def place(defense: Defense) -> tuple[bool, ...]:
        parts = defense.replaces()
        return "answers" in parts, "training of the encoder" in parts, "head" not in parts

    for defense in sorted(defenses, key=place):
        target = defense.prepare(target, seed=seed)
    return target


def problems(defenses: Sequence[Defense], target: Target, size: TrainingSize) -> list[str]:
    return [
        f"{defense.name}: {problem}"
        for defense in defenses
        for problem in defense.problems(target, size)
    ]


def replacing(defenses: Sequence[Defense], part: Part) -> Defense | None:
    """Return the defense that replaces this part of training, if one does."""
    return next((defense for defense in defenses if part in defense.replaces()), None)


def losses(
    defenses: Sequence[Defense],
    batch: Batch,
    taps: Sequence[tuple[str, ...]],
    opponents: Sequence[Opponent] = (),
) -> dict[str, Term]:
    """Return all terms of the objective; cross-entropy unless a defense replaces it.

    Each defense sees only the layers it asked for.
    """
    terms: dict[str, Term] = {}
    if not replacing(defenses, "classification loss"):
        terms["cross_entropy"] = Term(1.0, task_loss(batch.logits, batch.labels))
    for defense, names in zip(defenses, taps, strict=True):
        added = defense.losses(replace(batch, tapped={name: batch.tapped[name] for name in names}))
        if twice := sorted(added.keys() & terms.keys()):
            raise ConfigError(
                f"{defense.name} adds a second loss term named {twice[0]}: "
                "each term needs a name of its own"
            )
        terms |= added
    for opponent in opponents:
        terms |= opponent.losses(batch)
    return terms


def at_full_strength(defenses: Sequence[Defense], progress: TrainingProgress) -> bool:
    return all(defense.at_full_strength(progress) for defense in defenses)
