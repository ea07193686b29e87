"""An attack is a recipe of four parts, start, objective, search and select, run identity by identity through one function."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from frostglass.attacks.select import best
from frostglass.attacks.start import fresh
from frostglass.errors import ConfigError
from frostglass.priors.base import Prior
from frostglass.registry import Registry
from frostglass.runtime import frozen
from frostglass.types import Capability, Reconstructions, View

attacks = Registry("attack", "frostglass.attacks")

READ_OUT = 64  # images per pass outside the hot loop; fixed, because rounding may depend on the batch size


@dataclass(frozen=True)
class Recipe:
    """The parts of one attack, bound to a view and a prior.

    `start(labels)` gives latents (I, K, ...); `search(latents, labels)` improves latents (N, ...) for labels (N,), each row on its own;
    `rank(images, labels)` gives a score per sample by which candidates are kept, from the target alone.
    """

    start: Callable[[Tensor], Tensor]
    search: Callable[[Tensor, Tensor], Tensor]
    rank: Callable[[Tensor, Tensor], Tensor]


class Attack:
    """Base of all attacks: parameters are fields; `recipe` binds them to a view and a prior.

    `access` is what the attack must be granted, `needs_critic` whether its prior must have a critic, `keep` how many candidates of each
    identity are returned, `batch` how many latents are searched together (a matter of memory, not of results).
    """

    name: ClassVar[str]
    access: ClassVar[tuple[Capability, ...]]
    keep: int
    batch: int

    def problems(self, view: View, prior: Prior) -> list[str]:
        """Everything that keeps this attack from running on this view and prior."""
        return []

    def recipe(self, view: View, prior: Prior, *, seed: int) -> Recipe:
        raise TypeError(f"{type(self).__name__} must define recipe()")


def invert(attack: Attack, view: View, prior: Prior, *, labels: Sequence[int] | None = None, seed: int, work: Any) -> Reconstructions:
    """Run an attack on the given classes (all by default); one shard per identity group is kept in `work`, so a restart goes on.

    The target and the prior are left exactly as they were, also after an exception.
    """
    wanted = torch.tensor(range(view.classes) if labels is None else list(labels))
    if problems := _problems(attack, view, prior, wanted):
        raise ConfigError(problems)
    modules = [view.module, prior.generator] + ([prior.critic] if prior.critic is not None else [])
    with frozen(*modules):
        return _run(attack, view, prior, wanted, seed=seed, work=work)


def _run(attack: Attack, view: View, prior: Prior, wanted: Tensor, *, seed: int, work: Any) -> Reconstructions:
    began, before = time.perf_counter(), view.queries
    recipe = attack.recipe(view, prior, seed=seed)
    queries, seconds = view.queries - before, time.perf_counter() - began
    shards = []
    groups = wanted.split(max(1, attack.batch // max(1, attack.keep)))
    for number, labels in enumerate(groups):
        name = f"shard-{number:05d}"
        if not (saved := work.load(name)):
            began, before = time.perf_counter(), view.queries
            tensors = _shard(attack, recipe, view, prior, labels)
            work.save(name, tensors, {"queries": view.queries - before, "seconds": time.perf_counter() - began})
            saved = work.load(name) or (tensors, {"queries": view.queries - before, "seconds": time.perf_counter() - began})
        tensors, values = saved
        shards.append(tensors)
        queries, seconds = queries + values["queries"], seconds + values["seconds"]
        work.progress(number + 1, len(groups), f"{sum(len(s['labels']) for s in shards)} identities")
    joined = {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
    return Reconstructions(**joined, queries=queries, seconds=seconds)


def _shard(attack: Attack, recipe: Recipe, view: View, prior: Prior, labels: Tensor) -> dict[str, Tensor]:
    start = recipe.start(labels)
    each = labels.repeat_interleave(start.shape[1])
    found = torch.cat([recipe.search(z, y) for z, y in zip(start.flatten(0, 1).split(attack.batch), each.split(attack.batch), strict=True)])
    rank, confidence, images = [], [], []
    with torch.no_grad():
        for z, y in zip(found.split(READ_OUT), each.split(READ_OUT), strict=True):
            pictures = prior.images(z)
            images.append(pictures)
            rank.append(recipe.rank(pictures, y))
            confidence.append(_confidence(view, pictures, y))
    shape = start.shape[:2]
    columns = [torch.cat(part).unflatten(0, shape) for part in (images, confidence)] + [found.unflatten(0, shape)]
    pictures, sure, latents = best(torch.cat(rank).unflatten(0, shape), attack.keep, *columns)
    return {"images": pictures, "labels": labels, "latents": latents, "confidence": sure}


def _confidence(view: View, images: Tensor, labels: Tensor) -> Tensor:
    """The target's probability of the attacked class; 1 or 0 where only labels are granted."""
    if view.access == frozenset({"labels"}):
        return (view.labels(images) == labels).float()
    return view.scores(images).gather(1, labels[:, None])[:, 0]


def _problems(attack: Attack, view: View, prior: Prior, wanted: Tensor) -> list[str]:
    found = attack.problems(view, prior)
    if not len(wanted):
        found.append("no identity to attack: give at least one label")
    elif int(wanted.min()) < 0 or int(wanted.max()) >= view.classes:
        found.append(f"labels must lie in 0..{view.classes - 1}, got {int(wanted.min())}..{int(wanted.max())}")
    if prior.tied_to is not None and not view.key.startswith(prior.tied_to):
        found.append("the prior was fitted to another target: train it again for this one")
    return found


def prior_only(prior: Prior, labels: Sequence[int], candidates: int, *, seed: int) -> Reconstructions:
    """The control beside every attack: random draws of the prior, handed to identities blindly."""
    wanted = torch.tensor(list(labels))
    latents = fresh(prior, wanted, candidates, seed=seed, purpose="prior only")
    with frozen(prior.generator), torch.no_grad():
        images = torch.cat([prior.images(z) for z in latents.flatten(0, 1).split(READ_OUT)]).unflatten(0, latents.shape[:2])
    return Reconstructions(images=images, labels=wanted, latents=latents, confidence=torch.zeros(images.shape[:2]), queries=0, seconds=0.0)
