"""The base of all attacks on models: a recipe of start, search and read-out, run shard by shard."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from frostglass.attacks._search.collected import CollectedImages
from frostglass.attacks._search.fields import AtLeastOne
from frostglass.attacks._search.layout import fast_search
from frostglass.attacks._search.query_budget import limited
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.select import Candidates, by_score, in_order
from frostglass.attacks._search.shards import people_per_shard
from frostglass.attacks._search.shared_parts import SharedParts
from frostglass.attacks._search.start import Bonus
from frostglass.attacks.base import Attack, Surface, View
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize, Budget, Variants
from frostglass.core.objective import margin
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Reconstructions
from frostglass.core.views import ModelView
from frostglass.runtime.batching import BATCH_MULTIPLE, padded_rows
from frostglass.runtime.device import device_of
from frostglass.store.files import Checkpoint, Work

# From images and the numbers of their rows in a search to a further loss, one value per image.
ExtraLoss = Callable[[Tensor, Tensor], Tensor]


# What an attacker who knows of a defense of answers would change.
REPEATED: Variants = {
    "repeated": (
        "for SSD: each answer is averaged over eight queries, which are counted; an attacker gets "
        "other draws by changing an image invisibly",
        {"samples": 8},
    ),
}


def as_latents(state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
    """Read one latent from each row: the row itself."""
    return state[:, None]


@dataclass(frozen=True)
class Recipe:
    """The parts of one attack, bound to a view and a prior.

    `start(labels)` returns the initial rows (I, R, ...) of all attacked people at once. Every
    process of a run calls it; what costs much is to be made by `view.in_parts`, which shares it.
    `search(state, labels, draws)` improves rows (N, ...) independently of each other; `draws` (N,)
    numbers the rows of a person. That of a `steerable` attack also takes an `ExtraLoss`.
    `read(state, labels, draws)` returns latents (N, D, ...) of each row. `show(latents, labels)`
    returns images in [0, 1] of latents (N, ...), by default the prior's. `bonus(images)` (N, K) is
    added to the target's margin of each class where candidates are ranked by it. `select` returns
    the order of all candidates of each person, first guess first, (I, K); by default that of their
    scores. Only the first `latent_size` numbers of a latent are returned, by default all.
    """

    start: Callable[[Tensor], Tensor]
    search: Callable[..., SearchResult]
    read: Callable[[Tensor, Tensor, Tensor], Tensor] = as_latents
    show: Callable[[Tensor, Tensor], Tensor] | None = None
    bonus: Bonus | None = None
    select: Callable[[Candidates], Tensor] = by_score
    latent_size: int | None = None


@parameters
class ModelAttack(Attack):
    """Base of the attacks on models: `recipe` binds the parameters to a view and a prior.

    Args:
        candidates: searches per person.
        keep: images returned per person, first guess first: by the target's margin, unless the
            attack ranks by something else.
        batch: images shown to the target together, rounded up to a multiple of 16.
        samples: passes through the target averaged per query; above 1, the attack averages out
            the noise of defenses such as MID.
    """

    candidates: AtLeastOne = 5
    keep: AtLeastOne = 5
    batch: AtLeastOne = 64
    samples: AtLeastOne = 1

    surface: ClassVar[Surface] = "model"

    def __post_init__(self) -> None:
        if self.keep > (most := self.candidates * self.reads):
            drawn = "candidates" if self.reads == 1 else f"candidates · {self.reads_name}"
            raise ValueError(f"keep ({self.keep}) must not exceed {drawn} ({most})")

    reads_name: ClassVar[str] = "draws"  # the parameter behind `reads`

    @property
    def reads(self) -> int:
        """Number of images read from each searched row."""
        return 1

    @property
    def rows(self) -> int:
        """Number of rows searched together: `batch`, unless a row shows several images at once."""
        return self.batch

    @property
    def batch_multiple(self) -> int:
        """Searched rows are padded to a multiple of this, because kernels round odd sizes apart."""
        return BATCH_MULTIPLE

    @property
    def steerable(self) -> bool:
        """Whether a search of the recipe takes a further loss."""
        return False

    @property
    def start_draws(self) -> int:
        """Random draws from which the starts of all people are chosen."""
        return 0

    @property
    def start_images(self) -> int:
        """Images shown to the target to choose starts, for all people together."""
        return self.start_draws * self.samples

    @property
    @abstractmethod
    def search_effort(self) -> tuple[str, int]:
        """What one search does, in words, and how many images it shows to the target at most."""

    @property
    def surrogate_images(self) -> int:
        """Images that one search shows to the attacker's own networks instead of the target."""
        return 0

    @abstractmethod
    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        """Bind the attack to a view and to assets."""

    @property
    def kept(self) -> int:
        return self.keep

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"prior"})

    def budget(self, size: AuditSize) -> Budget:
        words, images = self.search_effort
        pool = f", pool of {self.start_draws:,}" if self.start_draws else ""
        plural = "" if self.candidates == 1 else "s"
        return Budget(
            f"{size.people:,} people × {self.candidates:,} candidate{plural} × {words}{pool}",
            evaluations=size.people * self.candidates * images + self.start_images,
            trained=size.people * self.candidates * self.surrogate_images,
        )

    def brief(self) -> Self:
        candidates = min(self.candidates, 2 * self.rows)
        keep = min(self.keep, candidates * self.reads)
        return replace(self, candidates=candidates, keep=keep, **self.brief_counts(candidates))

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        """Return minimal iteration counts for `brief`, which searches `candidates` per person."""
        return {}

    def within(self, queries: int, people: int) -> Self:
        return limited(self, queries, people)

    def scaled_counts(self, share: float) -> dict[str, Any]:
        """Return the counts of iterations and draws, times a share; for `within`."""
        return {}

    def problems(self, view: View, assets: Assets) -> list[str]:
        if missing := super().problems(view, assets):
            return missing
        assert isinstance(view, ModelView)  # as `invert` checks
        prior = assets.require_prior()
        return [*self.prior_problems(prior), *_misfits(view, prior)]

    def prior_problems(self, prior: Prior) -> list[str]:
        """List what keeps this attack from using a prior, whatever the target is."""
        if not (self.start_draws and prior.condition):
            return []
        return [
            f"{self.name} scores random draws for all people at once, but this prior needs a "
            f"{prior.condition} for each image: use another prior, or set attack.pool to 0 if "
            "the attack allows it"
        ]

    def run(
        self, view: View, assets: Assets, people: Tensor, *, seed: int, work: Work
    ) -> Reconstructions:
        """Search for all people; each finished group is saved in `work`, so a restart resumes."""
        assert isinstance(view, ModelView)  # as `invert` checks
        prior = assets.require_prior()
        devices = device_of(view.module), device_of(prior.generator)
        if devices[0] != devices[1]:
            raise ConfigError(
                f"target and prior must be on one device, got {devices[0]} and {devices[1]}: "
                "move one with .to()"
            )
        began, view = time.perf_counter(), view.averaged(self.samples)
        # Bound before layers are folded, because copies of folded networks would share them.
        recipe = self.recipe(view, assets, seed=seed)
        with fast_search(view, prior):
            return _run(self, recipe, view, prior, people, began=began, work=work)


