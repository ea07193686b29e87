"""What Crafter and Crafter-z share: the inversion they foresee, the critic they play against, and a loop over batches that can be
resumed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Shape
from frostglass.defenses.base import Defense, Release
from frostglass.defenses.release._critic import Judge
from frostglass.defenses.release._implicit import across, largest_curvature
from frostglass.runtime.device import device_of
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import channels_last, frozen
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

CHUNK = 128  # pictures encoded at once
LOOK = 10  # steps between two looks at the curvature, and at whether anything still moves
RENEW = 50  # the same for the first inversion, where only latents move
FIRST_POWER, NEXT_POWER = (
    12,
    2,
)  # power iterations from a random direction, and from the one found before
PLACES = ("cold", "opening", "latents", "curvature", "direction", "anchor")
ADVICE = "lower inner_lr, alpha, lr or critic_lr; the last good checkpoint is kept and the same command resumes there"


@dataclass(frozen=True)
class Inversion:
    """The attack that is foreseen: z* = argmin_z L(F, z) with L = scale · ‖F - Enc(G(z))‖² / d - realism · D(G(z)), one value a row.

    d is the number of values in a feature, D the prior's own critic. Networks in evaluation mode keep the rows apart.
    """

    encoder: nn.Module
    prior: Prior
    scale: float
    realism: float

    def encoded(self, latents: Tensor) -> Tensor:
        return self.encoder(self.prior.images(latents))

    def losses(self, features: Tensor, latents: Tensor) -> Tensor:
        pictures = self.prior.images(latents)
        error = self.scale * (self.encoder(pictures) - features).flatten(1).square().mean(1)
        return error - self.realism * self.prior.realism(pictures) if self.realism else error

    def descend(
        self, features: Tensor, latents: Tensor, steps: int, rate: Tensor, momentum: float
    ) -> Tensor:
        """Where `steps` of heavy-ball descent lead: v ← μv + g, z ← z - ηv, with a rate η (N,) for each row."""
        speed, rate = torch.zeros_like(latents), across(rate, latents)
        for _ in range(steps):
            leaf = latents.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.losses(features, leaf).sum(), leaf)
            speed = momentum * speed + slope
            latents = leaf.detach() - rate * speed
        return latents

    def curvature(
        self, features: Tensor, latents: Tensor, direction: Tensor, iterations: int
    ) -> tuple[Tensor, Tensor]:
        """The largest curvature (N,) of L in z, and the directions it was found in."""
        leaf = latents.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.losses(features, leaf).sum(), leaf, create_graph=True)
        return largest_curvature(
            lambda rows: torch.autograd.grad(slope, leaf, rows, retain_graph=True)[0],
            direction,
            iterations,
        )

    def fit(self, features: Tensor, latents: Tensor) -> tuple[float, float]:
        """How well latents explain features: mean ‖F - Enc(G(z))‖² / d, and mean ‖∂L/∂z‖, which is 0 at a minimum."""
        leaf = latents.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.losses(features, leaf).sum(), leaf)
        with torch.no_grad():
            return (self.encoded(latents) - features).square().mean().item(), slope.norm(
                dim=1
            ).mean().item()

    def nearest(self, features: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """For each feature the one of `count` random latents whose picture's feature is nearest."""
        draws = torch.randn(count, self.prior.latent, generator=rng).to(features.device)
        made = torch.cat([self.encoded(part).flatten(1) for part in draws.split(CHUNK)])
        return draws[torch.cdist(features.flatten(1), made).argmin(1)]


