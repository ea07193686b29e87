"""An attack is a recipe of three parts, start, search and reading, run identity by identity through one function."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.select import best
from frostglass.attacks._search.start import fresh
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.objective import margin
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Reconstructions
from frostglass.core.views import Capability, ModelView
from frostglass.runtime.batching import BATCH_MULTIPLE, padded_rows
from frostglass.runtime.device import device_of
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import channels_last, frozen
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import Work

attacks = Registry("attack", "frostglass.attacks.model")
ROUNDING = 1e-4  # of the largest number a network puts out: more than float32 loses in a deep network, less than a wrong layer makes


def as_latents(state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
    """What is read from rows that are latents themselves: one each."""
    return state[:, None]


@dataclass(frozen=True)
class Recipe:
    """The parts of one attack, bound to a view and a prior.

    `start(labels)` gives what is searched, (I, R, ...), for all attacked identities at once. `search(state, labels, draws)` improves rows (N, ...), each on
    its own, where `draws` (N,) numbers the rows of an identity. `read(state, labels, draws)` takes latents (N, D, ...) from each row: itself, or
    draws from the distribution it stands for. `show(latents, labels)` makes pictures in [0, 1] of latents (N, ...), the prior's own if not given. Of a
    latent the first `kept` numbers are kept with the picture, all if not given.
    """

    start: Callable[[Tensor], Tensor]
    search: Callable[[Tensor, Tensor, Tensor], SearchResult]
    read: Callable[[Tensor, Tensor, Tensor], Tensor] = as_latents
    show: Callable[[Tensor, Tensor], Tensor] | None = None
    kept: int | None = None


class Attack:
    """Base of all attacks: parameters are fields; `recipe` binds them to a view and a prior.

    `access` is what the attack must be granted, `candidates` how many rows are searched for each identity and `keep` how many pictures are
    returned, `batch` how many are searched together (a matter of memory and speed, not of results), `samples` how many passes are averaged
    at each look at the target, which matters only if it adds noise. `variants` names sets of parameters with the reason for each.
    """

    name: ClassVar[str]
    access: ClassVar[tuple[Capability, ...]]
    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {}
    candidates: int
    keep: int
    batch: int
    samples: int

    @property
    def rows(self) -> int:
        """How many rows are searched together: `batch`, unless each of them shows several pictures at a time."""
        return self.batch

    @property
    def batch_multiple(self) -> int:
        """Searched rows come in multiples of this, so that kernels round alike whoever shares the batch."""
        return BATCH_MULTIPLE

    @property
    def asked_once(self) -> int:
        """Pictures shown to the target to find starts, for all people together."""
        return 0

    def effort(self) -> tuple[str, int]:
        """What one search does, in words, and the most pictures it shows to the target."""
        raise TypeError(f"{type(self).__name__} must define effort()")

    def problems(self, view: ModelView, prior: Prior) -> list[str]:
        """Everything that keeps this attack from running on this view and prior."""
        if not (self.asked_once and prior.condition):
            return []
        return [
            f"{self.name} asks about draws for all people at once, and this prior makes pictures of a given {prior.condition}: "
            "use another prior, or set attack.pool to 0 where it may be"
        ]

    def recipe(self, view: ModelView, prior: Prior, *, seed: int) -> Recipe:
        raise TypeError(f"{type(self).__name__} must define recipe()")


def invert(
    attack: Attack,
    view: ModelView,
    prior: Prior,
    *,
    labels: Sequence[int] | None = None,
    seed: int = 0,
    work: Work | None = None,
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
    with (
        frozen(view.module, *prior.modules),
        channels_last(*_any_layout(view, prior)),
        folded(*_true_when_folded(view, prior)),
    ):
        found = _run(
            attack,
            view.averaged(attack.samples),
            prior,
            wanted,
            seed=seed,
            work=work or Work.scratch(),
        )
    if found.partial is not None and found.partial.all():
        raise RunError(
            f"the search of none of the {len(wanted)} identities came to its end, because the attack's loss was not finite: "
            "lower attack.lr or choose another attack.loss; and see whether the target's own scores are finite"
        )
    return found


def _any_layout(view: ModelView, prior: Prior) -> list[nn.Module]:
    """All networks, or none if one of them insists on a layout, as code that reshapes by `view` may: pictures carry theirs from the generator to the others.

    Only a trial can tell.
    """
    networks = [view.module, *prior.modules]
    try:
        with channels_last(*networks):
            _answers(view, prior, torch.channels_last)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        return []
    return networks


def _true_when_folded(view: ModelView, prior: Prior) -> list[nn.Module]:
    """All networks, or none if one of them answers otherwise with its batch norms folded, as one may that picks layers out of their row; a trial tells."""
    networks = [view.module, *prior.modules]
    plain = _answers(view, prior)
    with folded(*networks):
        answers = zip(_answers(view, prior), plain, strict=True)
        alike = all(
            (answer - usual).abs().max() <= ROUNDING * usual.abs().max()
            for answer, usual in answers
        )
    return networks if alike else []


def _answers(
    view: ModelView, prior: Prior, layout: torch.memory_format = torch.contiguous_format
) -> list[Tensor]:
    """What every network puts out for the same two latents or pictures, always the same ones; not counted as queries, because nobody learns from it."""
    rng, device = generator_for(0, "trial"), device_of(view.module)
    with torch.no_grad():
        made = prior.images(prior.draw(rng, rng), torch.zeros(2, dtype=torch.long, device=device))
        pictures = (
            torch.rand(2, *view.image_shape, generator=rng)
            .to(device)
            .contiguous(memory_format=layout)
        )
        return [made, *(judge(made) for judge in prior.modules[1:]), view.module(pictures)]


def _run(
    attack: Attack, view: ModelView, prior: Prior, wanted: Tensor, *, seed: int, work: Work
) -> Reconstructions:
    began, before = time.perf_counter(), view.queries
    recipe = attack.recipe(view, prior, seed=seed)
    starts = recipe.start(
        wanted
    )  # all at once: what they ask the target is then counted once, however often a run is resumed
    queries, seconds = view.queries - before, time.perf_counter() - began
    shards = []
    size = _identities(attack, starts.shape[1])
    groups = list(zip(wanted.split(size), starts.split(size), strict=True))
    for number, (labels, start) in enumerate(groups):
        name = f"shard-{number:05d}"
        if not (saved := work.load(name)):
            began, before = time.perf_counter(), view.queries
            tensors = _shard(attack, recipe, view, prior, labels, start)
            saved = (
                tensors,
                {"queries": view.queries - before, "seconds": time.perf_counter() - began},
            )
            work.save(name, *saved)
        tensors, values = saved
        shards.append(tensors)
        queries, seconds = queries + values["queries"], seconds + values["seconds"]
        work.progress(
            number + 1, len(groups), f"{sum(len(s['labels']) for s in shards)} identities"
        )
    joined = {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
    return Reconstructions(**joined, queries=queries, seconds=seconds)  # type: ignore[arg-type]


def _identities(attack: Attack, rows: int) -> int:
    """How many identities of so many rows make a shard: enough for a batch, or up to twice as many where less filling is then needed for each."""
    least = max(1, attack.rows // rows)
    return min(
        range(least, 2 * least),
        key=lambda count: len(padded_rows(count * rows, attack.batch_multiple)) / count,
    )


def _shard(
    attack: Attack, recipe: Recipe, view: ModelView, prior: Prior, labels: Tensor, start: Tensor
) -> dict[str, Tensor]:
    identities, rows = start.shape[:2]
    each = labels.repeat_interleave(rows).to(start.device)
    draws = torch.arange(rows, device=start.device).repeat(identities)
    batch, most = (
        len(padded_rows(attack.batch)),
        len(padded_rows(attack.rows, attack.batch_multiple)),
    )
    searches = math.ceil(len(each) / most)  # of about one size
    together = len(padded_rows(math.ceil(len(each) / searches), attack.batch_multiple))
    parts = []
    for state, y, draw in zip(
        start.flatten(0, 1).split(together),
        each.split(together),
        draws.split(together),
        strict=True,
    ):
        found = recipe.search(state, y, draw)
        latents = recipe.read(found.state, y, draw)
        pictures, score, confidence = _read_out(
            view, recipe.show or prior.images, latents, y, batch
        )
        score = score if found.score is None else found.score[:, None].expand_as(score)
        whole = found.whole[:, None] & score.isfinite() & confidence.isfinite()
        score = torch.where(
            whole, score, -torch.inf
        )  # what broke off is kept only where there is nothing else
        steps = found.steps[:, None].expand_as(score)
        parts.append((score, latents[..., : recipe.kept], pictures, confidence, steps, whole))
    columns = [
        torch.cat(column).unflatten(0, (identities, rows)).flatten(1, 2)
        for column in zip(*parts, strict=True)
    ]
    numbers = torch.arange(columns[0].shape[1], device=start.device).expand(identities, -1)
    latents, pictures, confidence, steps, whole, numbers = best(
        columns[0], attack.keep, *columns[1:], numbers
    )
    found_here = {
        "images": pictures,
        "latents": latents,
        "confidence": confidence,
        "draws": numbers,
        "steps": steps,
        "broken": ~whole,
        "partial": ~whole.any(1),
    }
    return {"labels": labels, **{name: column.cpu() for name, column in found_here.items()}}


def _read_out(
    view: ModelView,
    show: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    labels: Tensor,
    batch: int,
) -> tuple[Tensor, ...]:
    """Pictures of latents (N, D, ...) with the score by which they are kept and the target's confidence, (N, D) each."""

    def look(z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            pictures = show(z, y)
            return pictures, *_liking(view, pictures, y)

    each = labels.repeat_interleave(latents.shape[1])
    parts = [
        run_padded(view, look, z, y)
        for z, y in zip(latents.flatten(0, 1).split(batch), each.split(batch), strict=True)
    ]
    return tuple(
        torch.cat(column).unflatten(0, latents.shape[:2]) for column in zip(*parts, strict=True)
    )


def _liking(view: ModelView, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How well the target likes pictures as their labels, as finely as the view allows, and its probability; 1 or 0 where only labels are granted."""
    if "gradients" in view.access:
        logits = view.logits(images)
        return -margin(logits, labels), logits.softmax(1).gather(1, labels[:, None])[:, 0]
    if "scores" in view.access:
        scores = view.scores(images).gather(1, labels[:, None])[:, 0]
        return scores, scores
    hits = (view.labels(images) == labels).float()
    return hits, hits


def run_padded(
    view: ModelView, work: Callable[..., tuple[Tensor, ...]], *columns: Tensor
) -> tuple[Tensor, ...]:
    """Run `work` with its rows filled up to a multiple of BATCH_MULTIPLE, and hand back the real ones; filling is not counted as queries."""
    rows = padded_rows(real := len(columns[0])).to(columns[0].device)
    before = view.queries
    results = work(*(column[rows] for column in columns))
    view.queries = before + (view.queries - before) * real // len(rows)
    return tuple(result[:real] for result in results)


def _problems(attack: Attack, view: ModelView, prior: Prior, wanted: Tensor) -> list[str]:
    found = attack.problems(view, prior)
    if not len(wanted):
        found.append("no identity to attack: give at least one label")
    elif int(wanted.min()) < 0 or int(wanted.max()) >= view.classes:
        found.append(
            f"labels must lie in 0..{view.classes - 1}, got {int(wanted.min())}..{int(wanted.max())}"
        )
    if prior.image_shape[1:] != tuple(view.image_shape[1:]) and not prior.info.get(
        "resize"
    ):  # colour and grey serve each other
        made, taken = ("×".join(map(str, shape)) for shape in (prior.image_shape, view.image_shape))
        found.append(
            f"the prior makes pictures of {made}, the target takes {taken}: train a prior on such pictures, or set prior.resize to true"
        )
    if prior.hints is not None and len(prior.hints) < view.classes:
        found.append(
            f"the prior has hints for {len(prior.hints)} of {view.classes} classes: one for each is needed"
        )
    if prior.classes and prior.classes != view.classes:
        found.append(
            f"the prior was fitted to a target of {prior.classes} classes, and this one has {view.classes}: train it again for this one"
        )
    elif prior.tied_to is not None and prior.tied_to != view.target_key:
        found.append("the prior was fitted to another target: train it again for this one")
    return found


def prior_only(
    prior: Prior, labels: Sequence[int], candidates: int, *, seed: int
) -> Reconstructions:
    """The control beside every attack: random draws of the prior, handed to identities blindly.

    A generator that makes pictures of a class the target knows is given random classes, or it would bring the attack along. One that completes a
    hint is given the hint of the right person: what the hint alone tells is not what the target leaks.
    """
    wanted = torch.tensor(list(labels))
    latents = fresh(prior, wanted, candidates, seed=seed, purpose="prior only")
    given = wanted.repeat_interleave(candidates)
    if prior.condition == "label":
        given = torch.randint(
            prior.classes, given.shape, generator=generator_for(seed, "prior only", "labels")
        )
    given = given.to(latents.device)
    with frozen(*prior.modules), torch.no_grad():
        parts = zip(
            latents.flatten(0, 1).split(4 * BATCH_MULTIPLE),
            given.split(4 * BATCH_MULTIPLE),
            strict=True,
        )
        images = torch.cat([prior.images(z, y) for z, y in parts]).unflatten(0, latents.shape[:2])
    return Reconstructions(
        images=images.cpu(),
        labels=wanted,
        latents=latents.cpu(),
        confidence=torch.zeros(images.shape[:2]),
        queries=0,
        seconds=0.0,
    )
