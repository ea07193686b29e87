"""The base of attacks on models that use another attack for their searches."""

from functools import cached_property
from typing import Any

from pydantic import Field

from frostglass.attacks._search.fields import AtLeastOne
from frostglass.attacks._search.runner import ModelAttack
from frostglass.attacks.base import View, attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

OWN = ("candidates", "keep", "batch", "samples")


@parameters
class WrappedAttack(ModelAttack):
    """Base of the attacks that wrap another one, `base`, and change how it searches or ranks.

    Args:
        base: the attack that searches, a table with its `name`, perhaps a `variant`, and its
            parameters; candidates, keep, batch and samples are those of this attack.
    """

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "gmi"})

    def __post_init__(self) -> None:
        if not isinstance(self.base.get("name"), str):
            raise ValueError(f"base: expected a table with a name, got {self.base!r}")
        if own := [name for name in OWN if name in self.base]:
            raise ValueError(
                f"base: {own[0]} is a parameter of {self.name} itself: set it there instead"
            )
        try:
            base = self.base_attack
        except ConfigError as error:
            raise ValueError(f"base: {error}") from error
        if not isinstance(base, ModelAttack):
            raise ValueError(
                f"base: expected an attack on models, got {base.name}, which attacks "
                f"{base.surface}: use another, such as gmi"
            )
        super().__post_init__()

    @cached_property
    def base_attack(self) -> ModelAttack:
        """The attack that searches."""
        if attacks.get(self.base["name"]).surface != "model":
            return attacks.build(self.base)
        own = {"candidates": self.searches_each, "batch": self.batch, "samples": self.samples}
        return attacks.build({**self.base, **own, "keep": 1})

    @property
    def searches_each(self) -> int:
        """Number of searches of the base for each person."""
        return self.candidates

    @property
    def display_title(self) -> str:
        return f"{self.title} of {self.base_attack.display_title}"

    @property
    def access(self) -> tuple[str, ...]:
        return self.base_attack.access

    @property
    def needs(self) -> frozenset[Asset]:
        return self.base_attack.needs

    @property
    def known_attribute(self) -> str:
        return self.base_attack.known_attribute

    @property
    def reads(self) -> int:
        return self.base_attack.reads

    @property
    def rows(self) -> int:
        return self.base_attack.rows

    @property
    def batch_multiple(self) -> int:
        return self.base_attack.batch_multiple

    @property
    def steerable(self) -> bool:
        return self.base_attack.steerable

    @property
    def start_draws(self) -> int:
        return self.base_attack.start_draws

    @property
    def start_images(self) -> int:
        return self.base_attack.start_images

    @property
    def search_effort(self) -> tuple[str, int]:
        return self.base_attack.search_effort

    @property
    def surrogate_images(self) -> int:
        return self.base_attack.surrogate_images

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        searches = candidates * self.searches_each // self.candidates
        return {"base": {**self.base, **self.base_attack.brief_counts(searches)}}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        return {"base": {**self.base, **self.base_attack.scaled_counts(share)}}

    def prior_problems(self, prior: Prior) -> list[str]:
        return self.base_attack.prior_problems(prior)

    def problems(self, view: View, assets: Assets) -> list[str]:
        problems = super().problems(view, assets)
        if "embedder" in self.needs and assets.public is None:
            problems.append(f"{self.name} needs assets.public, got none: pass Assets(public=...)")
        if assets.attribute and self.known_attribute:
            assert isinstance(view, ModelView)  # as `invert` checks
            problems += assets.attribute.problems(self.known_attribute, view.classes)
        return problems

    def not_steerable(self, why: str) -> str:
        """Describe a base whose searches take no further loss."""
        return (
            f"base: {why}, and {self.base['name']} has searches that take no further loss: use one "
            "that follows gradients, such as gmi or mirror"
        )


@parameters
class GroupedAttack(WrappedAttack):
    """Base of those whose rows are groups of searches of the base, each row by itself.

    Args:
        searches: searches of a group, side by side.
    """

    searches: AtLeastOne = 1

    @property
    def rows(self) -> int:
        return max(1, self.base_attack.rows // self.searches)

    @property
    def batch_multiple(self) -> int:
        return 1  # the searches of the base pad their own rows

    @property
    def steerable(self) -> bool:
        return False
