"""Members: inverts each unit of a class, where a head has several units for each class."""

from dataclasses import replace

import torch
from torch import Tensor

from frostglass.attacks._search.augmented import AugmentedDescent
from frostglass.attacks._search.fields import AtLeastOne
from frostglass.attacks._search.runner import Recipe
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.select import by_score
from frostglass.attacks._search.wrapped import WrappedAttack
from frostglass.attacks.base import attacks
from frostglass.core.assets import Assets
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView


@attacks.register
@parameters
class Members(WrappedAttack):
    """Inverts each person whom a class was trained on by that person's own unit of the head.

    Defense `decoys` gives a class y the logit ln Σ exp(u) over units u, one for each of its m + 1
    people. An attacker who has the network sees the units. Search number k of a class inverts unit
    k mod (m + 1) as `base` inverts a class, against all other units. Images are ranked by the
    margin of the class. On a model with an ordinary head this is the base.

    Use: an audit of `decoys` by an attacker who has the weights; what several guesses find.
    Paper: none; our attack on decoys.

    Args:
        candidates: m + 1 or more reach every unit.
    """

    title = "Members"

    candidates: AtLeastOne = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        base = self.base_attack
        if "gradients" not in base.access:
            raise ValueError(
                f"base: members sees the units of the network, and {base.name} sees no network: "
                "use one that follows gradients, such as gmi or mirror"
            )
        if isinstance(base, AugmentedDescent) and (base.students or base.subtract):
            raise ValueError(
                "base: students answer for classes, and members inverts units: use another variant"
            )

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if prior.condition:
            problems.append(
                f"members inverts units of classes, and this prior needs a {prior.condition} for "
                "each image: use another prior"
            )
        return problems

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        inner, units = view.by_unit()
        base = self.base_attack.recipe(inner, assets, seed=seed)

        def aimed(labels: Tensor, draws: Tensor) -> Tensor:
            return labels * units + draws % units

        def start(labels: Tensor) -> Tensor:
            every = torch.arange(units, device=labels.device)
            starts = base.start((labels[:, None] * units + every).flatten())
            starts = starts.unflatten(0, (-1, units))  # (people, units, candidates, ...)
            draws = torch.arange(self.candidates, device=starts.device)
            return starts[:, draws % units, draws // units]

        def search(state: Tensor, labels: Tensor, draws: Tensor, *extra: object) -> SearchResult:
            return base.search(state, aimed(labels, draws), draws // units, *extra)

        def read(state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
            return base.read(state, aimed(labels, draws), draws // units)

        # The base would rank by units.
        return replace(base, start=start, search=search, read=read, bonus=None, select=by_score)