@dataclass
class Craft:
    """One batch of pictures on its way.

    `originals` are the plain features, `free` is what the optimiser `rule` moves, and `anchor` where that was at the last look. The
    foreseen inversion begins at `cold`, found `opening` for the plain features, and finds `latents` for what is crafted now; `curvature`
    (N,) is the largest it has met, the last in `direction`. `done` counts steps; `still` says that nothing moves any more.
    """

    inversion: Inversion
    judge: Judge
    originals: Tensor
    amortizer: nn.Module | None
    cold: Tensor
    opening: Tensor
    latents: Tensor
    curvature: Tensor
    direction: Tensor
    free: Tensor
    anchor: Tensor
    rule: torch.optim.Optimizer
    done: int = 0
    still: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def let_go(self, start: Tensor, lr: float) -> None:
        """From now on the optimiser moves a copy of `start`."""
        self.free, self.anchor = start.detach().clone().requires_grad_(), start.detach().clone()
        self.rule = torch.optim.Adam([self.free], lr=lr)

    def pictures(self, latents: Tensor) -> Tensor:
        with torch.no_grad():
            return self.inversion.prior.images(latents)

    def guess(self, features: Tensor) -> Tensor:
        """Where a cold inversion of features begins."""
        if self.amortizer is None:
            return self.cold
        with torch.no_grad():
            return self.amortizer(features)

    def note(self, curvature: Tensor, direction: Tensor) -> None:
        """Remember the largest curvature of each picture: one met again must not throw the descent off."""
        self.curvature, self.direction = torch.maximum(self.curvature, curvature), direction

    def saved(self, batch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {name: getattr(self, name) for name in PLACES} | {"free": self.free.detach()}
        tensors |= with_prefix("rule", optimizer_tensors(self.rule)) | with_prefix(
            "judge", self.judge.tensors()
        )
        return tensors, {
            "batch": batch,
            "done": self.done,
            "still": self.still,
            "facts": self.facts,
        }

    def restore(self, tensors: dict[str, Tensor], values: Mapping[str, Any], lr: float) -> None:
        self.let_go(tensors["free"].to(self.originals.device), lr)
        for name in PLACES:
            setattr(self, name, tensors[name].to(self.originals.device))
        restore_optimizer(self.rule, under_prefix("rule", tensors))
        self.judge.restore(under_prefix("judge", tensors))
        self.done, self.still, self.facts = values["done"], values["still"], dict(values["facts"])


@parameters
class Crafting(Defense):
    """Base of the defenses that craft the features of a batch of pictures against a critic, before they leave the device.

    Args:
        beta: β, the weight of the deviation from the plain features: the larger, the more useful and the less protected. It is on the scale
            of the features.
        steps: steps on what is crafted; 0 releases the plain features.
        lr: Adam's step size on what is crafted.
        tolerance: a batch is done once ten steps have moved what is crafted by less than this share of ten full strides of lr (root mean
            square); 0 takes all steps.
        batch: pictures that are protected together, in near-equal batches; a critic compares sets, so what is released for a picture
            depends on its company.
        critic_lr: Adam's step size of the critic.
        critic_steps: its steps for each step on what is crafted.
        critic_batch: pictures of each kind that it sees in a step.
        critic_width: channels of its first stage; 64 is published.
        penalty: weight of its gradient penalty, doubled while that is above 1.
        index_steps: steps of the two fresh critics that measure, for the record, the distance to draws of the prior before and after.
        scale: what the squared feature error of the foreseen inversion is multiplied by; matters beside `realism`, and where a step size is
            given as a number.
        realism: weight of the prior's own critic in the foreseen inversion; 0 needs none.
        inner_lr: step size of the foreseen inversion; none for one over the largest curvature, each picture its own.
        inner_momentum: its momentum.
        first_steps: steps of the first inversion.
        amortized: begin inversions at the amortizer's guess instead of at a random latent.
        pool: the random latent is the best of this many, by its feature.
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
    amortized: bool = False
    pool: Annotated[int, Field(ge=1)] = 64
    checkpoint_every: Annotated[int, Field(ge=1)] = 20

    releases = True
    takes_attributes = True
    off: ClassVar[Mapping[str, Any]] = {"steps": 0}

    @property
    def needs(self) -> frozenset[Asset]:
        return (
            frozenset({"prior", "amortizer"} if self.amortized else {"prior"})
            if self.steps
            else frozenset()
        )

    def beginning(self, craft: Craft) -> Tensor:
        """Where what is crafted begins, after the first inversion."""
        raise TypeError(f"{type(self).__name__} must define beginning()")

    def slope(self, craft: Craft) -> Tensor:
        """The gradient of the whole objective in what is crafted, a sum over pictures, for the critic as it is."""
        raise TypeError(f"{type(self).__name__} must define slope()")

    def follow(self, craft: Craft) -> None:
        """Bring `craft.latents` up to date with what is crafted."""
        raise TypeError(f"{type(self).__name__} must define follow()")

    def finished(self, craft: Craft) -> tuple[Tensor, dict[str, float]]:
        """The features to release, and what else there is to tell of them."""
        raise TypeError(f"{type(self).__name__} must define finished()")

    def rate(self, craft: Craft) -> Tensor:
        """The foreseen inversion's step size, (N,)."""
        return (
            reciprocal(craft.curvature)
            if self.inner_lr is None
            else torch.full_like(craft.curvature, self.inner_lr)
        )

    def release(
        self, encoder: nn.Module, images: Tensor, assets: Assets, *, seed: int, work: Work
    ) -> Release:
        """The crafted features of all pictures, one row of facts a batch; finished batches and the one under way are kept in `work`."""
        images = images.to(device_of(encoder))
        with frozen(encoder), torch.no_grad():
            plain = torch.cat([encoder(part) for part in images.split(CHUNK)])
        if not self.steps:
            return Release(plain)
        shape, count = (
            (images.shape[1], images.shape[2], images.shape[3]),
            self._batches(len(images)),
        )
        if problems := [
            *assets.missing(self.needs, self.name),
            *self.misfits(shape, len(images), assets.prior),
        ]:
            raise ConfigError(problems)
        made, facts = [], []
        with self._foreseen(encoder, assets) as (inversion, amortizer):
            for number, originals in enumerate(plain.tensor_split(count)):
                kept = work.load(f"{self.name}-{number}")
                if kept is None:
                    kept = self._crafted(
                        inversion,
                        amortizer,
                        originals,
                        number,
                        count,
                        seed=seed_for(seed, self.name, number),
                        work=work,
                    )
                    work.save(f"{self.name}-{number}", *kept)
                made.append(kept[0]["features"].to(plain.device))
                facts.append(kept[1])
        return Release(torch.cat(made), tuple(facts))

    def _batches(self, pictures: int) -> int:
        return max(1, min(math.ceil(pictures / self.batch), pictures // 2))

    @contextmanager
    def _foreseen(
        self, encoder: nn.Module, assets: Assets
    ) -> Iterator[tuple[Inversion, nn.Module | None]]:
        """The inversion that is foreseen, and the amortizer where inversions begin at its guess; all networks stand still inside the block."""
        prior, amortizer = assets.require_prior(), assets.amortizer if self.amortized else None
        fixed = [encoder, *prior.modules, *([amortizer] if amortizer is not None else [])]
        # Attention in its plain form: the fast one has no second derivative.
        with frozen(*fixed), channels_last(*fixed), folded(*fixed), sdpa_kernel(SDPBackend.MATH):
            yield Inversion(encoder, prior, self.scale, self.realism), amortizer

    def efforts(
        self, encoder: nn.Module, images: Tensor, assets: Assets, pictures: int
    ) -> Iterator[tuple[Callable[[], Any], float]]:
        if not self.steps:
            return
        with self._foreseen(encoder, assets) as (inversion, amortizer):
            with torch.no_grad():
                plain = encoder(images)
            craft, rng, often = (
                self._untouched(inversion, amortizer, plain, 0),
                generator_for(0, "efforts"),
                pictures / len(images),
            )
            replace(self, first_steps=0)._open(craft, 0)
            craft.done = 1  # a step like most: at every tenth there is a look at the curvature too
            rate, found = self.rate(craft), craft.pictures(craft.latents)
            searched = self.first_steps + self.steps * getattr(self, "inner_steps", 0)
            yield (
                lambda: inversion.descend(plain, craft.latents, 1, rate, self.inner_momentum),
                often * searched,
            )
            yield (
                lambda: craft.judge.learn(found, 1, rng),
                self._batches(pictures) * (self.steps * self.critic_steps + 2 * self.index_steps),
            )
            for shorter, weight in self.shorter():
                yield partial(shorter.slope, craft), weight * often * self.steps

    def shorter(self) -> Sequence[tuple["Crafting", float]]:
        """Methods whose slopes, so weighted, take together as long as its own, and less to time."""
        return [(self, 1.0)]

    def misfits(self, image_shape: Shape, pictures: int, prior: Prior | None) -> list[str]:
        if not self.steps:
            return []
        found = []
        if pictures < 2:
            found.append(
                f"{self.name} compares sets of pictures and needs at least 2, got {pictures}: protect several together"
            )
        if prior is None:
            return found
        shapes = tuple("×".join(map(str, shape)) for shape in (prior.image_shape, image_shape))
        if shapes[0] != shapes[1]:
            found.append(
                "the prior makes pictures of {} and the encoder takes {}: use a prior of the data's own shape".format(
                    *shapes
                )
            )
        side, other = image_shape[1:]
        if side != other or side < 8 or side & (side - 1):
            found.append(
                f"the critic of {self.name} takes square pictures of 8, 16, 32, ... pixels, got {side}×{other}: change data.size"
            )
        if prior.condition:
            found.append(
                f"{self.name} needs a prior of latents alone, and this one also takes a {prior.condition}: use another, such as wgan"
            )
        if self.realism and prior.critic is None:
            found.append(f"{self.name}.realism is not 0 and the prior has no critic: set it to 0")
        return found

    def _crafted(
        self,
        inversion: Inversion,
        amortizer: nn.Module | None,
        originals: Tensor,
        number: int,
        count: int,
        *,
        seed: int,
        work: Work,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The features of one batch, and what was measured on the way."""
        craft = self._untouched(inversion, amortizer, originals, seed)
        if (saved := work.load(self.name)) and saved[1]["batch"] == number:
            craft.restore(*saved, self.lr)
        else:
            self._open(craft, seed)
            work.save(self.name, *craft.saved(number))
        while craft.done < self.steps and not craft.still:
            seen = self._step(
                craft,
                generator_for(seed, "step", craft.done),
                f"step {craft.done} of batch {number}",
            )
            if craft.done % self.checkpoint_every == 0 and craft.done < self.steps:
                work.save(self.name, *craft.saved(number))
            work.progress(
                number * self.steps + craft.done, count * self.steps, f"distance {seen:.2f}"
            )
        made, more = self.finished(craft)
        facts = {"pictures": len(originals), "steps": craft.done, **craft.facts, **more}
        facts["deviation"] = (made - originals).square().mean().item()
        for when, latents in (("emd_start", craft.opening), ("emd_end", craft.latents)):
            fresh, found = (
                self._judge(craft.judge.real, seed_for(seed, "index")),
                craft.pictures(latents),
            )
            fresh.learn(found, self.index_steps, generator_for(seed, "index"))
            facts[when] = fresh.distance(found)
        if not made.isfinite().all() or not all(map(math.isfinite, facts.values())):
            raise RunError(
                f"{self.name}: what it made of batch {number} is not finite ({facts}): {ADVICE}"
            )
        return {"features": made.contiguous()}, facts

    def _judge(self, real: Tensor, seed: int) -> Judge:
        return Judge(
            real,
            width=self.critic_width,
            lr=self.critic_lr,
            batch=self.critic_batch,
            penalty=self.penalty,
            seed=seed,
        )

    def _untouched(
        self, inversion: Inversion, amortizer: nn.Module | None, originals: Tensor, seed: int
    ) -> Craft:
        """A batch before anything has happened to it; its draws of the prior are made once."""
        draws, direction = (
            torch.randn(
                len(originals), inversion.prior.latent, generator=generator_for(seed, what)
            ).to(originals.device)
            for what in ("real", "power")
        )
        with torch.no_grad():
            judge = self._judge(inversion.prior.images(draws), seed)
        none = torch.zeros_like(draws)
        return Craft(
            inversion=inversion, judge=judge, originals=originals, amortizer=amortizer, cold=none, opening=none, latents=none,
            curvature=none[:, 0].contiguous(), direction=direction, free=none, anchor=none, rule=judge.rule,
        )  # fmt: skip

    def _open(self, craft: Craft, seed: int) -> None:
        """The first inversion, with a look at the curvature now and then: it changes most on the way from a random latent."""
        inversion, originals = craft.inversion, craft.originals
        if craft.amortizer is None:
            with torch.no_grad():
                craft.cold = inversion.nearest(originals, self.pool, generator_for(seed, "pool"))
        craft.latents = craft.guess(originals)
        if not inversion.losses(
            originals[:1], craft.latents[:1].detach().requires_grad_()
        ).requires_grad:
            raise ConfigError(
                f"{self.name} follows gradients from features to latents, and none pass the encoder: a part of it is detached"
            )
        power = FIRST_POWER
        for steps in [*[RENEW] * (self.first_steps // RENEW), self.first_steps % RENEW]:
            craft.note(*inversion.curvature(originals, craft.latents, craft.direction, power))
            craft.latents = inversion.descend(
                originals, craft.latents, steps, self.rate(craft), self.inner_momentum
            )
            power = NEXT_POWER
        craft.opening = craft.latents
        residual, gradient = inversion.fit(originals, craft.latents)
        if not math.isfinite(residual + gradient):
            raise RunError(
                f"{self.name}: the first inversion is not finite (residual {residual}): {ADVICE}"
            )
        craft.facts = {"residual_start": residual, "gradient_start": gradient}
        craft.let_go(self.beginning(craft), self.lr)

    def _step(self, craft: Craft, rng: torch.Generator, where: str) -> float:
        """The critic learns, what is crafted moves, the inversion follows; returns the distance that the critic saw."""
        seen = craft.judge.learn(craft.pictures(craft.latents), self.critic_steps, rng)
        craft.free.grad = self.slope(craft)
        if not (craft.free.grad.isfinite().all() and math.isfinite(seen)):
            raise RunError(f"{self.name}: not finite at {where} (distance {seen}): {ADVICE}")
        craft.rule.step()
        self.follow(craft)
        craft.done += 1
        if craft.done % LOOK == 0:
            stride = (craft.free.detach() - craft.anchor).square().mean().sqrt().item() / (
                LOOK * self.lr
            )
            craft.anchor, craft.still = craft.free.detach().clone(), stride < self.tolerance
        return seen


def reciprocal(values: Tensor) -> Tensor:
    """1 / values, and 0 where there is nothing to divide by."""
    return torch.where(values > 0, 1 / values, 0.0)
