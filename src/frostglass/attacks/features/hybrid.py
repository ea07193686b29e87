"""White-box inversion that moves the picture itself."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks.features._searched import Searched
from frostglass.attacks.features.base import (
    Effort,
    FeatureAttack,
    Ledger,
    Rebuilt,
    feature_attacks,
)
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.latent import Latent
from frostglass.core.assets import Asset, Assets
from frostglass.core.parameters import parameters
from frostglass.core.views import Ability, FeatureView
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.seeding import generator_for

STARTERS: Mapping[str, type[FeatureAttack]] = {"decoder": Decoder, "latent": Latent}


@feature_attacks.register
@parameters
class Hybrid(Searched):
    """Hybrid inversion: what another attack rebuilt is moved, pixel by pixel, until its feature is the one that was released.

    min over x̂ of scale · (gap(F, Enc(x̂)) + v · gap(F, 0) · total variation of x̂), kept in [0, 1] after each step. `start` says where x̂
    begins, and stands with every result as its other parameters do: at Dec(F) of the decoder attack, at G(z*) of the latent attack, which
    are run first, or at noise.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on Deep Models, NDSS 2024
        (appendix G).
    Differs: the appendix does not say what x̂ begins with, how it is moved, or that it is kept in range, and no code is published. Steps
        and step size are as printed; Adam, the mean square, the projection and total variation are ours. Nothing here knows what pictures
        look like: from noise, or through an encoder that forgets much, x̂ can have the right feature and show nothing.

    Args:
        lr: 0.005 published. steps: 150 published.
        start: "decoder", "latent" or "noise".
        starter: parameters of the attack that makes the start, by their names.
        smooth: v, the weight of total variation, the mean absolute difference between neighbouring pixels; it is measured in the size of
            the feature itself, so that an encoder does not change it by making features small.
    """

    steps: Annotated[int, Field(ge=0)] = 150
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.005
    start: Literal["decoder", "latent", "noise"] = "decoder"
    starter: dict[str, Any] = Field(default_factory=dict)
    smooth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        "latent": (
            "begins at the picture of a generator, which looks like a person whatever the encoder forgets",
            {"start": "latent"},
        ),
        "noise": (
            "begins at noise and wants smooth pictures: what the feature gives away to somebody who knows no faces",
            {"start": "noise", "steps": 500, "lr": 0.02, "smooth": 0.1},
        ),
    }

    def __post_init__(self) -> None:
        if self.start == "noise" and self.starter:
            raise ValueError(
                "starter has parameters, and no attack makes the start 'noise': leave them out, or choose another start"
            )
        if self.begins is not None and self.begins.averaged != 1:
            raise ValueError(
                "starter.averaged: the start is made of the same features; set averaged of hybrid itself"
            )

    @property
    def begins(self) -> FeatureAttack | None:
        """The attack that makes the start."""
        return STARTERS[self.start](**self.starter) if self.start in STARTERS else None

    @property
    def tries(self) -> int:
        return self.begins.tries if self.begins else 1

    @property
    def access(self) -> tuple[Ability, ...]:
        return (
            ("encoder", "protection")
            if self.begins and "protection" in self.begins.access
            else ("encoder",)
        )

    @property
    def needs(self) -> frozenset[Asset]:
        return self.begins.needs if self.begins else frozenset()

    @property
    def lesson(self) -> FeatureAttack | None:
        return self.begins.lesson if self.begins else None

    @property
    def protects(self) -> int:
        return self.begins.protects if self.begins else 0

    def effort(self, victims: int) -> Effort:
        before = self.begins.effort(victims) if self.begins else Effort()
        return replace(before, pixels=self.steps * len(padded_rows(victims * self.tries)))

    def problems(self, view: FeatureView, assets: Assets) -> list[str]:
        return self.begins.problems(view, assets) if self.begins else []

    def rebuild(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: Ledger
    ) -> Rebuilt:
        begun = self._begun(view, features, assets, seed=seed, ledger=ledger)

        def rough(pictures: Tensor, wanted: Tensor) -> Tensor:
            return (
                self.scale
                * self.smooth
                * self.gaps(torch.zeros_like(wanted), wanted)
                * total_variation(pictures)
            )

        images, whole = self.searched(
            self.name, view, features.repeat_interleave(self.tries, 0), begun.images.flatten(0, 1), lambda x: x, ledger,
            penalty=rough if self.smooth else None, project=lambda x, _: x.clamp(0, 1),
        )  # fmt: skip
        images, broken = (column.unflatten(0, (-1, self.tries)) for column in (images, ~whole))
        return Rebuilt(
            images, begun.latents, broken if begun.broken is None else broken | begun.broken
        )

    def _begun(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: Ledger
    ) -> Rebuilt:
        if self.begins:
            return self.begins.rebuild(view, features, assets, seed=seed, ledger=ledger)
        rng = (generator_for(seed, "hybrid", victim) for victim in range(len(features)))
        return Rebuilt(
            torch.stack([torch.rand(1, *view.image_shape, generator=die) for die in rng]).to(
                view.device
            )
        )


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference between neighbouring pixels, down and across, (N,)."""
    down, across = ((images.diff(dim=axis)).abs().flatten(1).sum(1) for axis in (2, 3))
    return (down + across) / images[0].numel()
