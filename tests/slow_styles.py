"""StyleGAN2's networks as slow direct forms, for tests."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.networks.stylegan2.critic import StyleCritic
from frostglass.networks.stylegan2.network import (
    StyleGenerator,
    StyleSettings,
)
from frostglass.runtime.seeding import seeded

SMALL = StyleSettings(
    resolution=16, z_dim=5, w_dim=6, layers=2, channel_base=64, channel_max=7
)  # widths 7, 7, 4
TINY = StyleSettings(
    resolution=8, colours=1, z_dim=3, w_dim=3, layers=1, channel_base=16, channel_max=3
)  # widths 3, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(kind, settings: StyleSettings):
    """A network in double precision whose tensors are all random, also those set to 0 or 1."""
    with seeded(0, "tests", "styles"):
        made = kind(settings).double()
    for number, tensor in enumerate(made.state_dict().values()):
        if tensor.ndim < 2:
            tensor.add_(0.5 * drawn(*tensor.shape, seed=number))
    return made


# The slow forms: one row, one channel at a time, zeros written out.


def slow_filter(
    maps: Tensor, *, up: int = 1, down: int = 1, pads: tuple[int, int] = (0, 0), gain: float = 1.0
) -> Tensor:
    """Insert zeros, pad, convolve each map with the 4×4 kernel, keep every `down`-th pixel."""
    kernel = (
        torch.tensor([[a * b for a in (1, 3, 3, 1)] for b in (1, 3, 3, 1)], dtype=maps.dtype)
        / 64
        * gain
    )
    height, width = maps.shape[2:]
    stuffed = maps.new_zeros(*maps.shape[:2], height * up, width * up)
    stuffed[:, :, ::up, ::up] = maps
    padded = maps.new_zeros(*maps.shape[:2], height * up + sum(pads), width * up + sum(pads))
    padded[:, :, pads[0] : pads[0] + height * up, pads[0] : pads[0] + width * up] = stuffed
    rows = [
        [F.conv2d(one[None, None], kernel.flip(0, 1)[None, None])[0, 0] for one in row]
        for row in padded
    ]
    return torch.stack([torch.stack(row) for row in rows])[:, :, ::down, ::down]


def slow_modulated(
    maps: Tensor, weight: Tensor, styles: Tensor, *, up: bool = False, demodulate: bool = True
) -> Tensor:
    """Each row with kernels of its own, made by the paper's two formulas."""
    rows = []
    for row, style in zip(maps, styles, strict=True):
        own = weight * style[None, :, None, None]
        if demodulate:
            own = torch.stack([kernel / (kernel.square().sum() + 1e-8).sqrt() for kernel in own])
        if up:  # doubled first, then convolved with the mirrored kernel
            rows.append(
                F.conv2d(slow_filter(row[None], up=2, pads=(3, 2), gain=4.0), own.flip(2, 3))
            )
        else:
            rows.append(F.conv2d(row[None], own, padding=weight.shape[-1] // 2))
    return torch.cat(rows)


def slow_activated(maps: Tensor, clamp: float = math.inf) -> Tensor:
    return (torch.where(maps > 0, maps, 0.2 * maps) * math.sqrt(2)).clamp(-clamp, clamp)


def slow_dense(state: dict[str, Tensor], name: str, rows: Tensor, rate: float = 1.0) -> Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return rows @ (weight * rate / math.sqrt(weight.shape[1])).t() + bias * rate


def slow_images(
    made: StyleGenerator, z: Tensor, noises: list[Tensor], clamp: float = math.inf
) -> Tensor:
    """The whole generator from its tensors alone."""
    state = made.state_dict()
    w = z / (z.square().mean(1, keepdim=True) + 1e-8).sqrt()
    for layer in range(made.settings.layers):
        w = slow_activated(slow_dense(state, f"mapping.layers.{layer}", w, 0.01))

    def conv(name: str, maps: Tensor, noise: Tensor, up: bool) -> Tensor:
        maps = slow_modulated(
            maps, state[f"{name}.weight"], slow_dense(state, f"{name}.affine", w), up=up
        )
        return slow_activated(
            maps
            + noise * state[f"{name}.noise_strength"]
            + state[f"{name}.bias"].view(1, -1, 1, 1),
            clamp,
        )

    maps, rgb = state["synthesis.const"].expand(len(z), -1, -1, -1), None
    for block in range(len(made.settings.sizes)):
        name = f"synthesis.blocks.{block}"
        if block:
            maps = conv(f"{name}.conv0", maps, noises[2 * block - 1], up=True)
        maps = conv(f"{name}.conv1", maps, noises[2 * block], up=False)
        style = slow_dense(state, f"{name}.torgb.affine", w) / math.sqrt(maps.shape[1])
        added = slow_modulated(maps, state[f"{name}.torgb.weight"], style, demodulate=False)
        added = (added + state[f"{name}.torgb.bias"].view(1, -1, 1, 1)).clamp(-clamp, clamp)
        rgb = added if rgb is None else slow_filter(rgb, up=2, pads=(2, 1), gain=4.0) + added
    assert rgb is not None
    return rgb


def slow_critic(made: StyleCritic, images: Tensor, group: int, clamp: float) -> Tensor:
    """The critic from its tensors alone; sizes are halved after the convolution, not before."""
    state = made.state_dict()

    def conv(name: str, maps: Tensor, down: bool = False) -> Tensor:
        weight = state[f"{name}.weight"]
        weight = weight / math.sqrt(weight[0].numel())
        pad = weight.shape[-1] // 2 + down
        maps = F.conv2d(F.pad(maps, (pad, pad, pad, pad)), weight)
        return slow_filter(maps, down=2) if down else maps

    def bent(name: str, maps: Tensor, down: bool = False) -> Tensor:
        return slow_activated(
            conv(name, maps, down) + state[f"{name}.bias"].view(1, -1, 1, 1), clamp
        )

    maps = bent("fromrgb", images)
    for block in range(len(made.blocks)):
        inner = bent(f"blocks.{block}.conv1", bent(f"blocks.{block}.conv0", maps), down=True)
        maps = (inner + conv(f"blocks.{block}.skip", maps, down=True)) / math.sqrt(2)
    groups = len(maps) // group
    spread = torch.empty(len(maps), 1, 4, 4, dtype=maps.dtype)
    for first in range(groups):
        members = maps[first::groups]
        spread[first::groups] = ((members - members.mean(0)).square().mean(0) + 1e-8).sqrt().mean()
    maps = bent("conv", torch.cat([maps, spread], dim=1))
    return slow_dense(state, "out", slow_activated(slow_dense(state, "fc", maps.flatten(1))))


def vars_of(settings: StyleSettings) -> dict:
    return {name: getattr(settings, name) for name in StyleSettings.__dataclass_fields__}
