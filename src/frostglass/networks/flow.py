"""A normalising flow as the distribution of an attack's latents."""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import elu

from frostglass.core.errors import ConfigError
from frostglass.runtime.seeding import generator_for


class NoiseDriven(Protocol):
    """A family of latents that takes `noise` standard normals per sample."""

    @property
    def noise(self) -> int: ...


def match_noise(family: NoiseDriven, state: Tensor, noise: Tensor) -> Tensor:
    """Return noise (N, samples, family.noise) in the state's dtype and on its device.

    Other shapes are refused, because broadcasting would let rows share noise.
    """
    if noise.dim() != 3 or noise.shape[0] != state.shape[0] or noise.shape[2] != family.noise:
        raise ConfigError(
            f"{type(family).__name__} needs noise of shape ({state.shape[0]}, samples, "
            f"{family.noise}), got {tuple(noise.shape)}: draw family.noise standard normals for "
            "each sample of each row"
        )
    return noise.to(state)


class Step(NamedTuple):
    """One step for all rows: ActNorm (N, 1, size), fixed permutation, and coupling net weights."""

    shift: Tensor
    stretch: Tensor
    order: Tensor
    inverse: Tensor
    weights: tuple[Tensor, ...]

    def net(self, x: Tensor) -> Tensor:
        """Return what the coupling adds, for the first halves x (N, S, size // 2) of all rows."""
        enter, enter_bias, middle, middle_bias, leave, leave_bias = self.weights
        hidden = elu(torch.baddbmm(enter_bias, x, enter))
        hidden = elu(torch.baddbmm(middle_bias, hidden, middle))
        return torch.baddbmm(leave_bias, hidden, leave)


@dataclass(frozen=True)
class Flow:
    """A Glow-style flow on a vector: standard noise ε passes invertible steps backwards.

    There are `levels` × `depth` steps. From latent to noise, a step is ActNorm
    y ← (y - shift) e^{-scale}, a fixed permutation, and an additive coupling: with y in halves
    (a, b), b ← b + net(a), net fully connected with two hidden layers, ELU, and a last layer that
    starts at zero. After each level but the last, the second half leaves as noise and the first
    continues; of an odd vector the first half is the smaller. Only ActNorm changes volumes:
    log q(z) = log N(ε; 0, I) - Σ scale, KL = E[½‖z‖² - ½‖ε‖²] - Σ scale. The state
    (N, parameters) is in double precision, samples are float32.

    Paper: Wang et al., Variational Model Inversion Attacks (VMI), NeurIPS 2021, arXiv 2201.10787;
    Kingma and Dhariwal, Glow, 2018.
    Differs: published samples consume the first latent / 2^(levels - 1) coordinates of ε and draw
    the others anew inside the splits; here every coordinate is the caller's. Published ActNorms
    are initialised by one pass of 100 standard normals, which leaves q off N(0, I) by the error of
    that sample; here they start where infinitely many normals would put them, at the identity,
    except that the one nearest the latent shifts q to its centre. In the published code the half
    that leaves a level has a Gaussian whose mean and scale are linear in the half that stays; here
    it is N(0, I). ActNorms and output scales inside the coupling nets are left to the nets'
    weights. One flow makes the whole latent; for a flow at each layer of a StyleGAN see
    `layered.py`.

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

    def __post_init__(self) -> None:
        values = {
            "latent": (self.latent, 2), "depth": (self.depth, 1), "levels": (self.levels, 1),
            "hidden": (self.hidden, 1),
        }  # fmt: skip
        problems = [
            f"a flow's {name} must be at least {least}, got {value}"
            for name, (value, least) in values.items()
            if value < least
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def noise(self) -> int:
        return self.latent

    @property
    def sizes(self) -> tuple[int, ...]:
        """Coordinates of each level: 100, 50 and 25 for a latent of 100."""
        return tuple(
            self.latent >> level for level in range(self.levels) if self.latent >> level >= 2
        )

    def begin(self, centres: Tensor) -> Tensor:
        """Return the state of N(centre, I) for every row.

        The nets' hidden weights are the same in all rows and runs, so that no row depends on the
        others in its batch.
        """
        rng = generator_for(0, "flow", "weights")
        parts = []
        for name, shape in self._layout():
            if name in ("enter", "middle"):  # at zero, hidden layers would never get a gradient
                weights = torch.randn(shape, generator=rng, dtype=torch.double)
                parts.append(weights / math.sqrt(shape[0]))
            else:
                parts.append(torch.zeros(shape, dtype=torch.double))
        row = torch.cat([part.flatten() for part in parts])
        state = row.to(centres.device).repeat(len(centres), 1)
        state[:, : self.latent] = centres  # the shift of the ActNorm nearest the latent is first
        return state

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        return self.decode(state, noise)[0].float()

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        latents, log_q = self.decode(state, noise)
        return (log_q - _log_normal(latents)).mean(dim=1)

    def decode(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents (N, S, latent) and their log-density log q (N, S), in double precision."""
        levels, volume = self._unpack(state)
        noise = match_noise(self, state, noise)
        y = noise[..., :0]
        for size, steps in zip(reversed(self.sizes), reversed(levels), strict=True):
            y = torch.cat([y, noise[..., y.shape[2] : size]], dim=2)
            for step in reversed(steps):
                first, second = y.tensor_split([size // 2], dim=2)
                y = torch.cat([first, second - step.net(first)], dim=2)
                y = torch.addcmul(step.shift, step.stretch, y.index_select(2, step.inverse))
        return y, _log_normal(noise) - volume[:, None]

    def encode(self, state: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Invert `decode`: return the noise (N, S, latent) and the log-density (N, S)."""
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
        """Names and shapes of a row's parameters, in the order of the state."""
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
        """Return the steps of each level, and the log of the sampling's volume factor (N,)."""
        shapes = [shape for _, shape in self._layout()]
        # One split for all: its gradient is written once, whereas slices would each write a
        # gradient of the whole state.
        columns = state.split([a * b for a, b in shapes], dim=1)
        parts = iter(
            [part.unflatten(1, shape) for part, shape in zip(columns, shapes, strict=True)]
        )
        levels, volume = [], state.new_zeros(len(state))
        for orders in _permutations(self.sizes, self.depth):
            shift, scale = next(parts), next(parts)
            volume = volume + scale.sum(dim=(1, 2))
            shifts, stretches = (norm[:, :, None].unbind(1) for norm in (shift, scale.exp()))
            steps = []
            for shift, stretch, order in zip(shifts, stretches, orders, strict=True):
                inverse, weights = order.argsort(), tuple(next(parts) for _ in range(6))
                device = state.device
                steps.append(Step(shift, stretch, order.to(device), inverse.to(device), weights))
            levels.append(steps)
        return levels, volume


def _log_normal(vectors: Tensor) -> Tensor:
    return -(vectors**2 + math.log(2 * math.pi)).sum(dim=2) / 2


@cache
def _permutations(sizes: tuple[int, ...], depth: int) -> list[list[Tensor]]:
    """The fixed permutation of every step of every level, the same for all rows and runs."""
    return [
        [
            torch.randperm(size, generator=generator_for(0, "flow", "shuffle", level, step))
            for step in range(depth)
        ]
        for level, size in enumerate(sizes)
    ]