@parameters
class QueryAttack(ModelAttack):
    """Base of the attacks without gradients: one long search per person, large batches."""

    candidates: AtLeastOne = 1
    keep: AtLeastOne = 1
    batch: AtLeastOne = 256

    variants: ClassVar[Variants] = REPEATED


def _misfits(view: ModelView, prior: Prior) -> list[str]:
    """List the ways in which a prior does not fit a target; grey and colour images convert."""
    problems = []
    if prior.image_shape[1:] != tuple(view.image_shape[1:]) and not prior.info.get("resize"):
        made, taken = ("×".join(map(str, shape)) for shape in (prior.image_shape, view.image_shape))
        problems.append(
            f"the prior generates images of {made}, the target takes {taken}: train a prior on "
            "such images, or set prior.resize to true"
        )
    if prior.hints is not None and len(prior.hints) < view.classes:
        problems.append(
            f"expected a hint for each of {view.classes} classes, got {len(prior.hints)}: "
            "give the prior one for each"
        )
    if prior.classes and prior.classes != view.classes:
        problems.append(
            f"the prior was fitted to a target of {prior.classes} classes, got one of "
            f"{view.classes}: train the prior for this target"
        )
    elif prior.tied_to is not None and prior.tied_to != view.target_key:
        problems.append("the prior was fitted to another target: train it for this one")
    return problems


