"""Several defenses at once: hooks run in list order, and what one replaces no other may replace."""

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
    Size,
    Stage,
    Term,
    TrainingProgress,
    task_loss,
)


def conflicts(defenses: Sequence[Defense]) -> list[str]:
    """Every pair that cannot be combined, with the deepest reason."""
    coupled = [
        f"{one.name} looks at several samples of a batch together, and {other.name} needs the gradient of each on its own: keep one of them"
        for one, other in permutations(defenses, 2)
        if one.couples_samples() and other.separates_samples()
    ]
    unseen = [
        f"{one.name} {way}, where {other.name} adds no noise: leave that out, or keep one of them"
        for one, other in permutations(defenses, 2)
        if (way := one.non_gradient_leakage()) and other.separates_samples()
    ]
    return (
        coupled
        + unseen
        + [
            f"{one.name} and {other.name} both replace the {part}: keep one of them"
            for one, other in combinations(defenses, 2)
            for part in sorted(one.replaces() & other.replaces())
            if not (
                (one.couples_samples() and other.separates_samples())
                or (one.separates_samples() and other.couples_samples())
            )
        ]
    )


def check_composition(defenses: Sequence[Defense]) -> None:
    if found := conflicts(defenses):
        raise ConfigError(found)


def stage(defenses: Sequence[Defense]) -> Stage | None:
    """The training that comes first, if a defense asks for one."""
    return next((stage for defense in defenses if (stage := defense.stage())), None)


def during_stage(defenses: Sequence[Defense]) -> tuple[Defense, ...]:
    """What of the defenses already acts in the first stage."""
    return tuple(early for defense in defenses if (early := defense.during_stage()))


def prepare(defenses: Sequence[Defense], target: Target, *, seed: int) -> Target:
    """The network with every change; heads are replaced first, so that the order in a list does not decide what others count or swap.

    What is put behind the encoder comes last: nobody else's boundary may freeze it.
    """

    def place(defense: Defense) -> tuple[bool, bool]:
        return "training of the encoder" in defense.replaces(), "head" not in defense.replaces()

    for defense in sorted(defenses, key=place):
        target = defense.prepare(target, seed=seed)
    return target


def problems(defenses: Sequence[Defense], target: Target, size: Size) -> list[str]:
    return [
        f"{defense.name}: {problem}"
        for defense in defenses
        for problem in defense.problems(target, size)
    ]


def begin(defenses: Sequence[Defense], target: Target, images: Images, *, seed: int) -> None:
    for defense in defenses:
        defense.begin(target, images, seed=seed)


def optimizer(
    defenses: Sequence[Defense], module: nn.Module, rule: torch.optim.Optimizer, size: Size
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
    return [
        opponent
        for defense in defenses
        if (opponent := defense.opponent(target, public, perceptual, seed=seed))
    ]


def modes(defenses: Sequence[Defense], target: Target) -> None:
    for defense in defenses:
        defense.modes(target)


def replacing(defenses: Sequence[Defense], part: Part) -> Defense | None:
    """The defense that takes over this part of training, if one does."""
    return next((defense for defense in defenses if part in defense.replaces()), None)


def taps(defenses: Sequence[Defense], target: Target) -> list[tuple[str, ...]]:
    """The layers that each of the defenses reads."""
    return [defense.taps(target) for defense in defenses]


def losses(
    defenses: Sequence[Defense],
    batch: Batch,
    taps: Sequence[tuple[str, ...]],
    opponents: Sequence[Opponent] = (),
) -> dict[str, Term]:
    """All terms of the objective; cross-entropy unless a defense replaces it. Each defense sees the layers it asked for and no others."""
    terms: dict[str, Term] = {}
    if not replacing(defenses, "classification loss"):
        terms["cross_entropy"] = Term(1.0, task_loss(batch.logits, batch.labels))
    for defense, names in zip(defenses, taps, strict=True):
        own = replace(batch, tapped={name: batch.tapped[name] for name in names})
        for name, term in defense.losses(own).items():
            if name in terms:
                raise ConfigError(
                    f"{defense.name} adds a second loss term named {name}: each term needs a name of its own"
                )
            terms[name] = term
    for opponent in opponents:
        terms |= opponent.losses(batch)
    return terms


def at_full_strength(defenses: Sequence[Defense], progress: TrainingProgress) -> bool:
    return all(defense.at_full_strength(progress) for defense in defenses)


def facts(defenses: Sequence[Defense], target: Target, size: Size) -> dict[str, dict[str, Any]]:
    """What each defense has to tell about the finished target, by name; nothing from those that have nothing to tell."""
    told = {defense.name: defense.facts(target, size) for defense in defenses}
    return {name: values for name, values in told.items() if values}
