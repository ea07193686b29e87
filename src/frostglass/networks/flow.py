"""A normalising flow as the shape of an attack's latents."""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu

from frostglass.attacks._search.families import fitting
from frostglass.core.errors import ConfigError
from frostglass.runtime.seeding import generator_for


class Step(NamedTuple):
    """One step for all rows: ActNorm (N, 1, size), the fixed shuffle and its inverse, and the coupling net's weights and biases."""

    shift: Tensor
    stretch: Tensor
    order: Tensor
    inverse: Tensor
    weights: tuple[Tensor, ...]

    def net(self, x: Tensor) -> Tensor:
        """What the coupling adds, for the first halves x (N, S, size // 2) of all rows at once."""
        enter, enter_bias, middle, middle_bias, leave, leave_bias = self.weights
        hidden = elu(torch.baddbmm(enter_bias, x, enter))
        hidden = elu(torch.baddbmm(middle_bias, hidden, middle))
        return torch.baddbmm(leave_bias, hidden, leave)


@dataclass(frozen=True)
class Flow:
    """A Glow-style flow on a vector: a sample is standard noise ε, sent backwards through `levels` × `depth` invertible steps.

    From latent to noise, a step is ActNorm y ← (y - shift) e^{-scale}, a fixed shuffle, and an additive coupling: with y in halves (a, b),
    b ← b + net(a), net fully connected with two hidden layers, ELU, and a last layer that starts at zero. After each level but the last,
    the second half leaves as noise and the first goes on; of an odd vector the first half is the smaller. Only ActNorm changes volumes:
    log q(z) = log N(ε; 0, I) - Σ scale, KL = E[½‖z‖² - ½‖ε‖²] - Σ scale. The state (N, parameters) is in double precision, samples are float32.

    Paper: Wang et al., Variational Model Inversion Attacks (VMI), NeurIPS 2021, arXiv 2201.10787; Kingma and Dhariwal, Glow, 2018.
    Differs: published samples consume the first latent / 2^(levels - 1) coordinates of ε and draw the others anew inside the splits; here
    every coordinate is the caller's. Published ActNorms are set by one pass of 100 standard normals, which leaves q off N(0, I) by the error
    of that sample; here they start where infinitely many normals would put them, at the identity, only that the one nearest the latent
    shifts q to its centre. In the published code the half that leaves a level has a Gaussian whose mean and scale are linear in the half that
    stays; here it is N(0, I). ActNorms and output scales inside the coupling nets are left to the nets' weights. One flow makes the whole
    latent; for a flow at each layer of a StyleGAN see `layered.py`.

    Args:
        latent: length of the latent vector, at least 2.
        depth: steps a level.
        levels: levels; fewer where one would have less than 2 coordinates.
        hidden: width of the coupling nets.
    """

    latent: int
    depth: int = 10
    levels: int = 3
    hidden: int = 100

    def __post_init__(self):
        least = {"latent": 2, "depth": 1, "levels": 1, "hidden": 1}
        if wrong := [name for name in least if getattr(self, name) < least[name]]:
            raise ConfigError(
                [
                    f"a flow's {name} must be at least {least[name]}, got {getattr(self, name)}"
                    for name in wrong
                ]
            )

    @property
    def noise(self) -> int:
        return self.latent

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many coordinates each level works on: 100, 50 and 25 of a latent of 100."""
        return tuple(
            self.latent >> level for level in range(self.levels) if self.latent >> level >= 2
        )

    def begin(self, centres: Tensor) -> Tensor:
        """N(centre, I) for every row. The nets' hidden weights are the same in all rows and runs, so that no row depends on its company."""
        rng = generator_for(0, "flow", "weights")
        parts = []
        for name, shape in self._layout():
            if name in (
                "enter",
                "middle",
            ):  # hidden layers: were they zero too, no gradient would ever reach them
                parts.append(
                    torch.randn(shape, generator=rng, dtype=torch.double) / math.sqrt(shape[0])
                )
            else:
                parts.append(torch.zeros(shape, dtype=torch.double))
        state = (
            torch.cat([part.flatten() for part in parts]).to(centres.device).repeat(len(centres), 1)
        )
        state[:, : self.latent] = (
            centres  # the layout begins with the shift of the ActNorm nearest the latent
        )
        return state

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        return self.decode(state, noise)[0].float()

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        latents, log_q = self.decode(state, noise)
        return (log_q - _log_normal(latents)).mean(dim=1)

    def decode(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The latents (N, S, latent) made of this noise, and their log-density log q (N, S), in the state's precision."""
        levels, volume = self._unpack(state)
        noise = fitting(self, state, noise)
        y = noise[..., :0]
        for size, steps in zip(reversed(self.sizes), reversed(levels), strict=True):
            y = torch.cat([y, noise[..., y.shape[2] : size]], dim=2)
            for step in reversed(steps):
                first, second = y.tensor_split([size // 2], dim=2)
                y = torch.cat([first, second - step.net(first)], dim=2).index_select(
                    2, step.inverse
                )
                y = torch.addcmul(step.shift, step.stretch, y)
        return y, _log_normal(noise) - volume[:, None]

    def encode(self, state: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `decode`: the noise (N, S, latent) that makes these latents, and again their log-density (N, S)."""
        levels, volume = self._unpack(state)
        y = latents.to(state)
        left = y[..., :0]
        for size, steps in zip(self.sizes, levels, strict=True):
            y, left = y[..., :size], torch.cat([y[..., size:], left], dim=2)
            for step in steps:
                y = ((y - step.shift) / step.stretch).index_select(2, step.order)
                first, second = y.tensor_split([size // 2], dim=2)
                y = torch.cat([first, second + step.net(first)], dim=2)
        noise = torch.cat([y, left], dim=2)
        return noise, _log_normal(noise) - volume[:, None]

    def _layout(self) -> list[tuple[str, tuple[int, int]]]:
        """Names and shapes of a row's parameters, in the order in which the state holds them."""
        layout = []
        for size in self.sizes:
            layout += [("shift", (self.depth, size)), ("scale", (self.depth, size))]
            layout += self.depth * [
                ("enter", (size // 2, self.hidden)), ("enter bias", (1, self.hidden)),
                ("middle", (self.hidden, self.hidden)), ("middle bias", (1, self.hidden)),
                ("leave", (self.hidden, size - size // 2)), ("leave bias", (1, size - size // 2)),
            ]  # fmt: skip
        return layout

    def _unpack(self, state: Tensor) -> tuple[list[list[Step]], Tensor]:
        """The steps of each level, and the log of the factor by which sampling stretches volumes (N,)."""
        shapes = [shape for _, shape in self._layout()]
        # One split for all: its gradient is written once, where slices would each write a gradient of the whole state.
        parts = iter(
            [
                part.unflatten(1, shape)
                for part, shape in zip(
                    state.split([a * b for a, b in shapes], dim=1), shapes, strict=True
                )
            ]
        )
        levels, volume = [], state.new_zeros(len(state))
        for orders in _shuffles(self.sizes, self.depth):
            shift, scale = next(parts), next(parts)
            volume = volume + scale.sum(dim=(1, 2))
            norms = zip(
                shift[:, :, None].unbind(1), scale.exp()[:, :, None].unbind(1), orders, strict=True
            )
            levels.append([
                Step(s, e, order.to(state.device), order.argsort().to(state.device), tuple(next(parts) for _ in range(6)))
                for s, e, order in norms
            ])  # fmt: skip
        return levels, volume


def _log_normal(vectors: Tensor) -> Tensor:
    return -(vectors**2 + math.log(2 * math.pi)).sum(dim=2) / 2


@cache
def _shuffles(sizes: tuple[int, ...], depth: int) -> list[list[Tensor]]:
    """The fixed shuffle of every step of every level: part of the flow's shape, so the same for all rows and runs."""
    return [
        [
            torch.randperm(size, generator=generator_for(0, "flow", "shuffle", level, step))
            for step in range(depth)
        ]
        for level, size in enumerate(sizes)
    ]
