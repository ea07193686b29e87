"""Several defenses at once: hooks run in list order, and each part is replaced at most once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import torch
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Images, Target
from frostglass.defenses.base import (
    Batch,
    Defense,
    Opponent,
    Part,
    Stage,
    Term,
    TrainingProgress,
    TrainingSize,
    task_loss,
)


def conflicts(defenses: Sequence[Defense]) -> list[str]:
    """List every pair that cannot be combined, with the deepest reason."""
    incomplete = [
        f"{defense.name} replaces the batches and lacks batches(): define it"
        for defense in defenses
        if "batches" in defense.replaces() and type(defense).batches is Defense.batches
    ]
    coupled = [
        f"{one.name} looks at several samples of a batch together, and {other.name} needs the "
        "gradient of each on its own: keep one of them"
        for one, other in permutations(defenses, 2)
        if one.couples_samples() and other.separates_samples()
    ]
    leaking = [
        f"{one.name} {way}, where {other.name} adds no noise: leave that out, or keep one of them"
        for one, other in permutations(defenses, 2)
        if (way := one.non_gradient_leakage()) and other.separates_samples()
    ]
    twice = [
        f"{one.name} and {other.name} both replace the {part}: keep one of them"
        for one, other in combinations(defenses, 2)
        for part in sorted(one.replaces() & other.replaces())
        if not (
            (one.couples_samples() and other.separates_samples())
            or (one.separates_samples() and other.couples_samples())
        )
    ]
    return incomplete + coupled + leaking + twice


def check_composition(defenses: Sequence[Defense]) -> None:
    """Raise ConfigError with every conflict between the defenses."""
    if problems := conflicts(defenses):
        raise ConfigError(problems)


def stage(defenses: Sequence[Defense]) -> Stage | None:
    """Return the first stage, if a defense asks for one."""
    return next((stage for defense in defenses if (stage := defense.stage())), None)


def during_stage(defenses: Sequence[Defense]) -> tuple[Defense, ...]:
    """Return the parts of the defenses that are already active in the first stage."""
    return tuple(early for defense in defenses if (early := defense.during_stage()))


def prepare(defenses: Sequence[Defense], target: Target, *, seed: int) -> Target:
    """Apply every defense's changes to the network; the result does not depend on the list order.

    Heads are replaced first, so that others count the final head. What is inserted behind the
    encoder comes last, so that no other defense freezes it.
    """

    def place(defense: Defense) -> tuple[bool, bool]:
        return "training of the encoder" in defense.replaces(), "head" not in defense.replaces()

    for defense in sorted(defenses, key=place):
        target = defense.prepare(target, seed=seed)
    return target


def problems(defenses: Sequence[Defense], target: Target, size: TrainingSize) -> list[str]:
    return [
        f"{defense.name}: {problem}"
        for defense in defenses
        for problem in defense.problems(target, size)
    ]


def begin(defenses: Sequence[Defense], target: Target, images: Images, *, seed: int) -> None:
    for defense in defenses:
        defense.begin(target, images, seed=seed)


def optimizer(
    defenses: Sequence[Defense], module: nn.Module, rule: torch.optim.Optimizer, size: TrainingSize
) -> torch.optim.Optimizer:
    for defense in defenses:
        rule = defense.optimizer(module, rule, size)
    return rule


def opponents(
    defenses: Sequence[Defense],
    target: Target,
    public: Images,
    perceptual: Target | None,
    *,
    seed: int,
) -> list[Opponent]:
    candidates = [defense.opponent(target, public, perceptual, seed=seed) for defense in defenses]
    return [opponent for opponent in candidates if opponent]


def modes(defenses: Sequence[Defense], target: Target) -> None:
    for defense in defenses:
        defense.modes(target)


def replacing(defenses: Sequence[Defense], part: Part) -> Defense | None:
    """Return the defense that replaces this part of training, if one does."""
    return next((defense for defense in defenses if part in defense.replaces()), None)


def taps(defenses: Sequence[Defense], target: Target) -> list[tuple[str, ...]]:
    """Return the layers that each defense reads."""
    return [defense.taps(target) for defense in defenses]


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
        own = replace(batch, tapped={name: batch.tapped[name] for name in names})
        for name, term in defense.losses(own).items():
            if name in terms:
                raise ConfigError(
                    f"{defense.name} adds a second loss term named {name}: "
                    "each term needs a name of its own"
                )
            terms[name] = term
    for opponent in opponents:
        terms |= opponent.losses(batch)
    return terms


def at_full_strength(defenses: Sequence[Defense], progress: TrainingProgress) -> bool:
    return all(defense.at_full_strength(progress) for defense in defenses)


def facts(
    defenses: Sequence[Defense], target: Target, size: TrainingSize
) -> dict[str, dict[str, Any]]:
    """Return each defense's facts about the trained target by name, without empty ones."""
    every = {defense.name: defense.facts(target, size) for defense in defenses}
    return {name: values for name, values in every.items() if values}
