"""How similar a reconstruction is to the true image, in pixels and in structure."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import match_shape
from frostglass.metrics.base import Evidence, Metric, metrics

WINDOW = 11  # pixels a side of SSIM's Gaussian window (sigma 1.5)
MAX_PSNR = 100.0  # dB; equal images would have infinitely many
CHUNK = 16  # images at once: FSIM holds 16 filtered maps of each


@metrics.register
@parameters
class Likeness(Metric):
    """How similar is the reconstruction to the true image?

    Columns `ssim`, `psnr` (dB), `fsim` and `mse` of each 8-bit reconstruction and its true image.
    In an audit of a model no reconstruction is of one image: each is compared with the person's
    private training image of the least MSE, and a person with more images is then closer.

    SSIM is the mean over channels and over all positions where its window (11×11, Gaussian, sigma
    1.5) lies inside the image. PSNR = -10 log₁₀ MSE over all channels, at most 100 dB, which equal
    images get. FSIM compares phase congruency and gradients of the luminance, and for colour
    images also chrominance (FSIMc). These measure how much of an *image* was reconstructed, not
    who is in it (see `face` and `verification`): by PSNR the mean of all faces is closer to a photo
    than another photo of the same person is (13.3 and 11.9 dB for 64 procedural faces of 32
    pixels).

    Use: features, where there is one true image to compare with: SSIM, PSNR and FSIM.
    Paper: Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity,
    IEEE TIP 2004; Zhang et al., FSIM: A Feature Similarity Index for Image Quality Assessment,
    IEEE TIP 2011. SSIM and PSNR are reported by Xiao et al., Adversarial Learning of
    Privacy-Preserving and Task-Oriented Representations, AAAI 2020, arXiv 1911.10143.

    Differs: For images under 11 pixels a side SSIM's window is the largest odd one that fits. FSIM
    keeps its four wavelengths (6, 12, 24, 48 pixels) also if an image is smaller than the longest:
    with only those that fit, it separated noise from faces less well. Values of different image
    sizes are not on one scale. From 384 pixels on both downscale an image first, as their authors
    do. Phase congruency ignores contrast, so FSIM says nothing about a flat image. The AAAI paper
    does not say how it computes SSIM and PSNR.
    """

    title: ClassVar[str] = "Image similarity"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        pairs = zip(evidence.images.split(CHUNK), evidence.originals.split(CHUNK), strict=True)
        # A prior may generate images of another size.
        parts = [
            likeness(match_shape(images, originals.shape[1:]).clamp(0, 1), originals)
            for images, originals in pairs
        ]
        return {
            name: evidence.table(torch.cat([part[name] for part in parts])) for name in parts[0]
        }


def likeness(images: Tensor, originals: Tensor) -> dict[str, Tensor]:
    """Return SSIM, PSNR, FSIM and MSE, each (N,), of grey or colour images (N, C, H, W)."""
    import piq  # slow to import

    if images.shape != originals.shape or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise RunError(
            f"expected grey or colour images of one size, got {tuple(images.shape)} and "
            f"{tuple(originals.shape)}: reconstruct images at the size of the true ones"
        )
    if not all(bool(((some >= 0) & (some <= 1)).all()) for some in (images, originals)):
        raise RunError("expected images in [0, 1], got values outside: scale them to [0, 1]")
    side = min(originals.shape[2:])
    window = min(WINDOW, side - 1 + side % 2)
    mse = (images - originals).square().mean((1, 2, 3))
    colour = originals.shape[1] == 3
    return {
        "ssim": piq.ssim(images, originals, kernel_size=window, reduction="none"),
        "psnr": -10 * mse.clamp(min=10 ** (-MAX_PSNR / 10)).log10(),
        "fsim": piq.fsim(images, originals, chromatic=colour, reduction="none"),
        "mse": mse,
    }
