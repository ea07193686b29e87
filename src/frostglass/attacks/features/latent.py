"""White-box inversion in the latent space of a generator."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import fresh
from frostglass.attacks.base import View, attacks
from frostglass.attacks.features._searching import SearchAttack
from frostglass.attacks.features._training import copy_weights, load_weights
from frostglass.attacks.features.base import (
    QueryLedger,
    RawReconstructions,
    spread_evenly,
    too_few_public,
)
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize, Budget, Variants
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import CHUNK, FeatureView, batch_invariant
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)

MAX_BRIEF = 256  # rows without gradients in a dry run; more need no more memory
HELD_OUT = 0.25  # share of the images for adaptation that is held out
PUBLISHED: Mapping[str, Any] = {
    "gap": "norm",
    "scale": 100.0,
    "coupling": 128,
    "optimizer": "momentum",
    "lr": 0.005,
}


@attacks.register
@parameters
class Latent(SearchAttack):
    """Latent inversion: the generated image whose feature is nearest to the released one.

    z* = argmin scale · gap(F, Enc(G(z))) - w · D(G(z)), x̂ = G(z*). `tries` searches per image have
    different starts, and all are returned. The start is a random draw, the best of `pool` draws, or
    the prediction A(F) of an amortizer. With `adapt` (A1) the attacker asks the device to protect
    public images x, inverts the released features to z*, updates a copy of the generator by
    min ‖G(z*) - x‖², and repeats that for `adapt_rounds`; the released features are then inverted
    with the copy. Another generator (A2) is another prior.

    Use: the encoder is known and reconstructions shall stay faces; what Crafter was made against.
    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
        Deep Models, NDSS 2024 (appendix G: the attack; E: A1 to A3; M: the amortizer).
    Differs: the published loss is one norm over a whole batch, so a row's step depends on the other
        rows; here each row has its own norm, and `coupling` divides it as a batch of that many rows
        with similar gaps would. The default is ours: mean square and Adam. The published code adds
        the critic to the amortized search alone, the paper to none. A1: the published code measures
        G(z*) - x after ImageNet's normalisation, restarts the search from random latents for every
        update, and makes 2,500 updates; here the images themselves are compared, later rounds start
        at the latents of the previous one, and each search is followed by `adapt_epochs` passes of
        updates. As published, z* is a constant there, and the generator's weights change but not
        its statistics. A quarter of the images is held out, and the generator of the round that
        reconstructs those best is kept, the initial one included: training on few images can make
        it worse.

    Args:
        lr: 0.005 published (momentum), 0.03 in the paper's training scenario. steps: 600 published,
            80 to 110 with an amortizer. scale: 100 published.
        coupling: gap "norm" is divided by the root of this, and `critic_weight` by this, as one
            norm and one mean over a batch of that size divide them.
        tries: searches per image; 3 published.
        start: "random" latents, or "amortized", the amortizer's prediction.
        pool: random starts are the best of this many draws, by their gap; 0 takes the draws as they
            come. Ours.
        tolerance: differences between numbers of two features up to this size do not count; half a
            cell for an attacker who knows that features were rounded. Ours.
        noise: distance of the starts after the first from the amortizer's prediction, in standard
            deviations of the latents.
        critic_weight: w, the weight of the prior's critic; 100 in the published amortized search, 0
            needs no critic.
        adapt: public images that the device is asked to protect; 0 is no adaptation.
        adapt_rounds: rounds of search and update of the generator. adapt_epochs: passes over the
            images in each. adapt_lr: step size of RMSprop.
    """

    coupling: Annotated[int, Field(ge=1)] = 1
    optimizer: OptimizerName = "adam"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    tries: Annotated[int, Field(ge=1)] = 3
    start: Literal["random", "amortized"] = "random"
    pool: Annotated[int, Field(ge=0)] = 0
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    critic_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    adapt: Annotated[int, Field(ge=0)] = 0
    adapt_rounds: Annotated[int, Field(ge=1)] = 5
    adapt_epochs: Annotated[int, Field(ge=1)] = 10
    adapt_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3

    unkeyed: ClassVar[Mapping[str, Any]] = {"tolerance": 0.0}
    variants: ClassVar[Variants] = {
        "published": (
            "as printed: the norm itself, heavy ball, 600 steps, three random starts",
            {**PUBLISHED, "steps": 600},
        ),
        "amortized": (
            "as in the published code: 100 steps from an amortizer's prediction, with the critic",
            {**PUBLISHED, "steps": 100, "tries": 1, "start": "amortized", "critic_weight": 100.0},
        ),
        "adaptive": (
            "A1: the generator learns from what the protection releases for public images",
            {"adapt": 128},
        ),
        "channels": (
            "for a device that weakens channels, as Disco does: their size does not count",
            {"gap": "channels"},
        ),
    }

    def __post_init__(self) -> None:
        if self.tolerance and self.gap == "channels":
            raise ValueError(
                f'tolerance must be 0 for gap "channels", which compares no sizes, got '
                f"{self.tolerance}. Use another gap."
            )
        if self.pool and self.start == "amortized":
            raise ValueError(
                f"pool must be 0 for start 'amortized' (it ranks random starts), got {self.pool}"
            )
        if self.pool and self.pool < self.tries:
            raise ValueError(f"pool must be 0 or at least tries ({self.tries}), got {self.pool}")

    @property
    def kept(self) -> int:
        return self.tries

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"prior", "amortizer"} if self.start == "amortized" else {"prior"})

    @property
    def protected_images(self) -> int:
        return self.adapt

    def brief(self) -> Self:
        return replace(
            self,
            steps=min(2, self.steps),
            tries=min(MAX_BRIEF, self.tries),
            pool=min(2 * MAX_BRIEF, self.pool),
            adapt_rounds=1,
            adapt_epochs=1,
        )

    def budget(self, size: AuditSize) -> Budget:
        rows, held_out = size.images * self.tries, self._held_out
        description = f"{size.images} images × {self.tries} tries × {self.steps} steps"
        evaluations, trained = self.pool + self.evaluations(rows) + rows, 0
        if self.adapt:
            description += f", {self.adapt_rounds} rounds × {self.adapt} protected images"
            searches = self.adapt_rounds * self.evaluations(self.adapt - held_out)
            validation = (1 + self.adapt_rounds) * self.evaluations(held_out)
            evaluations += self.pool + searches + validation
            trained = self.adapt_rounds * self.adapt_epochs * (self.adapt - held_out)
        return Budget(description, evaluations, trained)

    @property
    def _held_out(self) -> int:
        return math.ceil(HELD_OUT * self.adapt)

    def problems(self, view: View, assets: Assets) -> list[str]:
        problems = super().problems(view, assets)
        if (prior := assets.prior) is None:
            return problems
        if prior.condition:
            problems.append(
                f"{self.name} needs a prior of latents alone, got one that also takes a "
                f"{prior.condition}. Use another, such as wgan."
            )
        if prior.image_shape[1:] != tuple(view.image_shape[1:]) and not prior.info.get("resize"):
            sizes = ("×".join(map(str, shape)) for shape in (prior.image_shape, view.image_shape))
            problems.append(
                "the prior generates images of {}, the encoder takes {}. Train one on such images, "
                "or set prior.resize.".format(*sizes)
            )
        if self.critic_weight and prior.critic is None:
            problems.append(
                f"{self.name}.critic_weight must be 0 for a prior without a critic, got "
                f"{self.critic_weight}"
            )
        if self.adapt == 1:
            problems.append(
                f"{self.name}.adapt must be 0 or at least 2 (one image is held out), got 1"
            )
        return [*problems, *too_few_public(self.name, self.adapt, assets)]

    def gaps(self, features: Tensor, wanted: Tensor) -> Tensor:
        divisor = self.coupling**0.5 if self.gap == "norm" else 1
        if self.tolerance:
            difference = features - wanted
            features = features - difference.clamp(-self.tolerance, self.tolerance)
        return super().gaps(features, wanted) / divisor

    def reconstruct(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        prior = assets.require_prior()
        if self.adapt:
            prior = self._adapted(view, assets, prior, seed=seed, ledger=ledger)
        start = ledger.once(
            f"{self.checkpoint}-start",
            lambda: self._starts(view, features, assets, prior, self.tries, "start", seed=seed),
        )
        rows = features.repeat_interleave(self.tries, 0)
        latents, finished = self._invert(
            self.checkpoint, view, rows, start.flatten(0, 1), prior, ledger
        )
        images = batch_invariant(lambda z: view.fit(prior.images(z)).clamp(0, 1), latents)
        images, latents, finished = (
            column.unflatten(0, (-1, self.tries)) for column in (images, latents, finished)
        )
        return RawReconstructions(images, latents, ~finished)

    def _invert(
        self,
        name: str,
        view: FeatureView,
        features: Tensor,
        start: Tensor,
        prior: Prior,
        ledger: QueryLedger,
    ) -> tuple[Tensor, Tensor]:
        def realism(images: Tensor, wanted: Tensor) -> Tensor:
            return -self.critic_weight / self.coupling * prior.realism(images)

        penalty = realism if self.critic_weight else None
        return self.search(
            name, view, features, start, prior.images, ledger, prior=prior, penalty=penalty
        )

    def _starts(
        self,
        view: FeatureView,
        features: Tensor,
        assets: Assets,
        prior: Prior,
        tries: int,
        purpose: str,
        *,
        seed: int,
    ) -> Tensor:
        """Return the starts of the searches, (N, tries, latent)."""
        draws = fresh(
            prior, torch.arange(len(features)), tries, seed=seed, purpose=f"latent {purpose}"
        )
        if self.start == "amortized" and assets.amortizer is not None:
            predicted = batch_invariant(assets.amortizer, features)
            if predicted.shape != (len(features), prior.latent):
                raise ConfigError(
                    f"the amortizer must predict latents of {prior.latent} numbers, got "
                    f"{tuple(predicted.shape[1:])}. Train it for this prior."
                )
            draws[:, 0] = 0  # the first try starts at the prediction itself
            return predicted[:, None] + self.noise * draws
        if not self.pool:
            return draws
        pool = torch.randn(
            self.pool, prior.latent, generator=generator_for(seed, "latent", purpose, "pool")
        ).to(view.device)
        gaps = []
        for part in pool.split(CHUNK):
            encoded = view.encode(batch_invariant(prior.images, part))
            gaps.append(torch.stack([self.gaps(encoded, feature[None]) for feature in features]))
        return pool[torch.cat(gaps, 1).topk(tries, largest=False).indices]

    def _adapted(
        self, view: FeatureView, assets: Assets, prior: Prior, *, seed: int, ledger: QueryLedger
    ) -> Prior:
        """Return the prior with a generator trained on protected public images.

        It is the initial generator where training does not reduce the error on held-out images.
        """
        public = assets.require_public()
        images = view.fit(public.floats(spread_evenly(len(public), self.adapt)))
        released = ledger.once("protected", lambda: view.protected(images))
        start = ledger.once(
            f"{self.checkpoint}-adapt-start",
            lambda: self._starts(view, released, assets, prior, 1, "adapt", seed=seed)[:, 0],
        )
        held_out, training = slice(self._held_out), slice(self._held_out, None)
        tuning = _Tuning(prior, self.adapt_lr, start[training])

        def invert(name: str, rows: slice, latents: Tensor) -> Tensor:
            with frozen(tuning.prior.generator):
                latents, finished = self._invert(
                    name, view, released[rows], latents, tuning.prior, ledger
                )
            if not finished.all():
                raise RunError(
                    f"{self.name}: the loss was not finite while adapting. Lower {self.name}.lr."
                )
            return latents

        def validate(name: str) -> float:
            latents = invert(name, held_out, start[held_out])
            with torch.no_grad():
                error = view.fit(tuning.prior.images(latents)) - images[held_out]
            return tuning.keep_best(error.square().mean().item())

        if checkpoint := ledger.load("adapted"):
            tuning.restore(*checkpoint)
        else:
            validate("held")
        for number in range(tuning.rounds, self.adapt_rounds):
            tuning.latents = invert(f"adapt{number}", training, tuning.latents)
            self._tune(tuning, view, images[training], seed=seed_for(seed, "adapt", number))
            error = validate(f"held{number}")
            tuning.rounds += 1
            ledger.save("adapted", *tuning.state())
            note = f"adapting the generator: error {error:.4g} on held-out images"
            ledger.progress(number + 1, self.adapt_rounds, f"{note}, best {tuning.least:.4g}")
        return tuning.finish()

    def _tune(self, tuning: "_Tuning", view: FeatureView, images: Tensor, *, seed: int) -> None:
        """Train the generator to turn latents into the images they stand for."""
        for epoch in range(self.adapt_epochs):
            rng = generator_for(seed, "order", epoch)
            order = torch.randperm(len(images), generator=rng).to(view.device)
            for rows in order.split(CHUNK):
                tuning.optimizer.zero_grad(set_to_none=True)
                difference = view.fit(tuning.prior.images(tuning.latents[rows])) - images[rows]
                difference.square().mean().backward()
                tuning.optimizer.step()


class _Tuning:
    """A copy of a prior's generator under training, its best weights so far, and the latents."""

    def __init__(self, prior: Prior, lr: float, latents: Tensor):
        generator = copy.deepcopy(prior.generator).eval().requires_grad_(True)
        self.prior = replace(prior, generator=generator)
        self.optimizer = torch.optim.RMSprop(generator.parameters(), lr=lr)
        self.latents = latents
        self.rounds, self.least = 0, math.inf
        self.best: dict[str, Tensor] = copy_weights(generator)

    def keep_best(self, error: float) -> float:
        if error < self.least:
            self.least, self.best = error, copy_weights(self.prior.generator)
        return error

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {
            **with_prefix("generator", copy_weights(self.prior.generator)),
            **with_prefix("optimizer", optimizer_tensors(self.optimizer)),
            **with_prefix("best", self.best),
            "latents": self.latents,
        }
        return tensors, {"round": self.rounds, "error": self.least}

    def restore(self, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> None:
        self.rounds, self.least = values["round"], values["error"]
        self.latents = tensors["latents"].to(self.latents.device)
        load_weights(self.prior.generator, under_prefix("generator", tensors))
        restore_optimizer(self.optimizer, under_prefix("optimizer", tensors))
        self.best = under_prefix("best", tensors)

    def finish(self) -> Prior:
        load_weights(self.prior.generator, self.best)
        self.prior.generator.requires_grad_(False)
        return self.prior
