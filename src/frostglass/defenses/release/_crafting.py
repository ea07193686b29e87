"""Shared by Crafter and Crafter-z: parameters, and a loop over batches that can be resumed."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Shape
from frostglass.defenses.base import Defense, Release
from frostglass.defenses.release._critic import DistributionCritic
from frostglass.defenses.release._implicit import expand_rows
from frostglass.defenses.release._inversion import CHUNK, Inversion, reciprocal
from frostglass.defenses.release._state import CraftState
from frostglass.defenses.strengths import Range, Real
from frostglass.models.cut import encoded
from frostglass.runtime.device import device_of
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.layout import channels_last
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.store.files import Work

CHECK_EVERY = 10  # steps between updates of the curvature, and between checks for convergence
FIRST_CHECK_EVERY = 50  # the same for the first inversion, where only latents change
FIRST_POWER, NEXT_POWER = 12, 2  # power iterations from a random and from a known direction
ADVICE = (
    "Lower inner_lr, alpha, lr or critic_lr. The last good checkpoint is kept, and the same "
    "command resumes from it."
)


@parameters
class Crafting(Defense):
    """Base of defenses that craft the features of a batch of images against a critic.

    Args:
        beta: β, the weight of the deviation from the plain features: larger is more useful and less
            protected. It depends on the scale of the features.
        steps: steps on the crafted features; 0 releases the plain features.
        lr: Adam's step size on the crafted features.
        tolerance: stop a batch early once ten steps have moved the crafted features by less than
            this share of ten full strides of lr (root mean square); 0 takes all steps.
        batch: images protected together, in near-equal batches; a critic compares sets, so the
            release of an image depends on its batch.
        critic_lr: Adam's step size of the critic.
        critic_steps: its steps for each step on the crafted features.
        critic_batch: images of each kind per step of the critic.
        critic_width: channels of its first stage; 64 is published.
        penalty: weight of its gradient penalty, doubled while that is above 1.
        index_steps: steps of the two fresh critics that measure, for the record, the distance to
            draws of the prior before and after.
        scale: factor of the squared feature error of the anticipated inversion; matters beside
            `realism`, and where a step size is given as a number.
        realism: weight of the prior's own critic in the anticipated inversion; 0 needs none.
        inner_lr: step size of the anticipated inversion; none for one over the largest curvature of
            each image.
        inner_momentum: its momentum.
        first_steps: steps of the first inversion.
        starts: first inversions of each image, from as many latents; the best is kept.
        amortized: start inversions at the amortizer's prediction instead of a random latent. Of
            several `starts` it is the first.
        pool: random latents are the best of this many, by their features.
        checkpoint_every: steps between checkpoints; does not change the result.
    """

    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    steps: Annotated[int, Field(ge=0)] = 100
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    batch: Annotated[int, Field(ge=2)] = 64
    critic_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e-4
    critic_steps: Annotated[int, Field(ge=1)] = 10
    critic_batch: Annotated[int, Field(ge=1)] = 32
    critic_width: Annotated[int, Field(ge=4)] = 16
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0
    index_steps: Annotated[int, Field(ge=1)] = 200
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    realism: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    inner_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    inner_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    first_steps: Annotated[int, Field(ge=0)] = 100
    starts: Annotated[int, Field(ge=1)] = 1
    amortized: bool = False
    pool: Annotated[int, Field(ge=1)] = 64
    checkpoint_every: Annotated[int, Field(ge=1)] = 20

    releases: ClassVar[bool] = True
    takes_attributes: ClassVar[bool] = True
    needs_cut: ClassVar[bool] = True
    disabled: ClassVar[Mapping[str, Any]] = {"steps": 0}
    unkeyed: ClassVar[Mapping[str, Any]] = {"starts": 1}

    def __post_init__(self) -> None:
        if self._drawn > self.pool:
            raise ValueError(
                f"pool ({self.pool}) must be at least the {self._drawn} random latents of starts "
                f"({self.starts})"
            )

    @property
    def _drawn(self) -> int:
        """Number of first inversions that start at a random latent."""
        return self.starts - self.amortized

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"beta": Real(0.1, 50, log=True)}

    @abstractmethod
    def initial(self, state: CraftState) -> Tensor:
        """Return what the optimizer starts from, after the first inversion."""

    @abstractmethod
    def gradient(self, state: CraftState) -> Tensor:
        """Return the gradient of the objective, a sum over images, for the critic as it is."""

    @abstractmethod
    def update_latents(self, state: CraftState) -> None:
        """Update `state.latents` after a step of the optimizer."""

    @abstractmethod
    def finish(self, state: CraftState) -> tuple[Tensor, dict[str, float]]:
        """Return the features to release, and further facts about them."""

    def ceiling(self, state: CraftState) -> Tensor | None:
        """Return the features of the first inversion, if those released cannot be better."""
        return None

    @property
    @abstractmethod
    def evaluations(self) -> int:
        """How often all steps together pass an image through prior and encoder."""

    @property
    def needs(self) -> frozenset[Asset]:
        if not self.steps:
            return frozenset()
        return frozenset({"prior", "amortizer"} if self.amortized else {"prior"})

    def brief(self) -> Self:
        return replace(
            self,
            steps=min(2, self.steps),
            critic_steps=1,
            index_steps=1,
            first_steps=min(1, self.first_steps),
            pool=min(max(4 * CHUNK, self._drawn), self.pool),
            checkpoint_every=1,
        )

    def budget(self, size: AuditSize) -> Budget:
        if not self.steps:
            return Budget(f"{size.images} images", evaluations=size.images)
        batches = self._batches(size.images)
        power = FIRST_POWER + NEXT_POWER * (self.first_steps // FIRST_CHECK_EVERY)
        each = 1 + self.starts * (power + self.first_steps) + self.evaluations
        critic = self.steps * self.critic_steps + 2 * self.index_steps
        return Budget(
            f"{size.images} images × {self.steps} steps in {batches} batches",
            evaluations=size.images * each + (batches * self.pool if self._drawn else 0),
            trained=batches * critic * 2 * self.critic_batch,
        )

    def inner_rate(self, state: CraftState) -> Tensor:
        """Return the step size of the anticipated inversion, (N,)."""
        if self.inner_lr is None:
            return reciprocal(state.curvature)
        return torch.full_like(state.curvature, self.inner_lr)

    def release(
        self, encoder: nn.Module, images: Tensor, assets: Assets, *, seed: int, work: Work
    ) -> Release:
        """Return the crafted features of all images, with one row of facts per batch.

        Finished batches and the current one are kept in `work`.
        """
        images = images.to(device_of(encoder))
        plain = encoded(encoder, images)
        if not self.steps:
            return Release(plain)
        shape: Shape = (images.shape[1], images.shape[2], images.shape[3])
        if problems := [
            *assets.missing(self.needs, self.name),
            *self.release_problems(shape, len(images), assets.prior),
        ]:
            raise ConfigError(problems)
        count, parts, facts = self._batches(len(images)), [], []
        with self._frozen(encoder, assets) as inversion:
            for number, part in enumerate(plain.tensor_split(count)):
                crafted = work.load(f"{self.name}-{number}")
                if crafted is None:
                    own_seed = seed_for(seed, self.name, number)
                    state = self._new_state(inversion, assets, part, own_seed)
                    crafted = self._craft(state, number, count, seed=own_seed, work=work)
                    work.save(f"{self.name}-{number}", *crafted)
                parts.append({name: part.to(plain.device) for name, part in crafted[0].items()})
                facts.append(crafted[1])
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Release(joined["features"], tuple(facts), joined.get("ceiling"))

    def release_problems(self, image_shape: Shape, images: int, prior: Prior | None) -> list[str]:
        if not self.steps:
            return []
        problems = []
        if images < 2:
            problems.append(
                f"{self.name} compares sets of images and needs at least 2, got {images}. Protect "
                "several together."
            )
        if prior is None:
            return problems
        shapes = tuple("×".join(map(str, shape)) for shape in (prior.image_shape, image_shape))
        if shapes[0] != shapes[1]:
            problems.append(
                "the prior generates images of {}, the encoder takes {}. Use a prior of the data's "
                "own shape.".format(*shapes)
            )
        height, width = image_shape[1:]
        if height != width or height < 8 or height & (height - 1):
            problems.append(
                f"{self.name} needs square images of 8, 16, 32, ... pixels for its critic, got "
                f"{height}×{width}. Change data.size."
            )
        if prior.condition:
            problems.append(
                f"{self.name} needs a prior of latents alone, got one that also takes a "
                f"{prior.condition}. Use another, such as wgan."
            )
        if self.realism and prior.critic is None:
            problems.append(
                f"{self.name}.realism must be 0 for a prior without a critic, got {self.realism}"
            )
        return problems

    def _batches(self, images: int) -> int:
        return max(1, min(math.ceil(images / self.batch), images // 2))

    @contextmanager
    def _frozen(self, encoder: nn.Module, assets: Assets) -> Iterator[Inversion]:
        """Freeze all networks inside the block, and return the anticipated inversion."""
        fixed = [encoder, *assets.modules]
        # The fast kernels of attention have no second derivative.
        with frozen(*fixed), channels_last(*fixed), folded(*fixed), sdpa_kernel(SDPBackend.MATH):
            yield Inversion(encoder, assets.require_prior(), self.scale, self.realism)

    def _craft(
        self, state: CraftState, number: int, count: int, *, seed: int, work: Work
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the features of one batch, and the facts about it."""
        if (saved := work.load(self.name)) and saved[1]["batch"] == number:
            state.restore(*saved, self.lr)
        else:
            self._first_inversion(state, seed)
            work.save(self.name, *state.checkpoint(number))
        while state.steps < self.steps and not state.converged:
            where = f"step {state.steps} of batch {number}"
            distance = self._step(state, generator_for(seed, "step", state.steps), where)
            if state.steps % self.checkpoint_every == 0 and state.steps < self.steps:
                work.save(self.name, *state.checkpoint(number))
            done = number * self.steps + state.steps
            work.progress(done, count * self.steps, f"distance {distance:.2f}")
        features, more = self.finish(state)
        facts = {"images": len(state.plain), "steps": state.steps, **state.facts, **more}
        facts["deviation"] = (features - state.plain).square().mean().item()
        for name, latents in (("emd_start", state.first_latents), ("emd_end", state.latents)):
            critic = self._critic(state.critic.real, seed_for(seed, "index"))
            inverted = state.images(latents)
            critic.train(inverted, self.index_steps, generator_for(seed, "index"))
            facts[name] = critic.distance(inverted)
        if not features.isfinite().all() or not all(map(math.isfinite, facts.values())):
            raise RunError(
                f"{self.name}: the features of batch {number} are not finite ({facts}). {ADVICE}"
            )
        with torch.no_grad():
            ceiling = self.ceiling(state)
        tensors = {"features": features} | ({} if ceiling is None else {"ceiling": ceiling})
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, facts

    def _critic(self, real: Tensor, seed: int) -> DistributionCritic:
        return DistributionCritic(
            real,
            width=self.critic_width,
            lr=self.critic_lr,
            batch=self.critic_batch,
            penalty=self.penalty,
            seed=seed,
        )

    def _new_state(
        self, inversion: Inversion, assets: Assets, plain: Tensor, seed: int
    ) -> CraftState:
        """Return a batch before its first inversion, with its own draws of the prior."""
        draws, direction = (
            torch.randn(
                len(plain), inversion.prior.latent, generator=generator_for(seed, purpose)
            ).to(plain.device)
            for purpose in ("real", "power")
        )
        with torch.no_grad():
            critic = self._critic(inversion.prior.images(draws), seed)
        zeros = torch.zeros_like(draws)
        return CraftState(
            inversion=inversion,
            critic=critic,
            plain=plain,
            amortizer=assets.amortizer if self.amortized else None,
            start=zeros,
            first_latents=zeros,
            latents=zeros,
            curvature=zeros[:, 0].contiguous(),
            direction=direction,
            variable=zeros,
            anchor=zeros,
            optimizer=critic.optimizer,
        )

    def _first_inversion(self, state: CraftState, seed: int) -> None:
        """Invert the plain features; curvature changes most on the way from a random latent."""
        inversion, plain = state.inversion, state.plain
        starts = self._first_starts(state, generator_for(seed, "pool"))
        probe = starts[0][:1].detach().requires_grad_()
        if not inversion.losses(plain[:1], probe).requires_grad:
            raise ConfigError(
                f"{self.name} needs gradients from features to latents, but the encoder detaches "
                "its input. Make all of it differentiable."
            )
        direction, least = state.direction, torch.full_like(state.curvature, torch.inf)
        kept = [torch.zeros_like(starts[0])] * 3 + [state.curvature]
        for start in starts:
            state.curvature, state.direction = torch.zeros_like(state.curvature), direction
            latents = self._descended(state, start)
            with torch.no_grad():
                losses = inversion.losses(plain, latents).to(least)
            better = (losses < least) | ~least.isfinite()
            found = [start, latents, state.direction, state.curvature]
            kept = [
                torch.where(expand_rows(better, new), new, old)
                for new, old in zip(found, kept, strict=True)
            ]
            least = torch.where(better, losses, least)
        state.start, state.latents, state.direction, state.curvature = kept
        state.first_latents = state.latents
        residual, gradient = inversion.fit(plain, state.latents)
        if not math.isfinite(residual + gradient):
            raise RunError(
                f"{self.name}: the first inversion is not finite (residual {residual}). {ADVICE}"
            )
        state.facts = {"residual_start": residual, "gradient_start": gradient}
        state.optimize_from(self.initial(state), self.lr)

    def _first_starts(self, state: CraftState, rng: torch.Generator) -> list[Tensor]:
        """Return the latents at which first inversions start, each (N, latent)."""
        predicted = [] if state.amortizer is None else [state.initial_latents(state.plain)]
        if not self._drawn:
            return predicted
        with torch.no_grad():
            drawn = state.inversion.nearest(state.plain, self.pool, rng, self._drawn)
        return [*predicted, *drawn]

    def _descended(self, state: CraftState, latents: Tensor) -> Tensor:
        """Invert the plain features from `latents`; updates the curvature on the way."""
        inversion, plain = state.inversion, state.plain
        power, rounds = FIRST_POWER, self.first_steps // FIRST_CHECK_EVERY
        for steps in [*[FIRST_CHECK_EVERY] * rounds, self.first_steps % FIRST_CHECK_EVERY]:
            state.raise_curvature(*inversion.curvature(plain, latents, state.direction, power))
            latents = inversion.descend(
                plain, latents, steps, self.inner_rate(state), self.inner_momentum
            )
            power = NEXT_POWER
        return latents

    def _step(self, state: CraftState, rng: torch.Generator, where: str) -> float:
        """Train the critic, move the features, update the inversion; return the distance."""
        distance = state.critic.train(state.images(state.latents), self.critic_steps, rng)
        state.variable.grad = self.gradient(state)
        if not (state.variable.grad.isfinite().all() and math.isfinite(distance)):
            raise RunError(f"{self.name}: not finite at {where} (distance {distance}). {ADVICE}")
        state.optimizer.step()
        self.update_latents(state)
        state.steps += 1
        if state.steps % CHECK_EVERY == 0:
            moved = (state.variable.detach() - state.anchor).square().mean().sqrt().item()
            state.anchor = state.variable.detach().clone()
            state.converged = moved / (CHECK_EVERY * self.lr) < self.tolerance
        return distance
