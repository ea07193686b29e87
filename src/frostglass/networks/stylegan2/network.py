"""StyleGAN2's networks in plain PyTorch: mapping and synthesis that can start at any block.

Weights are stored unscaled and multiplied by their gain at each use (equalised learning rate), as
NVIDIA stores them, so theirs fit by renaming. All is computed in the precision of the weights. A
style scales the maps before and after a convolution that all rows share. Up to rounding this is the
paper's modulated and demodulated weight, without a convolution of its own for each row.

Paper: Karras et al., Analyzing and Improving the Image Quality of StyleGAN, CVPR 2020,
arXiv 1912.04958; Karras et al., Training Generative Adversarial Networks with Limited Data (ADA),
NeurIPS 2020, arXiv 2006.06676.
Differs: no half precision; random noise comes from a given generator or as tensors, never from a
global one; the mean of w moves only when `Mapping.follow` is called, not automatically in training
mode. Class labels, and the "orig" and "resnet" generators, are left out.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters

FLOOR = 4  # pixels a side where the synthesis starts
TAPS = (1, 3, 3, 1)  # the low-pass filter of every change of size, along each side
RATE = 0.01  # learning rate of the mapping's layers, relative to all others
SLOPE, GAIN = 0.2, 2**0.5  # of the activation: leaky ReLU, then √2 to keep the variance
TINY = 1e-8  # keeps square roots away from zero

Noise = Literal["const", "none"] | torch.Generator | Sequence[Tensor]


@parameters
class StyleSettings:
    """Architecture of a StyleGAN2; the defaults are those of NVIDIA's 1024-pixel networks.

    Args:
        resolution: pixels a side, a power of two.
        colours: 1 for grey images, 3 for colour.
        z_dim: length of the latent z.
        w_dim: length of the style w.
        layers: fully connected layers from z to w; 8 in the paper, 2 in ADA's default for small
            images.
        channel_base: a block at r pixels has channel_base // r channels, ...
        channel_max: ... and at most this many.
        clamp: bound on the outputs of convolutions; 256 in NVIDIA's networks trained in half
            precision, none in others.
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
                f"channel_base: {self.channel_base} leaves no channel at {self.resolution} pixels: "
                "raise it"
            )

    @property
    def sizes(self) -> list[int]:
        """Pixels a side of each block: 4, 8, ..., resolution."""
        return [2**power for power in range(2, self.resolution.bit_length())]

    @property
    def num_ws(self) -> int:
        """Styles of an image: one for each convolution, and one for the last block's colours."""
        return 2 * len(self.sizes)

    def width(self, size: int) -> int:
        """Channels of the block that is `size` pixels a side."""
        return min(self.channel_base // size, self.channel_max)


def low_passed(maps: Tensor, *, pad: int, gain: float = 1.0, stride: int = 1) -> Tensor:
    """Apply the 4×4 filter to each map, padded by `pad` zeros; `stride` 2 halves the size."""
    return F.conv2d(maps, _kernel(maps, gain), padding=pad, stride=stride, groups=maps.shape[1])


def doubled(maps: Tensor) -> Tensor:
    """Upscale maps by two: zeros between the pixels, then the filter; brightness is kept."""
    return F.conv_transpose2d(maps, _kernel(maps, 4.0), stride=2, padding=1, groups=maps.shape[1])


def _kernel(maps: Tensor, gain: float) -> Tensor:
    taps = maps.new_tensor(TAPS)
    return (torch.outer(taps, taps) * (gain / taps.sum() ** 2)).expand(maps.shape[1], 1, -1, -1)


def modulated(
    maps: Tensor, weight: Tensor, styles: Tensor, *, up: bool = False, demodulate: bool = True
) -> Tensor:
    """Convolve with the weights w'_oi = s_i w_oi of each row's own style (N, I).

    With `demodulate` the weights of each output have unit norm. With `up` the result is twice as
    large: maps are zero-stuffed and filtered, and the kernel is mirrored, as NVIDIA's weights
    expect.
    """
    maps = maps * styles[:, :, None, None]
    if up:
        maps = F.conv_transpose2d(maps, weight.transpose(0, 1), stride=2)
        maps = low_passed(maps, pad=1, gain=4.0)
    else:
        maps = F.conv2d(maps, weight, padding=weight.shape[-1] // 2)
    if not demodulate:
        return maps
    # Σ over inputs and kernel of (s w)², for each row and output.
    norms = styles.square() @ weight.square().sum((2, 3)).t()
    return maps * (norms + TINY).rsqrt()[:, :, None, None]


def activated(maps: Tensor, clamp: float | None = None, gain: float = 1.0) -> Tensor:
    maps = F.leaky_relu(maps, SLOPE) * (GAIN * gain)
    return _clamped(maps, None if clamp is None else clamp * gain)


def _clamped(maps: Tensor, clamp: float | None) -> Tensor:
    return maps if clamp is None else maps.clamp(-clamp, clamp)


def drawn(*shape: int) -> Tensor:
    """Draw standard normal weights; the caller builds networks in a seeded block."""
    return nn.init.normal_(torch.empty(shape))


class Dense(nn.Module):
    """y = (rate / √inputs) W x + rate · b, and the activation if `bent`."""

    def __init__(
        self, inputs: int, outputs: int, *, rate: float = 1.0, bias: float = 0.0, bent: bool = False
    ):
        super().__init__()
        self.rate, self.gain, self.bent = rate, rate / inputs**0.5, bent
        self.weight = nn.Parameter(drawn(outputs, inputs) / rate)
        self.bias = nn.Parameter(torch.full((outputs,), bias))

    def forward(self, rows: Tensor) -> Tensor:
        rows = F.linear(rows, self.weight * self.gain, self.bias * self.rate)
        return activated(rows) if self.bent else rows


class Mapping(nn.Module):
    """Styles w from latents z: z is scaled to unit mean square and passes `layers` dense layers."""

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
        """Return the style of each latent (N, w_dim), not truncated."""
        rows = z * (z.square().mean(1, keepdim=True) + TINY).rsqrt()
        for layer in self.layers:
            rows = layer(rows)
        return rows

    def forward(self, z: Tensor, *, truncation: float = 1.0, cutoff: int | None = None) -> Tensor:
        """Return styles (N, num_ws, w_dim), the same for each layer.

        `truncation` ψ moves them towards the mean, w̄ + ψ (w - w̄), in the first `cutoff` layers if
        that is given, else in all.
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
    """Modulated 3×3 convolution, noise, bias, activation; `number` counts all of a synthesis."""

    noise_const: Tensor

    def __init__(
        self, inputs: int, outputs: int, size: int, number: int, settings: StyleSettings,
        *, up: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.size, self.number, self.up, self.clamp = size, number, up, settings.clamp
        self.affine = Dense(settings.w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(drawn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros(()))
        self.register_buffer("noise_const", drawn(size, size))

    def forward(self, maps: Tensor, w: Tensor, noise: Noise) -> Tensor:
        maps = modulated(maps, self.weight, self.affine(w), up=self.up)
        added = self._noise(noise, maps)
        if added is not None:
            maps = maps + added * self.noise_strength
        return activated(maps + self.bias[:, None, None], self.clamp)

    def _noise(self, noise: Noise, maps: Tensor) -> Tensor | None:
        if isinstance(noise, torch.Generator):
            shape = (len(maps), 1, self.size, self.size)
            return torch.randn(shape, generator=noise, device=noise.device).to(maps)
        if not isinstance(noise, str):
            return noise[self.number]
        if noise not in ("const", "none"):
            raise ConfigError(
                "noise: expected 'const', 'none', a torch.Generator or a tensor for each "
                f"convolution, got {noise!r}"
            )
        return self.noise_const if noise == "const" else None


class ToColours(nn.Module):
    """Modulated 1×1 convolution to colours, without demodulation, noise and activation."""

    def __init__(self, inputs: int, settings: StyleSettings):
        super().__init__()
        self.gain, self.clamp = 1 / inputs**0.5, settings.clamp
        self.affine = Dense(settings.w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(drawn(settings.colours, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(settings.colours))

    def forward(self, maps: Tensor, w: Tensor) -> Tensor:
        maps = modulated(maps, self.weight, self.affine(w) * self.gain, demodulate=False)
        return _clamped(maps + self.bias[:, None, None], self.clamp)


class SynthesisBlock(nn.Module):
    """Maps of one size: an upscaling convolution (not in block 0), another, and added colours."""

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
        # Colours share the style of the next block's first convolution.
        added = self.torgb(maps, ws[:, 2 * self.number + 1])
        return maps, added if rgb is None else doubled(rgb) + added


class Synthesis(nn.Module):
    """Images from styles, block by block.

    Blocks have maps of 4, 8, ..., `resolution` pixels. Each upscales the image and adds to it.
    `begin` returns the inputs of block 0 and `run` takes the inputs of any block, so a search may
    change the maps in between:

        maps, rgb = synthesis.begin(ws)
        maps, rgb = synthesis.run(ws, to_block=3, features=maps, rgb=rgb)
        _, image = synthesis.run(ws, from_block=3, features=maps + change, rgb=rgb)
    """

    def __init__(self, settings: StyleSettings):
        super().__init__()
        self.settings = settings
        self.const = nn.Parameter(drawn(settings.width(FLOOR), FLOOR, FLOOR))
        self.blocks = nn.ModuleList(
            SynthesisBlock(number, settings) for number in range(len(settings.sizes))
        )

    def begin(self, ws: Tensor) -> tuple[Tensor, None]:
        """Return the maps and the image (None) that enter block 0, one row per style."""
        maps = self.const[None].expand(len(ws), -1, -1, -1)
        return maps.contiguous(memory_format=torch.channels_last), None  # much faster on a CPU

    def run(
        self, ws: Tensor, *, features: Tensor, rgb: Tensor | None = None, from_block: int = 0,
        to_block: int | None = None, carry_rgb: bool = True, noise: Noise = "const",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run blocks `from_block` to `to_block` (exclusive) and return maps and image after them.

        Args:
            ws: styles of all layers (N, num_ws, w_dim), also of those that are not run.
            features: the maps that enter block `from_block`.
            rgb: the image that enters it; needed from block 1 on.
            from_block: the first block to run.
            to_block: the first block not to run; all remaining blocks run by default.
            carry_rgb: False drops `rgb` and starts a new image, as the published code of IF-GMI
                does whenever it enters a later block: what earlier blocks painted is missing.
            noise: "const", "none", a generator to draw from, or a tensor (N, 1, size, size) for
                each convolution, counted from the first of block 0.
        """
        to_block = len(self.blocks) if to_block is None else to_block
        if not 0 <= from_block < to_block <= len(self.blocks):
            raise ConfigError(
                f"expected 0 <= from_block < to_block <= {len(self.blocks)}, got {from_block} and "
                f"{to_block}"
            )
        self._check(ws, features, rgb, from_block, carry_rgb)
        features = features.contiguous(memory_format=torch.channels_last)
        rgb = rgb if carry_rgb else None
        for block in self.blocks[from_block:to_block]:
            features, rgb = block(features, rgb, ws, noise)
        assert rgb is not None  # at least one block has painted
        return features, rgb.contiguous()

    def forward(self, ws: Tensor, noise: Noise = "const") -> Tensor:
        """Return raw images: most values are in [-1, 1], none is clamped."""
        features, rgb = self.begin(ws)
        return self.run(ws, features=features, rgb=rgb, noise=noise)[1]

    def _check(
        self, ws: Tensor, features: Tensor, rgb: Tensor | None, block: int, carry_rgb: bool
    ) -> None:
        settings, size = self.settings, self.settings.sizes[max(block - 1, 0)]
        inputs = [
            ("ws", ws, (settings.num_ws, settings.w_dim)),
            ("features", features, (settings.width(size), size, size)),
        ]
        if carry_rgb and rgb is not None:
            inputs.append(("rgb", rgb, (settings.colours, size, size)))
        for name, tensor, shape in inputs:
            if tuple(tensor.shape) != (len(ws), *shape):
                raise ConfigError(
                    f"{name} for block {block}: expected shape {(len(ws), *shape)}, got "
                    f"{tuple(tensor.shape)}"
                )
        if carry_rgb and block == 0 and rgb is not None:
            raise ConfigError("block 0 starts the image: expected no rgb, got one")
        if carry_rgb and block and rgb is None:
            raise ConfigError(
                f"block {block} needs rgb, the image so far, got none: pass it, or carry_rgb=False "
                "to start a new image"
            )


class StyleGenerator(nn.Module):
    """Raw images (about [-1, 1], not bounded) from latents: `mapping` to styles, `synthesis`."""

    def __init__(self, settings: StyleSettings):
        super().__init__()
        self.settings = settings
        self.mapping = Mapping(settings)
        self.synthesis = Synthesis(settings)

    def forward(
        self, z: Tensor, *, truncation: float = 1.0, cutoff: int | None = None,
        noise: Noise = "const",
    ) -> Tensor:  # fmt: skip
        return self.synthesis(self.mapping(z, truncation=truncation, cutoff=cutoff), noise)