def _run(
    attack: ModelAttack,
    recipe: Recipe,
    view: ModelView,
    prior: Prior,
    people: Tensor,
    *,
    began: float,
    work: Work,
) -> Reconstructions:
    shared, before = SharedParts(view, work), view.queries
    with view.parts_from(shared):
        starts = recipe.start(people).to(device_of(prior.generator)).contiguous()
    queries = shared.queries + view.queries - before - shared.own_queries
    seconds = shared.seconds + time.perf_counter() - began - shared.own_seconds
    size = people_per_shard(attack.rows, attack.batch_multiple, starts.shape[1], len(people))
    groups = list(zip(people.split(size), starts.split(size), strict=True))
    images = CollectedImages(work, len(people))

    def search(number: int) -> Checkpoint:
        began, before = time.perf_counter(), view.queries
        tensors = images.smaller(_shard(attack, recipe, view, prior, *groups[number]))
        spent = {"queries": view.queries - before, "seconds": time.perf_counter() - began}
        return tensors, spent

    parts = work.share(
        [f"shard-{number:05d}" for number in range(len(groups))],
        search,
        lambda done: f"{min(done * size, len(people))} people",
    )
    shards = []
    for tensors, spent in parts:
        shards.append(images.add(tensors))
        queries += spent["queries"]
        seconds += spent["seconds"]
    joined: dict[str, Any] = {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
    return Reconstructions(images.all(), **joined, queries=queries, seconds=seconds)


def _shard(
    attack: ModelAttack,
    recipe: Recipe,
    view: ModelView,
    prior: Prior,
    labels: Tensor,
    start: Tensor,
) -> dict[str, Tensor]:
    """Search the rows of some people (I, R, ...) and keep the best images of each."""
    people, rows = start.shape[:2]
    each = labels.repeat_interleave(rows).to(start.device)
    draws = torch.arange(rows, device=start.device).repeat(people)
    most = len(padded_rows(attack.rows, attack.batch_multiple))
    searches = math.ceil(len(each) / most)  # of about one size
    together = len(padded_rows(math.ceil(len(each) / searches), attack.batch_multiple))
    parts = []
    batches = (all_rows.split(together) for all_rows in (start.flatten(0, 1), each, draws))
    for state, y, draw in zip(*batches, strict=True):
        result = recipe.search(state, y, draw)
        latents = recipe.read(result.state, y, draw)
        images, score, confidence = read_out(
            view, recipe, prior, latents, y, len(padded_rows(attack.batch))
        )
        if result.score is not None:
            score = _per_read(result.score, score)
        finished = _per_read(result.finished, score) & score.isfinite() & confidence.isfinite()
        score = torch.where(finished, score, -torch.inf)  # unfinished searches rank last
        steps = _per_read(result.steps, score)
        latents = latents[..., : recipe.latent_size]
        traces = result.traces(score.shape[1])
        parts.append((score, latents, images, confidence, steps, finished, *traces))
    columns = [
        torch.cat(column).unflatten(0, (people, rows)).flatten(1, 2)
        for column in zip(*parts, strict=True)
    ]
    score, latents, images, confidence, steps, finished, *traces = columns
    order = recipe.select(Candidates(images, labels.to(start.device), score))[:, : attack.keep]
    kept = {
        "images": images,
        "latents": latents,
        "confidence": confidence,
        "steps": steps,
        "broken": ~finished,
        **({"trace": traces[0]} if traces else {}),
    }
    kept = {name: in_order(order, column) for name, column in kept.items()}
    kept |= {"draws": order, "partial": kept["broken"].all(1)}
    return {"labels": labels, **{name: column.cpu() for name, column in kept.items()}}


def _per_read(column: Tensor, like: Tensor) -> Tensor:
    """Return a value of each row (N,) or read image (N, D) for each read image."""
    return column if column.ndim == 2 else column[:, None].expand_as(like)


def read_out(
    view: ModelView,
    recipe: Recipe,
    prior: Prior,
    latents: Tensor,
    labels: Tensor,
    batch: int,
) -> tuple[Tensor, ...]:
    """Return images of latents (N, D, ...), their scores and the target's confidence, (N, D)."""

    def look(z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            images = (recipe.show or prior.images)(z, y)
            score, confidence = _score(view, images, y)
            if recipe.bonus:
                score = score + recipe.bonus(images).gather(1, y[:, None])[:, 0]
            return images, score, confidence

    each = labels.repeat_interleave(latents.shape[1])
    parts = [
        run_padded(view, look, z, y)
        for z, y in zip(latents.flatten(0, 1).split(batch), each.split(batch), strict=True)
    ]
    return tuple(
        torch.cat(column).unflatten(0, latents.shape[:2]) for column in zip(*parts, strict=True)
    )


def _score(view: ModelView, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finest score the view grants and the probability of each label, (N,).

    Where only labels are granted, both are 1 or 0.
    """
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
    """Run `work` on rows padded to BATCH_MULTIPLE; padding is not counted as queries."""
    rows = padded_rows(real := len(columns[0])).to(columns[0].device)
    before = view.queries
    results = work(*(column[rows] for column in columns))
    view.queries = before + (view.queries - before) * real // len(rows)
    return tuple(result[:real] for result in results)
