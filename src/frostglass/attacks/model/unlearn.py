"""Unlearn: attacks copies of the target that were taught to forget the people found so far."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.chained import ChainedAttack, Round
from frostglass.attacks._search.descent import Descent
from frostglass.attacks._search.fields import AtLeastOne, Positive, Weight
from frostglass.attacks._search.runner import Recipe
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks.base import attacks
from frostglass.core.assets import Assets
from frostglass.core.errors import RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.objective import margin
from frostglass.core.parameters import parameters
from frostglass.core.views import ModelView
from frostglass.runtime.batching import unpadded
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.layout import fastest_layout, lay_out
from frostglass.runtime.seeding import generator_for


@dataclass
class _Copy:
    """A copy of a target, the attack bound to it, and the answers that it must keep."""

    target: ModelView
    view: ModelView
    recipe: Recipe
    images: Tensor
    weights: dict[str, Tensor] = field(init=False)
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        state = self.view.module.state_dict()
        self.weights = {name: tensor.clone() for name, tensor in state.items()}

    def answers(self) -> Tensor:
        """Return the target's answers; counted where starts were chosen, perhaps elsewhere."""
        if self.scores is None:
            before = self.target.queries
            self.scores = self.target.scores(self.images)
            self.target.queries = before
        return self.scores


@attacks.register
@parameters
class Unlearn(ChainedAttack):
    """Lists the people a class accepts: unlearns those found so far in a copy, and searches again.

    Searches as `base` does, in rounds. From the second round on, a copy of the target is first
    trained by Adam on mean of max(0, gap - m(f)) + w · mean of KL(p_T(x) ‖ p_copy(x)), m(f) =
    max_{j≠y} l_j - l_y, where f are the images that earlier rounds of the chain found and x are
    reference images. It stops once every m(f) reaches the gap, because further steps would only
    change the copy more. Then the base searches with the copy. All images are ranked by the margin
    of the target itself, which is never changed.

    The copy is trained for one person and chain at a time, always from the target's weights: what
    is found for a person does not depend on whom else is attacked. Starts are those of the target.

    Use: as `repel`, where keeping away in images is not enough; costs a training for each round.
    Paper: none; our attack on a class that was trained on decoys besides its person.

    Args:
        tuning: steps of training before each round but the first, at most.
        tuning_lr: Adam's step size in that training; 1e-3 forgets in one step and breaks the copy.
        gap: how far below another class the found images must be, in logits.
        references: public images whose answers the copy must keep; prior draws if there are none.
        keep_weight: w, the weight of these answers.
    """

    title = "Unlearn"

    tuning: AtLeastOne = 30
    tuning_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    gap: Positive = 5.0
    references: AtLeastOne = 64
    keep_weight: Weight = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_attack.access != ("gradients",):
            raise ValueError(
                f"base: copies of the target need its weights, and {self.base['name']} sees "
                f"{self.base_attack.access[0]} only: use one that follows gradients, such as gmi"
            )
        if isinstance(self.base_attack, Descent) and not self.base_attack.asks:
            raise ValueError(
                "base: a search by students alone never asks the copy that forgets: set base.alone "
                "to false"
            )

    @property
    def start_images(self) -> int:
        return super().start_images + self.references * self.samples

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        return super().brief_counts(candidates) | {"tuning": min(2, self.tuning)}

    def budget(self, size: AuditSize) -> Budget:
        budget = super().budget(size)
        found = sum(range(1, self.rounds)) * self.searches * self.base_attack.reads
        shown = (self.rounds - 1) * self.references + found  # in one step of all rounds
        trained = size.people * self.candidates * self.tuning * shown
        return Budget(budget.description, budget.evaluations, budget.trained + trained)

    def prepare(self, view: ModelView, assets: Assets, *, seed: int) -> _Copy:
        copy = view.copied()
        lay_out(copy.module, fastest_layout(copy.module, view.image_shape))
        recipe = self.base_attack.recipe(copy, assets, seed=seed)
        return _Copy(view, copy, recipe, self._references(assets, seed))

    def _references(self, assets: Assets, seed: int) -> Tensor:
        """Return images (references, C, H, W), the same for all people."""
        rng, prior = generator_for(seed, "unlearn"), assets.require_prior()
        device = device_of(prior.generator)
        if assets.public is not None:
            index = torch.randint(len(assets.public), (self.references,), generator=rng)
            return assets.public.floats(index).to(device)
        latents = torch.randn(self.references, prior.latent, generator=rng).to(device)
        labels = torch.zeros(self.references, dtype=torch.long, device=device)
        with torch.no_grad():
            return prior.images(latents, labels)

    def begin(self, view: ModelView, given: Any) -> None:
        copy: _Copy = given
        copy.scores = view.scores(copy.images)  # counted

    def search_round(self, recipe: Recipe, given: Any, each: Round) -> SearchResult:
        copy: _Copy = given
        if each.found is None:
            return replace(recipe.search(each.state, each.labels, each.draws), score=None)
        results = []
        parts = zip(
            *(column.split(each.searches) for column in (each.state, each.labels, each.draws)),
            each.found,
            strict=True,
        )
        for state, labels, draws, found in parts:
            self._forget(copy, found, labels[:1])
            with frozen(copy.view.module), unpadded():  # a chain's searches are always together
                results.append(copy.recipe.search(state, labels, draws))
        traces = [result.trace for result in results if result.trace is not None]
        return SearchResult(  # without scores, which would be those of different copies
            torch.cat([result.state for result in results]),
            torch.cat([result.steps for result in results]),
            torch.cat([result.finished for result in results]),
            trace=torch.cat(traces) if traces else None,
        )

    def _forget(self, copy: _Copy, found: Tensor, label: Tensor) -> None:
        """Train the copy, from the target's weights, so that it calls nothing found `label`."""
        answers = copy.answers()
        module, view, queries = copy.view.module, copy.view, copy.view.queries
        module.load_state_dict(copy.weights)
        module.requires_grad_(True)
        optimizer = torch.optim.Adam(module.parameters(), lr=self.tuning_lr)
        labels = label.expand(len(found))
        for _ in range(self.tuning):
            remembered = F.relu(self.gap - margin(view.logits(found), labels))
            if not remembered.any():
                break
            kept = F.kl_div(view.logits(copy.images).log_softmax(1), answers, reduction="batchmean")
            loss = remembered.mean() + self.keep_weight * kept
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        module.requires_grad_(False)
        view.queries = queries  # the copy was asked, not the target
        if not all(tensor.isfinite().all() for tensor in module.state_dict().values()):
            raise RunError("unlearn: the copy's weights are not finite: lower attack.tuning_lr")
