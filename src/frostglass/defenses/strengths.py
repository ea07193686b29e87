"""Ranges of a defense's parameters in which its strength can be searched."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Real:
    """A number between two limits, searched on a linear or logarithmic scale."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Whole:
    """A whole number between two limits, both included."""

    low: int
    high: int
    log: bool = False


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    options: tuple[str, ...]


Range = Real | Whole | Choice
