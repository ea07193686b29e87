"""White-box inversion that optimises the image itself."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks.base import Attack, View, attacks
from frostglass.attacks.features._searching import SearchAttack
from frostglass.attacks.features.base import FeatureAttack, QueryLedger, RawReconstructions
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.latent import Latent
from frostglass.core.assets import Asset, Assets
from frostglass.core.method import AuditSize, Budget, Variants
from frostglass.core.parameters import parameters
from frostglass.core.views import FeatureView
from frostglass.runtime.seeding import generator_for

STARTERS: Mapping[str, type[FeatureAttack]] = {"decoder": Decoder, "latent": Latent}


@attacks.register
@parameters
class Hybrid(SearchAttack):
    """Hybrid inversion: optimises the pixels of another attack's reconstructions.

    min over x̂ of scale · (gap(F, Enc(x̂)) + v · gap(F, 0) · total variation of x̂), projected to
    [0, 1] after each step. x̂ starts at Dec(F) of the decoder attack, at G(z*) of the latent attack,
    which run first, or at noise.

    Use: the encoder is known, as on a device that can be taken apart; the strongest attack on plain
        features.
    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
        Deep Models, NDSS 2024 (appendix G).
    Differs: the appendix does not say where x̂ starts, how it is optimised, or that it is kept in
        range, and no code is published. Steps and step size are as printed; Adam, the mean square,
        the projection and total variation are ours. The search itself has no image prior: from
        noise, or through an encoder that discards much, x̂ can have the right feature and show
        nothing.

    Args:
        lr: 0.005 published. steps: 150 published.
        start: "decoder", "latent" or "noise".
        starter: parameters of the attack that makes the start, by their names.
        smooth: v, the weight of total variation, the mean absolute difference between neighbouring
            pixels; relative to the size of the feature, so that small features do not change it.
    """

    steps: Annotated[int, Field(ge=0)] = 150
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.005
    start: Literal["decoder", "latent", "noise"] = "decoder"
    starter: dict[str, Any] = Field(default_factory=dict)
    smooth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    variants: ClassVar[Variants] = {
        "latent": (
            "starts at a generated image, which shows a face whatever the encoder discards",
            {"start": "latent"},
        ),
        "noise": (
            "starts at noise and prefers smooth images: what the feature reveals without any "
            "knowledge of faces",
            {"start": "noise", "steps": 500, "lr": 0.02, "smooth": 0.1},
        ),
        "channels": (
            "for a device that weakens channels, as Disco does: their size counts neither for the "
            "search nor for the decoder that it starts from",
            {"gap": "channels", "starter": {"unit_channels": True}},
        ),
    }

    def __post_init__(self) -> None:
        if self.start == "noise" and self.starter:
            raise ValueError(
                "starter must be empty for start 'noise'. Remove its parameters, or choose another "
                "start."
            )
        if self.first is not None and self.first.averaged != 1:
            raise ValueError(
                f"starter.averaged must be 1, got {self.first.averaged}. Set hybrid.averaged: both "
                "attacks use the same features."
            )

    @property
    def first(self) -> FeatureAttack | None:
        """The attack that makes the start, if any."""
        return STARTERS[self.start](**self.starter) if self.start in STARTERS else None

    @property
    def kept(self) -> int:
        return self.first.kept if self.first else 1

    @property
    def needs(self) -> frozenset[Asset]:
        return self.first.needs if self.first else frozenset()

    @property
    def pretraining(self) -> Attack | None:
        return self.first.pretraining if self.first else None

    @property
    def pretrained_checkpoints(self) -> tuple[str, ...]:
        return self.first.pretrained_checkpoints if self.first else ()

    @property
    def protected_images(self) -> int:
        return self.first.protected_images if self.first else 0

    def brief(self) -> Self:
        starter = asdict(self.first.brief()) if self.first else {}
        return replace(self, steps=min(2, self.steps), starter=starter)

    def budget(self, size: AuditSize) -> Budget:
        first = self.first.budget(size) if self.first else Budget("noise", evaluations=size.images)
        rows = size.images * self.kept
        return Budget(
            f"{first.description}, then {rows} images × {self.steps} steps",
            evaluations=first.evaluations + self.evaluations(rows),
            trained=first.trained,
        )

    def problems(self, view: View, assets: Assets) -> list[str]:
        first = self.first.problems(view, assets) if self.first else []
        return [*self.gap_problems(view), *first]

    def reconstruct(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        start = self._start(view, features, assets, seed=seed, ledger=ledger)

        def roughness(images: Tensor, wanted: Tensor) -> Tensor:
            size = self.gaps(torch.zeros_like(wanted), wanted)
            return self.scale * self.smooth * size * total_variation(images)

        images, finished = self.search(
            self.checkpoint,
            view,
            features.repeat_interleave(self.kept, 0),
            start.images.flatten(0, 1),
            lambda images: images,
            ledger,
            penalty=roughness if self.smooth else None,
            project=lambda images, _: images.clamp(0, 1),
        )
        images, broken = (column.unflatten(0, (-1, self.kept)) for column in (images, ~finished))
        if start.broken is not None:
            broken = broken | start.broken
        return RawReconstructions(images, start.latents, broken)

    def _start(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        if self.first:
            return self.first.reconstruct(view, features, assets, seed=seed, ledger=ledger)
        rngs = [generator_for(seed, "hybrid", row) for row in range(len(features))]
        noise = [torch.rand(1, *view.image_shape, generator=rng) for rng in rngs]
        return RawReconstructions(torch.stack(noise).to(view.device))


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference between neighbouring pixels, down and across, (N,)."""
    down, across = ((images.diff(dim=axis)).abs().flatten(1).sum(1) for axis in (2, 3))
    return (down + across) / images[0].numel()
