"""An attack is a recipe of four parts, start, objective, search and select, run identity by identity through one function."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from frostglass.attacks.select import best
from frostglass.attacks.start import fresh
from frostglass.errors import ConfigError
from frostglass.files import Work
from frostglass.priors.base import Prior
from frostglass.registry import Registry
from frostglass.runtime import device_of, frozen
from frostglass.types import Capability, Reconstructions, View

attacks = Registry("attack", "frostglass.attacks")

LANES = 16  # kernels round differently for odd batch sizes; with multiples of this a row's result is the same in any batch


@dataclass(frozen=True)
class Recipe:
    """The parts of one attack, bound to a view and a prior.

    `start(labels)` gives latents (I, K, ...), for all attacked identities at once; `search(latents, labels)` improves latents (N, ...) for
    labels (N,), each row on its own; `rank(images, labels)` gives a score per sample by which candidates are kept, from the target alone.
    """

    start: Callable[[Tensor], Tensor]
    search: Callable[[Tensor, Tensor], Tensor]
    rank: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Walk:
    """The parts of an attack that feels its way by the target's answers: each row goes as far as it gets, and knows itself how far.

    `start` is that of a `Recipe`; `search(latents, labels, draws)` moves latents (N, ...), each row on its own, where `draws` (N,) numbers
    the candidates of an identity, and gives with them the score (N,) by which candidates are kept. Rows end at different times, so it
    looks at the target through `in_lanes` itself.
    """

    start: Callable[[Tensor], Tensor]
    search: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Attack:
    """Base of all attacks: parameters are fields; `recipe` binds them to a view and a prior.

    `access` is what the attack must be granted, `candidates` how many latents are tried for each identity and `keep` how many of them are
    returned, `batch` how many are searched together (a matter of memory and speed, not of results), `samples` how many passes are averaged
    at each look at the target, which matters only if it adds noise.
    """

    name: ClassVar[str]
    access: ClassVar[tuple[Capability, ...]]
    candidates: int
    keep: int
    batch: int
    samples: int

    @property
    def rows(self) -> int:
        """How many latents are searched together: `batch`, unless each of them shows several pictures at a time."""
        return self.batch

    def problems(self, view: View, prior: Prior) -> list[str]:
        """Everything that keeps this attack from running on this view and prior."""
        return []

    def recipe(self, view: View, prior: Prior, *, seed: int) -> Recipe | Walk:
        raise TypeError(f"{type(self).__name__} must define recipe()")


def invert(
    attack: Attack, view: View, prior: Prior, *, labels: Sequence[int] | None = None, seed: int = 0, work: Work | None = None
) -> Reconstructions:
    """Run an attack on the given classes (all by default); one shard per identity group is kept in `work`, so a restart goes on.

    The target and the prior are left exactly as they were, also after an exception.
    """
    wanted = torch.tensor(range(view.classes) if labels is None else list(labels))
    if problems := _problems(attack, view, prior, wanted):
        raise ConfigError(problems)
    if device_of(view.module) != device_of(prior.generator):
        raise ConfigError(
            f"target and prior must be on one device, got {device_of(view.module)} and {device_of(prior.generator)}: move one with .to()"
        )
    modules = [view.module, prior.generator] + ([prior.critic] if prior.critic is not None else [])
    with frozen(*modules):
        return _run(attack, view.averaged(attack.samples), prior, wanted, seed=seed, work=work or Work.scratch())


def _run(attack: Attack, view: View, prior: Prior, wanted: Tensor, *, seed: int, work: Work) -> Reconstructions:
    began, before = time.perf_counter(), view.queries
    recipe = attack.recipe(view, prior, seed=seed)
    starts = recipe.start(wanted)  # all at once: what they ask the target is then counted once, however often a run is resumed
    queries, seconds = view.queries - before, time.perf_counter() - began
    shards = []
    size = max(1, attack.rows // attack.candidates)
    groups = list(zip(wanted.split(size), starts.split(size), strict=True))
    for number, (labels, start) in enumerate(groups):
        name = f"shard-{number:05d}"
        if not (saved := work.load(name)):
            began, before = time.perf_counter(), view.queries
            tensors = _shard(attack, recipe, view, prior, labels, start)
            saved = (tensors, {"queries": view.queries - before, "seconds": time.perf_counter() - began})
            work.save(name, *saved)
        tensors, values = saved
        shards.append(tensors)
        queries, seconds = queries + values["queries"], seconds + values["seconds"]
        work.progress(number + 1, len(groups), f"{sum(len(s['labels']) for s in shards)} identities")
    joined = {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
    return Reconstructions(**joined, queries=queries, seconds=seconds)  # type: ignore[arg-type]


def _shard(attack: Attack, recipe: Recipe | Walk, view: View, prior: Prior, labels: Tensor, start: Tensor) -> dict[str, Tensor]:
    each = labels.repeat_interleave(start.shape[1]).to(start.device)
    draws = torch.arange(start.shape[1], device=start.device).expand(start.shape[:2])
    batch = math.ceil(attack.rows / LANES) * LANES

    def read_out(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            pictures = prior.images(z)
            return pictures, _confidence(view, pictures, y)

    parts = []
    for z, y, draw in zip(start.flatten(0, 1).split(batch), each.split(batch), draws.flatten().split(batch), strict=True):
        found, rank = _searched(recipe, view, prior, z, y, draw)
        parts.append((found, rank, *in_lanes(view, read_out, found, y)))
    latents, rank, pictures, confidence = (torch.cat(column).unflatten(0, start.shape[:2]) for column in zip(*parts, strict=True))
    latents, pictures, confidence, draws = best(rank, attack.keep, latents, pictures, confidence, draws)
    return {"images": pictures.cpu(), "labels": labels, "latents": latents.cpu(), "confidence": confidence.cpu(), "draws": draws.cpu()}


def _searched(recipe: Recipe | Walk, view: View, prior: Prior, z: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
    """Latents after the search, and the score of each by which candidates are kept."""
    if isinstance(recipe, Walk):
        return recipe.search(z, y, draws)

    def work(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = recipe.search(z, y)
        with torch.no_grad():
            return found, recipe.rank(prior.images(found), y)

    return in_lanes(view, work, z, y)


def in_lanes(view: View, work: Callable[..., tuple[Tensor, ...]], *columns: Tensor) -> tuple[Tensor, ...]:
    """Run `work` with its rows filled up to a multiple of LANES, and hand back the real ones; filling is not counted as queries."""
    real, full = len(columns[0]), math.ceil(len(columns[0]) / LANES) * LANES
    rows = torch.arange(full, device=columns[0].device).clamp(max=real - 1)
    before = view.queries
    results = work(*(column[rows] for column in columns))
    view.queries = before + (view.queries - before) * real // full
    return tuple(result[:real] for result in results)


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
        images = torch.cat([prior.images(z) for z in latents.flatten(0, 1).split(4 * LANES)]).unflatten(0, latents.shape[:2])
    return Reconstructions(
        images=images.cpu(), labels=wanted, latents=latents.cpu(), confidence=torch.zeros(images.shape[:2]), queries=0, seconds=0.0
    )
