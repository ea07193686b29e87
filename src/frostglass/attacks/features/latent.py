"""White-box inversion in the latent space of a generator."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import fresh
from frostglass.attacks.features._learned import copied, put_back
from frostglass.attacks.features._searched import Searched
from frostglass.attacks.features.base import (
    Effort,
    Ledger,
    Rebuilt,
    cannot_adapt,
    feature_attacks,
    spread_evenly,
)
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import CHUNK, Ability, FeatureView, batch_invariant
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)

HELD = 0.25  # share of the pictures to adapt to that are held out
PUBLISHED: Mapping[str, Any] = {
    "gap": "norm",
    "scale": 100.0,
    "coupling": 128,
    "optimizer": "momentum",
    "lr": 0.005,
}


@feature_attacks.register
@parameters
class Latent(Searched):
    """Latent inversion: the picture of a generator whose feature comes nearest to the one that was released.

    z* = argmin scale · gap(F, Enc(G(z))) - w · D(G(z)), x̂ = G(z*). `tries` searches of each victim begin apart, and all count. The start
    is a random draw, the best of `pool` draws, or the guess A(F) of an amortizer. With `adapt` (A1) the attacker asks the device to protect
    so many public pictures x, inverts what it releases for them to z*, moves a copy of the generator by min ‖G(z*) - x‖², and repeats that
    for `adapt_rounds`; the victims are then inverted with the copy. Another generator (A2) is another prior.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on Deep Models, NDSS 2024
        (appendix G: the attack; E: A1 to A3; M: the amortizer).
    Differs: the published loss is one norm over a whole batch, so a row's step depends on its company; here each row has its own, and a
        batch of `coupling` rows whose gaps are alike is what that would be. The default is ours: mean square and Adam. The published code
        adds the critic to the amortized search alone, the paper to none. A1: the published code measures G(z*) - x after ImageNet's
        normalisation, searches anew from random latents for every update, and makes 2,500 of them; here the pictures themselves are
        compared, later rounds begin at the latents of the one before, and there are `adapt_epochs` passes of updates to each search. As
        published, z* is a constant there, the generator's statistics stand still and its weights move. A quarter of the pictures is held out, and the
        generator of the round that rebuilds those best is kept, the first one included: moving it on few pictures can do harm.

    Args:
        lr: 0.005 published (momentum), 0.03 in the paper's training scenario. steps: 600 published, 80 to 110 with an amortizer. scale: 100
            published.
        coupling: gap "norm" is divided by the root of this, and `critic_weight` by this, as one norm and one mean over a batch of that size
            divide them.
        tries: searches of each victim; 3 published.
        start: "random" latents, or "amortized", the amortizer's guess.
        pool: random starts are the best of this many draws, by their gap; 0 takes the draws as they come. Ours.
        noise: tries after the first begin so far from the amortizer's guess, in standard deviations of the latents.
        critic_weight: w, the weight of the prior's critic; 100 in the published amortized search, 0 needs no critic.
        adapt: public pictures that the device is asked to protect; 0 is no adaptation.
        adapt_rounds: searches and updates of the generator in turn. adapt_epochs: passes over the pictures in each. adapt_lr: step size of
            RMSprop.
    """

    coupling: Annotated[int, Field(ge=1)] = 1
    optimizer: OptimizerName = "adam"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    tries: Annotated[int, Field(ge=1)] = 3
    start: Literal["random", "amortized"] = "random"
    pool: Annotated[int, Field(ge=0)] = 0
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    critic_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    adapt: Annotated[int, Field(ge=0)] = 0
    adapt_rounds: Annotated[int, Field(ge=1)] = 5
    adapt_epochs: Annotated[int, Field(ge=1)] = 10
    adapt_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3

    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        "published": (
            "as printed: the norm itself, heavy ball, 600 steps, three random starts",
            {**PUBLISHED, "steps": 600},
        ),
        "amortized": (
            "as the published code goes on from an amortizer's guess: 100 steps, with the critic",
            {**PUBLISHED, "steps": 100, "tries": 1, "start": "amortized", "critic_weight": 100.0},
        ),
        "adaptive": (
            "A1: the generator learns from what the protection makes of public pictures",
            {"adapt": 128},
        ),
    }

    def __post_init__(self) -> None:
        if self.pool and self.start == "amortized":
            raise ValueError("pool ranks random starts, and start is 'amortized': set pool to 0")
        if self.pool and self.pool < self.tries:
            raise ValueError(f"pool ({self.pool}) must be 0 or at least tries ({self.tries})")

    @property
    def access(self) -> tuple[Ability, ...]:
        return ("encoder", "protection") if self.adapt else ("encoder",)

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"prior", "amortizer"} if self.start == "amortized" else {"prior"})

    @property
    def protects(self) -> int:
        return self.adapt

    def effort(self, victims: int) -> Effort:
        held = math.ceil(HELD * self.adapt)
        looks = self.steps * len(padded_rows(victims * self.tries))
        if self.adapt:
            turns = [len(padded_rows(self.adapt - held))] * self.adapt_rounds + [
                len(padded_rows(held))
            ] * (1 + self.adapt_rounds)
            looks += self.steps * sum(turns) + self.adapt_rounds * self.adapt_epochs * (
                self.adapt - held
            )
        return Effort(encoded=2 * self.pool if self.adapt else self.pool, through_prior=looks)

    def problems(self, view: FeatureView, assets: Assets) -> list[str]:
        found = super().problems(view, assets)
        if (prior := assets.prior) is None:
            return found
        if prior.condition:
            found.append(
                f"{self.name} knows nothing of a victim, and this prior makes pictures of a given {prior.condition}: use another"
            )
        if prior.image_shape[1:] != tuple(view.image_shape[1:]) and not prior.info.get("resize"):
            sizes = ("×".join(map(str, shape)) for shape in (prior.image_shape, view.image_shape))
            found.append(
                "the prior makes pictures of {}, the encoder takes {}: train one on such pictures, or set prior.resize".format(
                    *sizes
                )
            )
        if self.critic_weight and prior.critic is None:
            found.append(
                f"{self.name}.critic_weight is not 0 and the prior has no critic: set it to 0"
            )
        if self.adapt == 1:
            found.append(
                f"{self.name}.adapt (1) must leave a picture that is not held out: raise it, or set it to 0"
            )
        return [*found, *cannot_adapt(self.name, self.adapt, assets)]

    def gaps(self, made: Tensor, wanted: Tensor) -> Tensor:
        return super().gaps(made, wanted) / (self.coupling**0.5 if self.gap == "norm" else 1)

    def rebuild(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: Ledger
    ) -> Rebuilt:
        prior = assets.require_prior()
        if self.adapt:
            prior = self._adapted(view, assets, prior, seed=seed, ledger=ledger)
        start = ledger.once(
            f"{self.name}-start",
            lambda: self._starts(view, features, assets, prior, self.tries, "start", seed=seed),
        )
        rows = features.repeat_interleave(self.tries, 0)
        latents, whole = self._inverted(self.name, view, rows, start.flatten(0, 1), prior, ledger)
        images = batch_invariant(lambda z: view.fit(prior.images(z)).clamp(0, 1), latents)
        images, latents, whole = (
            column.unflatten(0, (-1, self.tries)) for column in (images, latents, whole)
        )
        return Rebuilt(images, latents, ~whole)

    def _inverted(
        self,
        name: str,
        view: FeatureView,
        features: Tensor,
        start: Tensor,
        prior: Prior,
        ledger: Ledger,
    ) -> tuple[Tensor, Tensor]:
        def unreal(pictures: Tensor, wanted: Tensor) -> Tensor:
            return -self.critic_weight / self.coupling * prior.realism(pictures)

        return self.searched(
            name,
            view,
            features,
            start,
            prior.images,
            ledger,
            penalty=unreal if self.critic_weight else None,
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
        """Where the searches of each victim begin, (N, tries, latent)."""
        fresh_draws = fresh(
            prior, torch.arange(len(features)), tries, seed=seed, purpose=f"latent {purpose}"
        )
        if self.start == "amortized" and assets.amortizer is not None:
            guess = batch_invariant(assets.amortizer, features)
            if guess.shape != (len(features), prior.latent):
                raise ConfigError(
                    f"the amortizer guesses {tuple(guess.shape[1:])} for a feature, and the prior takes latents of {prior.latent}: train it for this prior"
                )
            fresh_draws[:, 0] = 0  # the first try begins at the guess itself
            return guess[:, None] + self.noise * fresh_draws
        if not self.pool:
            return fresh_draws
        pool = torch.randn(
            self.pool, prior.latent, generator=generator_for(seed, "latent", purpose, "pool")
        ).to(view.device)
        gaps = []
        for part in pool.split(CHUNK):
            made = view.encode(batch_invariant(prior.images, part))
            gaps.append(torch.stack([self.gaps(made, feature[None]) for feature in features]))
        return pool[torch.cat(gaps, 1).topk(tries, largest=False).indices]

    def _adapted(
        self, view: FeatureView, assets: Assets, prior: Prior, *, seed: int, ledger: Ledger
    ) -> Prior:
        """The prior with a copy of its generator that has learned what the protection does to public pictures; the prior itself where that would not help."""
        public = assets.require_public()
        pictures = view.fit(public.floats(spread_evenly(len(public), self.adapt)))
        released = ledger.once("protected", lambda: view.protected(pictures))
        start = ledger.once(
            f"{self.name}-adapt-start",
            lambda: self._starts(view, released, assets, prior, 1, "adapt", seed=seed)[:, 0],
        )
        held = math.ceil(HELD * self.adapt)
        tuned = replace(prior, generator=copy.deepcopy(prior.generator).eval().requires_grad_(True))
        rule = torch.optim.RMSprop(tuned.generator.parameters(), lr=self.adapt_lr)

        def search(name: str, rows: slice, begin: Tensor) -> Tensor:
            with frozen(tuned.generator):
                found, whole = self._inverted(name, view, released[rows], begin, tuned, ledger)
            if not whole.all():
                raise RunError(
                    f"{self.name}: the search for public pictures broke off while adapting: lower lr"
                )
            return found

        def error(name: str) -> float:
            """How far rebuilt pictures that nothing was learned from are from the true ones."""
            found = search(name, slice(held), start[:held])
            with torch.no_grad():
                return (view.fit(tuned.images(found)) - pictures[:held]).square().mean().item()

        done, latents = 0, start[held:]
        if saved := ledger.load("adapted"):
            tensors, values = saved
            done, least, latents = (
                values["round"],
                values["error"],
                tensors["latents"].to(view.device),
            )
            put_back(tuned.generator, under_prefix("generator", tensors))
            restore_optimizer(rule, under_prefix("rule", tensors))
            best = under_prefix("best", tensors)
        else:
            least, best = error("held"), copied(tuned.generator)
        for number in range(done, self.adapt_rounds):
            latents = search(f"adapt{number}", slice(held, None), latents)
            self._tune(
                tuned, rule, view, latents, pictures[held:], seed=seed_for(seed, "adapt", number)
            )
            if (now := error(f"held{number}")) < least:
                least, best = now, copied(tuned.generator)
            kept = with_prefix("generator", copied(tuned.generator)) | with_prefix(
                "rule", optimizer_tensors(rule)
            )
            ledger.save(
                "adapted",
                {**kept, **with_prefix("best", best), "latents": latents},
                {"round": number + 1, "error": least},
            )
            ledger.progress(
                number + 1,
                self.adapt_rounds,
                f"adapting the generator: error {now:.4g} on pictures held out, best {least:.4g}",
            )
        put_back(tuned.generator, best)
        tuned.generator.requires_grad_(False)
        return tuned

    def _tune(
        self,
        tuned: Prior,
        rule: torch.optim.Optimizer,
        view: FeatureView,
        latents: Tensor,
        pictures: Tensor,
        *,
        seed: int,
    ) -> None:
        """Move the generator so that latents make the pictures they should have stood for."""
        for epoch in range(self.adapt_epochs):
            order = torch.randperm(len(pictures), generator=generator_for(seed, "order", epoch)).to(
                view.device
            )
            for index in order.split(CHUNK):
                rule.zero_grad(set_to_none=True)
                (
                    view.fit(tuned.images(latents[index])) - pictures[index]
                ).square().mean().backward()
                rule.step()
