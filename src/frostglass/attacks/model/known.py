"""An attacker with side knowledge: one attribute of each person, such as glasses."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.attacks._search.fields import Weight
from frostglass.attacks._search.runner import ExtraLoss, Recipe
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.select import Candidates, in_order
from frostglass.attacks._search.wrapped import WrappedAttack
from frostglass.attacks.base import attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.parameters import parameters
from frostglass.core.views import ModelView, batch_invariant


@attacks.register
@parameters
class Known(WrappedAttack):
    """Knows one attribute of each person: images that show what is known are guessed first.

    Searches as `base` does. A classifier C of public images recognises the attribute. Candidates
    with sign C(x) as known come first, then the others, both in the order of the base. With
    `steer` = w the searches also minimise w · ln(1 + exp(-s · C(x))), where s = 1 for people who
    have the attribute and -1 for the others.

    An audit hands over the attribute of each attacked person, that of most of their held-out
    images, and trains the classifier on public images with the settings of `[embedder]`. The
    prior-only baseline knows the attribute too.

    Use: an audit of `decoys` where the attacker knows something about the person, such as glasses.
    Paper: none; our attack on a class that was trained on decoys besides its person: decoys that
        differ in what an acquaintance knows are no crowd to hide in.

    Args:
        attribute: its name in the data; `faces` has 17, such as "glasses" and "long_hair".
        steer: w, in the units of the base's whole loss; 0 ranks only. Needs a base that follows
            gradients.
    """

    title = "Known attribute"

    attribute: str = "glasses"
    steer: Weight = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attribute:
            raise ValueError("attribute: expected the name of one, got ''")
        if self.base_attack.known_attribute:
            raise ValueError("base: known knows one attribute: use another base")
        if self.steer and not self.base_attack.steerable:
            raise ValueError(self.not_steerable(f"steer is {self.steer:g}"))

    @property
    def needs(self) -> frozenset[Asset]:
        return super().needs | {"attribute"}

    @property
    def known_attribute(self) -> str:
        return self.attribute

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        recipe, known = self.base_attack.recipe(view, assets, seed=seed), assets.attribute
        assert known is not None  # as `problems` checks

        def signs(labels: Tensor) -> Tensor:
            return 2.0 * torch.tensor(known.present, device=labels.device)[labels] - 1.0

        def search(
            state: Tensor, labels: Tensor, draws: Tensor, extra: ExtraLoss | None = None
        ) -> SearchResult:
            def steered(images: Tensor, rows: Tensor) -> Tensor:
                value = self.steer * F.softplus(-signs(labels[rows]) * known.logits(images))
                return value + extra(images, rows) if extra else value

            return recipe.search(state, labels, draws, steered)

        def select(candidates: Candidates) -> Tensor:
            order, images = recipe.select(candidates), candidates.images
            logits = batch_invariant(known.logits, images.flatten(0, 1)).unflatten(
                0, images.shape[:2]
            )
            fits = logits * signs(candidates.labels)[:, None] > 0
            wrong = in_order(order, ~fits | candidates.score.isneginf())
            return in_order(wrong.byte().argsort(dim=1, stable=True), order)

        return replace(recipe, select=select, search=search if self.steer else recipe.search)
