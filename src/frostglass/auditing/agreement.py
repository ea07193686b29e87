"""Whether target and evaluators see the same people in draws of the prior: needs no attack.

Where every class is one person, a draw that resembles a person is that person's for target and
evaluator alike. A class that also accepts strangers says "y" to many draws that the evaluators
give to others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from frostglass.auditing.results import Products
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.metrics.base import outputs
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import read_json, write_json
from frostglass.store.step import Step
from frostglass.store.store import Store

DRAWS, CHUNK = 1000, 128  # of the prior, and how many at once


def agreement(draws: int, *, prior: Prior, target: Target, evaluators: Sequence[Target]) -> float:
    """Return the share of draws to which target and evaluator give the same class, averaged."""
    classifiers = [target, *(each for each in evaluators if each.classes)]
    parts = []
    with frozen(*prior.modules), torch.no_grad():
        for numbers in torch.arange(draws).split(CHUNK):
            own = (generator_for(0, "agreement", number) for number in numbers.tolist())
            images = prior.images(prior.draw(*own))
            parts.append(torch.stack([outputs(each, images)[0].argmax(1) for each in classifiers]))
    said, *others = torch.cat(parts, 1)
    return torch.stack([(other == said).double().mean() for other in others]).mean().item()


def _make(draws: int, *, seed: int, work: Any, device: torch.device, **inputs: Any) -> float:
    return agreement(draws, **inputs)


def _save(share: float, folder: Path) -> None:
    write_json(folder / "agreement.json", {"agreement": share})


def _load(folder: Path, device: torch.device) -> float:
    return float(read_json(folder / "agreement.json")["agreement"])


AGREEMENT = Step("agreement", 1, _make, _save, _load)


def prior_agreement(made: Products, store: Store) -> dict[str, float]:
    """Compare target and evaluators on draws of a prior that needs nothing but latents."""
    target, prior, evaluators = made.trial.target, made.trial.prior, made.evaluators
    if target.attributes or prior is None or prior.condition:
        return {}
    share = store.step(AGREEMENT, DRAWS, prior=prior, target=target, evaluators=evaluators, seed=0)
    return {"agreement": share}
