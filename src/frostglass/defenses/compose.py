"""Several defenses at once: hooks run in list order, and what one replaces no other may replace."""

from collections.abc import Sequence
from itertools import combinations

import torch.nn.functional as F

from frostglass.defenses.base import Batch, Defense, Moment, Term
from frostglass.errors import ConfigError
from frostglass.types import Target


def conflicts(defenses: Sequence[Defense]) -> list[str]:
    """Every pair that cannot be combined, with the reason."""
    return [
        f"{one.name} and {other.name} both replace the {part}: keep one of them"
        for one, other in combinations(defenses, 2)
        for part in sorted(one.replaces() & other.replaces())
    ]


def check_composition(defenses: Sequence[Defense]) -> None:
    if found := conflicts(defenses):
        raise ConfigError(found)


def prepare(defenses: Sequence[Defense], target: Target, *, seed: int) -> Target:
    for defense in defenses:
        target = defense.prepare(target, seed=seed)
    return target


def taps(defenses: Sequence[Defense], target: Target) -> tuple[str, ...]:
    """All layers any of the defenses reads, each once."""
    return tuple(dict.fromkeys(name for defense in defenses for name in defense.taps(target)))


def losses(defenses: Sequence[Defense], batch: Batch) -> dict[str, Term]:
    """All terms of the objective; cross-entropy unless a defense replaces it."""
    terms: dict[str, Term] = {}
    if not any("classification loss" in defense.replaces() for defense in defenses):
        terms["cross_entropy"] = Term(1.0, F.cross_entropy(batch.logits, batch.labels))
    for defense in defenses:
        for name, term in defense.losses(batch).items():
            if name in terms:
                raise ConfigError(f"{defense.name} adds a second loss term named {name}: each term needs a name of its own")
            terms[name] = term
    return terms


def settled(defenses: Sequence[Defense], moment: Moment) -> bool:
    return all(defense.settled(moment) for defense in defenses)
