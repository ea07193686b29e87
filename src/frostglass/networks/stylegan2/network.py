"""StyleGAN2's networks in plain PyTorch: mapping, synthesis that can be entered at any block, and the critic that trains them.

Every weight is stored unscaled and multiplied by its gain at each use (equalised learning rate), as NVIDIA stores them, so theirs fit by renaming. All
is computed in the precision of the weights. A style scales the maps before and after a convolution that all rows share; this is the modulated
and demodulated weight of the paper up to rounding, and needs no convolution of its own for each row.

Paper: Karras et al., Analyzing and Improving the Image Quality of StyleGAN, CVPR 2020, arXiv 1912.04958; Karras et al., Training Generative Adversarial
Networks with Limited Data (ADA), NeurIPS 2020, arXiv 2006.06676.
Differs: no half precision; random noise comes from a generator that is given or as tensors, never from a global one; the mean of w moves when
`Mapping.follow` is called and not by itself in training mode. Class labels, and the "orig" and "resnet" generators, are left out.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters

FLOOR = 4  # pixels a side where the synthesis begins
TAPS = (1, 3, 3, 1)  # the low-pass filter of every change of size, along each side
RATE = 0.01  # learning rate of the mapping's layers, relative to all others
SLOPE, GAIN = 0.2, 2**0.5  # of the activation: leaky ReLU, then √2 to keep the variance
TINY = 1e-8  # keeps roots away from zero

Noise = Literal["const", "none"] | torch.Generator | Sequence[Tensor]


@parameters
class StyleSettings:
    """What a StyleGAN2 is made from; the defaults are those of NVIDIA's 1024-pixel networks.

    Args:
        resolution: pixels a side, a power of two.
        colours: 1 for grey pictures, 3 for coloured ones.
        z_dim: length of the latent z.
        w_dim: length of the style w.
        layers: fully connected layers from z to w; 8 in the paper, 2 in ADA's default for small pictures.
        channel_base: a block at r pixels has channel_base // r channels, ...
        channel_max: ... and at most this many.
        clamp: bound of what convolutions put out; NVIDIA's networks trained in half precision have 256, others none.
    """

    resolution: Annotated[int, Field(ge=8, le=1024)]
    colours: Literal[1, 3] = 3
    z_dim: Annotated[int, Field(ge=1, le=16384)] = 512
    w_dim: Annotated[int, Field(ge=1, le=16384)] = 512
    layers: Annotated[int, Field(ge=1, le=64)] = 8
    channel_base: Annotated[int, Field(ge=1, le=2**24)] = 32768
    channel_max: Annotated[int, Field(ge=1, le=16384)] = 512
    clamp: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def __post_init__(self) -> None:
        if self.resolution & (self.resolution - 1):
            raise ValueError(f"resolution: expected a power of two, got {self.resolution}")
        if self.channel_base < self.resolution:
            raise ValueError(
                f"channel_base: {self.channel_base} leaves no channel at {self.resolution} pixels: raise it"
            )

    @property
    def sizes(self) -> list[int]:
        """Pixels a side of each block: 4, 8, ..., resolution."""
        return [2**power for power in range(2, self.resolution.bit_length())]

    @property
    def num_ws(self) -> int:
        """How many styles a picture takes: one for each convolution, and one for the last block's colours."""
        return 2 * len(self.sizes)

    def width(self, size: int) -> int:
        """Channels of the block that is `size` pixels a side."""
        return min(self.channel_base // size, self.channel_max)


def low_passed(maps: Tensor, *, pad: int, gain: float = 1.0, stride: int = 1) -> Tensor:
    """Each map by itself through the 4×4 filter, `pad` zeros around it; `stride` 2 keeps every second pixel."""
    return F.conv2d(maps, _kernel(maps, gain), padding=pad, stride=stride, groups=maps.shape[1])


def doubled(maps: Tensor) -> Tensor:
    """Maps of twice the size: zeros between the pixels, then the filter, brightness kept."""
    return F.conv_transpose2d(maps, _kernel(maps, 4.0), stride=2, padding=1, groups=maps.shape[1])


def _kernel(maps: Tensor, gain: float) -> Tensor:
    taps = maps.new_tensor(TAPS)
    return (torch.outer(taps, taps) * (gain / taps.sum() ** 2)).expand(maps.shape[1], 1, -1, -1)


def modulated(
    maps: Tensor, weight: Tensor, styles: Tensor, *, up: bool = False, demodulate: bool = True
) -> Tensor:
    """Convolve with the weights w'_oi = s_i w_oi of each row's own style (N, I), brought to unit norm for each output if `demodulate`.

    With `up` the result is twice as large: the maps are zero-stuffed, filtered, and the kernel is applied mirrored, as NVIDIA's weights expect.
    """
    maps = maps * styles[:, :, None, None]
    if up:
        maps = low_passed(
            F.conv_transpose2d(maps, weight.transpose(0, 1), stride=2), pad=1, gain=4.0
        )
    else:
        maps = F.conv2d(maps, weight, padding=weight.shape[-1] // 2)
    if not demodulate:
        return maps
    norms = (
        styles.square() @ weight.square().sum((2, 3)).t()
    )  # Σ over inputs and kernel of (s w)², for each row and output
    return maps * (norms + TINY).rsqrt()[:, :, None, None]


def _bent(maps: Tensor, clamp: float | None = None, gain: float = 1.0) -> Tensor:
    return _clamped(
        F.leaky_relu(maps, SLOPE) * (GAIN * gain), None if clamp is None else clamp * gain
    )


def _clamped(maps: Tensor, clamp: float | None) -> Tensor:
    return maps if clamp is None else maps.clamp(-clamp, clamp)


def _drawn(*shape: int) -> Tensor:
    """Standard normal weights; whoever builds a network does so in a seeded block."""
    return nn.init.normal_(torch.empty(shape))


class Dense(nn.Module):
    """y = (rate / √inputs) W x + rate · b, and the activation if `bent`."""

    def __init__(
        self, inputs: int, outputs: int, *, rate: float = 1.0, bias: float = 0.0, bent: bool = False
    ):
        super().__init__()
        self.rate, self.gain, self.bent = rate, rate / inputs**0.5, bent
        self.weight = nn.Parameter(_drawn(outputs, inputs) / rate)
        self.bias = nn.Parameter(torch.full((outputs,), bias))

    def forward(self, rows: Tensor) -> Tensor:
        rows = F.linear(rows, self.weight * self.gain, self.bias * self.rate)
        return _bent(rows) if self.bent else rows


class Mapping(nn.Module):
    """Styles w from latents z: z to unit mean square, then `layers` fully connected layers, all of which end in the activation."""

    w_avg: Tensor

    def __init__(self, settings: StyleSettings):
        super().__init__()
        self.num_ws = settings.num_ws
        widths = [settings.z_dim] + [settings.w_dim] * settings.layers
        self.layers = nn.ModuleList(
            Dense(widths[i], widths[i + 1], rate=RATE, bent=True) for i in range(settings.layers)
        )
        self.register_buffer("w_avg", torch.zeros(settings.w_dim))

    def w(self, z: Tensor) -> Tensor:
        """The style of each latent (N, w_dim), not truncated."""
        rows = z * (z.square().mean(1, keepdim=True) + TINY).rsqrt()
        for layer in self.layers:
            rows = layer(rows)
        return rows

    def forward(self, z: Tensor, *, truncation: float = 1.0, cutoff: int | None = None) -> Tensor:
        """Styles (N, num_ws, w_dim), the same for each layer.

        `truncation` ψ draws them towards the mean, w̄ + ψ (w - w̄), in the first `cutoff` layers only if that is given.
        """
        ws = self.w(z)[:, None].expand(-1, self.num_ws, -1)
        if truncation == 1:
            return ws
        cutoff = self.num_ws if cutoff is None else cutoff
        return torch.cat([self.w_avg.lerp(ws[:, :cutoff], truncation), ws[:, cutoff:]], dim=1)

    @torch.no_grad()
    def follow(self, w: Tensor, decay: float = 0.995) -> None:
        """Move the mean style towards that of a training batch (N, w_dim)."""
        self.w_avg.copy_(w.mean(0).lerp(self.w_avg, decay))


class StyledConv(nn.Module):
    """Modulated 3×3 convolution, noise, bias, activation; `number` is its place among all of a synthesis."""

    noise_const: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        number: int,
        settings: StyleSettings,
        *,
        up: bool = False,
    ):
        super().__init__()
        self.size, self.number, self.up, self.clamp = size, number, up, settings.clamp
        self.affine = Dense(settings.w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(_drawn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros(()))
        self.register_buffer("noise_const", _drawn(size, size))

    def forward(self, maps: Tensor, w: Tensor, noise: Noise) -> Tensor:
        maps = modulated(maps, self.weight, self.affine(w), up=self.up)
        added = self._noise(noise, maps)
        if added is not None:
            maps = maps + added * self.noise_strength
        return _bent(maps + self.bias[:, None, None], self.clamp)

    def _noise(self, noise: Noise, maps: Tensor) -> Tensor | None:
        if isinstance(noise, torch.Generator):
            return torch.randn(
                len(maps), 1, self.size, self.size, generator=noise, device=noise.device
            ).to(maps)
        if not isinstance(noise, str):
            return noise[self.number]
        if noise not in ("const", "none"):
            raise ConfigError(
                f"noise: expected 'const', 'none', a torch.Generator or a tensor for each convolution, got {noise!r}"
            )
        return self.noise_const if noise == "const" else None


class ToColours(nn.Module):
    """Modulated 1×1 convolution to colours, without demodulation, noise and activation."""

    def __init__(self, inputs: int, settings: StyleSettings):
        super().__init__()
        self.gain, self.clamp = 1 / inputs**0.5, settings.clamp
        self.affine = Dense(settings.w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(_drawn(settings.colours, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(settings.colours))

    def forward(self, maps: Tensor, w: Tensor) -> Tensor:
        maps = modulated(maps, self.weight, self.affine(w) * self.gain, demodulate=False)
        return _clamped(maps + self.bias[:, None, None], self.clamp)


class SynthesisBlock(nn.Module):
    """Maps of one size: a convolution that doubles (not in the first block), another, and what they add to the picture."""

    def __init__(self, number: int, settings: StyleSettings):
        super().__init__()
        size = settings.sizes[number]
        width, self.number = settings.width(size), number
        if number:
            self.conv0 = StyledConv(
                settings.width(size // 2), width, size, 2 * number - 1, settings, up=True
            )
        self.conv1 = StyledConv(width, width, size, 2 * number, settings)
        self.torgb = ToColours(width, settings)

    def forward(
        self, maps: Tensor, rgb: Tensor | None, ws: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        if self.number:
            maps = self.conv0(maps, ws[:, 2 * self.number - 1], noise)
        maps = self.conv1(maps, ws[:, 2 * self.number], noise)
        added = self.torgb(
            maps, ws[:, 2 * self.number + 1]
        )  # the style of the next block's first convolution
        return maps, added if rgb is None else doubled(rgb) + added


class Synthesis(nn.Module):
    """Pictures from styles, block by block: maps of 4, 8, ..., `resolution` pixels, and a picture that each block doubles and adds to.

    `begin` gives what enters block 0 and `run` takes what enters any block, so a search may change the maps in between:

        maps, rgb = synthesis.begin(ws)
        maps, rgb = synthesis.run(ws, to_block=3, features=maps, rgb=rgb)
        _, picture = synthesis.run(ws, from_block=3, features=maps + change, rgb=rgb)
    """

    def __init__(self, settings: StyleSettings):
        super().__init__()
        self.settings = settings
        self.const = nn.Parameter(_drawn(settings.width(FLOOR), FLOOR, FLOOR))
        self.blocks = nn.ModuleList(
            SynthesisBlock(number, settings) for number in range(len(settings.sizes))
        )

    def begin(self, ws: Tensor) -> tuple[Tensor, None]:
        """The maps and the (not yet begun) picture that enter block 0, for as many rows as there are styles."""
        return self.const[None].expand(len(ws), -1, -1, -1).contiguous(
            memory_format=torch.channels_last
        ), None  # much faster on a CPU

    def run(
        self,
        ws: Tensor,
        *,
        features: Tensor,
        rgb: Tensor | None = None,
        from_block: int = 0,
        to_block: int | None = None,
        carry_rgb: bool = True,
        noise: Noise = "const",
    ) -> tuple[Tensor, Tensor]:
        """Run blocks `from_block` up to, but without, `to_block` (all that are left by default); gives the maps and the picture after them.

        Args:
            ws: styles of all layers (N, num_ws, w_dim), also of those that are not run.
            features: the maps that enter block `from_block`.
            rgb: the picture that enters it; needed from block 1 on.
            carry_rgb: False forgets `rgb` and begins a new picture, as the published code of IF-GMI does whenever it enters a later block: what the blocks
                before had painted is missing.
            noise: "const", "none", a generator to draw from, or for each convolution, counted from the first of block 0, a tensor (N, 1, size, size).
        """
        to_block = len(self.blocks) if to_block is None else to_block
        if not 0 <= from_block < to_block <= len(self.blocks):
            raise ConfigError(
                f"blocks {from_block} to {to_block} cannot be run: expected 0 <= from_block < to_block <= {len(self.blocks)}"
            )
        self._check(ws, features, rgb, from_block, carry_rgb)
        features, rgb = (
            features.contiguous(memory_format=torch.channels_last),
            rgb if carry_rgb else None,
        )
        for block in self.blocks[from_block:to_block]:
            features, rgb = block(features, rgb, ws, noise)
        assert rgb is not None  # at least one block has painted
        return features, rgb.contiguous()

    def forward(self, ws: Tensor, noise: Noise = "const") -> Tensor:
        """Raw pictures: most values lie in [-1, 1], and none is cut off."""
        features, rgb = self.begin(ws)
        return self.run(ws, features=features, rgb=rgb, noise=noise)[1]

    def _check(
        self, ws: Tensor, features: Tensor, rgb: Tensor | None, block: int, carry_rgb: bool
    ) -> None:
        made, size = self.settings, self.settings.sizes[max(block - 1, 0)]
        expected = {"ws": (made.num_ws, made.w_dim), "features": (made.width(size), size, size)}
        given = {"ws": ws, "features": features}
        if carry_rgb and rgb is not None:
            expected["rgb"], given["rgb"] = (made.colours, size, size), rgb
        for name, shape in expected.items():
            if tuple(given[name].shape) != (len(ws), *shape):
                raise ConfigError(
                    f"{name} for block {block}: expected shape {(len(ws), *shape)}, got {tuple(given[name].shape)}"
                )
        if carry_rgb and (rgb is None) != (block == 0):
            problem = (
                "is made by it and cannot be given"
                if block == 0
                else "is missing: give it, or carry_rgb=False to begin a new one"
            )
            raise ConfigError(f"the picture that enters block {block} {problem}")


class StyleGenerator(nn.Module):
    """Raw pictures (about [-1, 1], not bounded) from latents: `mapping` to styles, `synthesis` of them."""

    def __init__(self, settings: StyleSettings):
        super().__init__()
        self.settings = settings
        self.mapping = Mapping(settings)
        self.synthesis = Synthesis(settings)

    def forward(
        self,
        z: Tensor,
        *,
        truncation: float = 1.0,
        cutoff: int | None = None,
        noise: Noise = "const",
    ) -> Tensor:
        return self.synthesis(self.mapping(z, truncation=truncation, cutoff=cutoff), noise)


class Conv(nn.Module):
    """Plain convolution, then activation if `bent`; `down` halves the size behind the low-pass filter."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        down: bool = False,
        bent: bool = True,
        clamp: float | None = None,
    ):
        super().__init__()
        self.pad, self.down, self.bent, self.clamp = kernel // 2, down, bent, clamp
        self.gain = 1 / (inputs * kernel**2) ** 0.5
        self.weight = nn.Parameter(_drawn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bent else None

    def forward(self, maps: Tensor, gain: float = 1.0) -> Tensor:
        weight = self.weight * self.gain
        if (
            self.down and self.pad == 0
        ):  # fewer pixels to convolve if the filter goes first and drops them
            maps = F.conv2d(low_passed(maps, pad=1, stride=2), weight)
        elif self.down:
            maps = F.conv2d(low_passed(maps, pad=1 + self.pad), weight, stride=2)
        else:
            maps = F.conv2d(maps, weight, padding=self.pad)
        if self.bias is None:
            return maps * gain
        return _bent(maps + self.bias[:, None, None], self.clamp, gain)


class CriticBlock(nn.Module):
    """Two 3×3 convolutions, the second to half the size, beside a 1×1 shortcut; the sum has the variance of its parts."""

    def __init__(self, inputs: int, outputs: int, clamp: float | None):
        super().__init__()
        self.conv0 = Conv(inputs, inputs, 3, clamp=clamp)
        self.conv1 = Conv(inputs, outputs, 3, down=True, clamp=clamp)
        self.skip = Conv(inputs, outputs, 1, down=True, bent=False)

    def forward(self, maps: Tensor) -> Tensor:
        return self.skip(maps, 0.5**0.5) + self.conv1(self.conv0(maps), 0.5**0.5)


class StyleCritic(nn.Module):
    """How real raw pictures look (N, 1), larger for more real: residual blocks down to 4 pixels, then how much the batch varies, then two layers.

    Rows are judged in groups of up to `group`, which see each other's variation: row i with rows i + n, i + 2n, ... of n groups.
    """

    def __init__(self, settings: StyleSettings, group: int = 4):
        super().__init__()
        self.group = group
        sizes, last = settings.sizes[::-1], settings.width(FLOOR)
        self.fromrgb = Conv(settings.colours, settings.width(sizes[0]), 1, clamp=settings.clamp)
        self.blocks = nn.Sequential(
            *(
                CriticBlock(settings.width(size), settings.width(size // 2), settings.clamp)
                for size in sizes[:-1]
            )
        )
        self.conv = Conv(last + 1, last, 3, clamp=settings.clamp)
        self.fc = Dense(last * FLOOR**2, last, bent=True)
        self.out = Dense(last, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.blocks(self.fromrgb(images.contiguous(memory_format=torch.channels_last)))
        maps = torch.cat([maps, self._variation(maps)], dim=1)
        return self.out(self.fc(self.conv(maps).flatten(1)))

    def _variation(self, maps: Tensor) -> Tensor:
        """The standard deviation within each row's group, averaged over channels and pixels, as one more map."""
        members = min(self.group, len(maps))
        if len(maps) % members:
            raise ConfigError(
                f"the critic judges groups of {self.group} pictures: expected a multiple of it (or fewer), got {len(maps)}"
            )
        groups = maps.unflatten(0, (members, -1))
        spread = (groups.var(0, correction=0) + TINY).sqrt().mean((1, 2, 3))
        return spread.repeat(members)[:, None, None, None].expand(-1, 1, *maps.shape[2:])
