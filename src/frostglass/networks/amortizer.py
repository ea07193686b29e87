"""A network that predicts in one pass what an inversion searches: the latent behind a feature."""

import itertools
import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize, Budget, Method
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.models.base import probe
from frostglass.networks.decoder import channels_first
from frostglass.runtime.device import device_of
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.layout import channels_last
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

LEAK = 0.2
# Channels of the published stages relative to the first; further stages are as wide as the third.
WIDENING = (1, 4, 8)


@parameters
class Amortizer(Method):
    """A network A from features to latents, trained only on images of the prior.

    Objective "latent": E ‖A(Enc(G(z))) - z‖² / latent, of the paper. "features":
    E ‖Enc(G(A(F))) - F‖² / d with F = Enc(G(z)), of the code, which requires no more than an
    inversion does: latents that make the same feature are equally good. The network is published
    for features of 64×16×16: 4×4 convolutions with stride 2 to 1, 4 and 8 times `width` channels,
    one as large as the remaining map to 4 times, a 1×1 convolution to the latent, batch norm and
    leaky ReLU 0.2 between. Larger maps get more stages, smaller ones fewer, features without a map
    three linear layers.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
    Deep Models, NDSS 2024, arXiv 2401.07205 (Appendix M).
    Differs: the paper leaves the distance of the latents open, here it is squared. Latents are
        fresh at every step, in the code one set of 6,400 serves 50 epochs. The code normalises
        images for the features to match and not for those the network sees; here normalisation is
        part of the encoder, everywhere. The code takes 50,000 steps of Adam at 0.01; here lr falls
        to zero as half a cosine.

    Args:
        objective: "latent" or "features".
        steps: steps of Adam.
        batch: latents a step.
        lr: Adam's step size at the start.
        width: channels of the first stage; 128 is published.
        checkpoint_every: steps between checkpoints; does not change the result.
    """

    name: ClassVar[str] = "amortizer"
    title: ClassVar[str] = "Amortizer"

    objective: Literal["latent", "features"] = "latent"
    steps: Annotated[int, Field(ge=1)] = 2000
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    width: Annotated[int, Field(ge=4)] = 128
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    def brief(self) -> Self:
        return replace(self, steps=1)

    def budget(self, size: AuditSize) -> Budget:
        description = f"{self.steps:,} steps of {self.batch} latents"
        return Budget(description, trained=self.steps * self.batch)

    def network(self, feature_shape: tuple[int, ...], latent: int) -> nn.Sequential:
        """Build the network for features (N, *feature_shape), freshly initialised."""
        if len(feature_shape) != 3 or feature_shape[1:] == (1, 1):
            sizes = [math.prod(feature_shape), 8 * self.width, 4 * self.width]
            layers: list[nn.Module] = [nn.Flatten()]
            for inputs, outputs in itertools.pairwise(sizes):
                linear = nn.Linear(inputs, outputs, bias=False)
                layers += [linear, nn.BatchNorm1d(outputs), nn.LeakyReLU(LEAK)]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], latent))
        layers, (channels, height, breadth) = channels_first(feature_shape)
        stage = 0
        while min(height, breadth) >= 4:
            wide = self.width * WIDENING[min(stage, len(WIDENING) - 1)]
            conv = nn.Conv2d(channels, wide, 4, 2, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(wide), nn.LeakyReLU(LEAK)]
            channels, height, breadth, stage = wide, height // 2, breadth // 2, stage + 1
        last = 4 * self.width
        conv = nn.Conv2d(channels, last, (height, breadth), bias=False)
        layers += [conv, nn.BatchNorm2d(last), nn.LeakyReLU(LEAK)]
        return nn.Sequential(*layers, nn.Conv2d(last, latent, 1), nn.Flatten())

    def train(self, encoder: nn.Module, prior: Prior, *, seed: int, work: Work) -> nn.Sequential:
        """Train a network for the features of `encoder` and return it in evaluation mode.

        Resumes from the last checkpoint in `work` with the same result.
        """
        if prior.condition:
            raise ConfigError(
                f"the amortizer needs an unconditional prior, got one conditioned on a "
                f"{prior.condition}. Use another, such as wgan."
            )
        device = device_of(encoder)
        with frozen(*prior.modules), torch.no_grad():
            images = prior.images(torch.zeros(2, prior.latent, device=device_of(prior.generator)))
        shape = tuple(probe(encoder, images.to(device)).shape[1:])
        with seeded(seed, "amortizer", "init"):
            network = self.network(shape, prior.latent).to(device)
        optimizer = torch.optim.Adam(network.parameters(), lr=self.lr)
        start = 0
        if saved := work.load("amortizer"):
            network.load_state_dict(under_prefix("network", saved[0]))
            restore_optimizer(optimizer, under_prefix("rule", saved[0]))
            start = saved[1]["step"]
        fixed = (encoder, *prior.modules)
        with frozen(*fixed), channels_last(*fixed), folded(*fixed):
            for step in range(start, self.steps):
                cosine = math.cos(math.pi * step / self.steps)
                optimizer.param_groups[0]["lr"] = self.lr * (1 + cosine) / 2
                loss = self._loss(network, encoder, prior, generator_for(seed, "amortizer", step))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                if not loss.isfinite():
                    raise RunError(
                        f"amortizer: the loss is not finite at step {step}: lower amortizer.lr; "
                        "the last good checkpoint is kept"
                    )
                if (step + 1) % self.checkpoint_every == 0 and step + 1 < self.steps:
                    tensors = with_prefix("network", network.state_dict())
                    tensors |= with_prefix("rule", optimizer_tensors(optimizer))
                    work.save("amortizer", tensors, {"step": step + 1})
                work.progress(step + 1, self.steps, f"{self.objective} error {loss.item():.4f}")
        return network.eval()

    def _loss(
        self, network: nn.Module, encoder: nn.Module, prior: Prior, rng: torch.Generator
    ) -> Tensor:
        latents = torch.randn(self.batch, prior.latent, generator=rng)
        latents = latents.to(device_of(prior.generator))
        with torch.no_grad():
            features = encoder(prior.images(latents)).contiguous()
        predicted = network(features)
        if self.objective == "latent":
            return (predicted - latents).square().mean()
        return (encoder(prior.images(predicted)) - features).square().mean()
