"""Attacks that may show only so many images to the target: fewer iterations, found by bisection."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from frostglass.core.errors import ConfigError

if TYPE_CHECKING:
    from frostglass.attacks._search.runner import ModelAttack

A = TypeVar("A", bound="ModelAttack")
HALVINGS = 40  # more than a count of iterations has digits


def most_queries(attack: "ModelAttack", people: int) -> int:
    """Return how many images an attack shows to the target at most, per person of `people`.

    Starts that are chosen for all people together are divided among them.
    """
    _, search = attack.search_effort
    each = attack.candidates * (search + attack.reads * attack.samples)
    return each + math.ceil(attack.start_images / people)


def limited(attack: A, queries: int, people: int) -> A:
    """Return the attack with all its iterations scaled down until it keeps to a budget."""
    if most_queries(attack, people) <= queries:
        return attack

    def scaled(share: float) -> A:
        return replace(attack, **attack.scaled_counts(share))

    least, low, high = most_queries(scaled(0.0), people), 0.0, 1.0
    if least > queries:
        raise ConfigError(
            f"query_budget: {attack.name} shows at least {least:,} images per person of {people:,} "
            f"to the target, got a budget of {queries:,}: raise it, or lower attack.candidates"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = most_queries(scaled(middle), people) <= queries
        low, high = (middle, high) if fits else (low, middle)
    return scaled(low)


def scaled_down(count: int, share: float, at_least: int = 0) -> int:
    """Return a share of a count, but not less than a minimum that the count itself keeps to."""
    return min(count, max(at_least, int(count * share)))
