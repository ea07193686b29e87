"""The contract that every registered method shares, and the amount of work a method announces."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest

Variants = Mapping[str, tuple[str, Mapping[str, Any]]]  # name to (reason, parameters)


@dataclass(frozen=True)
class AuditSize:
    """How large an audit is: attacked people, their images, public images, and classes."""

    people: int
    images_per_person: int = 1
    public: int = 0
    classes: int = 0

    @property
    def images(self) -> int:
        """Number of attacked images; on the model surface this is the number of people."""
        return self.people * self.images_per_person


@dataclass(frozen=True)
class Budget:
    """How much work a method does.

    `evaluations` counts images passed through the attacked network, `trained` counts images shown
    to networks that the method trains itself (optimiser steps × batch). The planner divides the
    budget of a method by that of its brief copy to scale a dry run; `description` is for readers.
    """

    description: str = ""
    evaluations: int = 0
    trained: int = 0

    @property
    def images(self) -> int:
        return self.evaluations + self.trained


class Method(ABC):
    """Base of attacks, defenses, priors, metrics and datasets.

    A method is a frozen dataclass of plain parameters (see `core.parameters.parameters`). The
    registry sets `name`. `title` is what reports call the method. `variants` are named parameter
    sets, each with the reason for it. `unkeyed` has parameters that change nothing at the value
    given there and are then left out of keys, so that results from before they existed stay valid.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    variants: ClassVar[Variants] = {}
    unkeyed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = f"{cls.__module__}:{cls.__qualname__}"  # until it is registered

    @classmethod
    def variant(cls, /, variant: str, **parameters: Any) -> Self:
        """Build a named variant; further parameters override those of the variant."""
        if not isinstance(variant, str) or variant not in cls.variants:
            hint = nearest(str(variant), cls.variants) if cls.variants else "it has none"
            raise ConfigError(f"variant: {cls.name} has no variant {variant!r}; {hint}")
        return cls(**{**cls.variants[variant][1], **parameters})

    @property
    def display_title(self) -> str:
        return self.title or self.name

    def files(self) -> list[Path]:
        """List the files this method reads; their content is part of a result's key."""
        return []

    def brief(self) -> Self:
        """Return a copy with minimal iterations and the same peak memory, for dry runs."""
        return self

    def budget(self, size: AuditSize) -> Budget:
        """Return the amount of work for an audit of this size."""
        return Budget()
