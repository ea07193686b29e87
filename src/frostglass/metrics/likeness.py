"""How like the true picture a rebuilt one is, pixel by pixel and structure by structure."""

import torch
from torch import Tensor

from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, metrics

WINDOW = 11  # pixels a side of SSIM's Gaussian window (sigma 1.5)
HIGHEST = 100.0  # dB; two equal pictures would have infinitely many
CHUNK = 16  # pictures at once: FSIM holds 16 filtered maps of each


@metrics.register
@parameters
class Likeness:
    """How like the true picture is the rebuilt one? Columns `ssim`, `psnr` (dB), `fsim` and `mse` of each 8-bit picture against the one it was rebuilt from.

    SSIM is the mean over channels and over all places where its window (11×11, Gaussian, sigma 1.5) lies inside the picture. PSNR = -10 log₁₀ MSE over all
    channels, at most 100 dB, which is what equal pictures get. FSIM compares phase congruency and gradients of the luminance, and for pictures in colour also
    chrominance (FSIMc). These say how much of a *picture* came back, not who is in it, which is the business of `face` and `recognition`: the mean of all faces
    is nearer to a photo by PSNR than another photo of the same person is (13.3 and 11.9 dB for 64 procedural faces of 32 pixels).

    Paper: Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity, IEEE TIP 2004; Zhang et al., FSIM: A Feature
    Similarity Index for Image Quality Assessment, IEEE TIP 2011. SSIM and PSNR are reported by Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations, AAAI 2020, arXiv 1911.10143.

    Differs: In pictures under 11 pixels a side SSIM's window is the largest odd one that fits. FSIM keeps its four wavelengths (6, 12, 24, 48 pixels) also where a picture is
    smaller than the longest: with those alone that fit, noise was told from faces less well. Values of different sizes are not on one scale. From 384 pixels on both
    shrink a picture first, as their authors do. Phase congruency does not look at contrast, so FSIM says nothing of a flat picture. The AAAI paper does not say how it
    computes SSIM and PSNR.
    """

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        pairs = zip(evidence.pictures.split(CHUNK), evidence.originals.split(CHUNK), strict=True)
        parts = [likeness(rebuilt, true) for rebuilt, true in pairs]
        return {
            name: evidence.table(torch.cat([part[name] for part in parts])) for name in parts[0]
        }


def likeness(rebuilt: Tensor, true: Tensor) -> dict[str, Tensor]:
    """SSIM, PSNR, FSIM and MSE, each (N,), of pictures (N, C, H, W) in [0, 1], grey or in colour."""
    import piq  # imported here: it takes seconds

    if rebuilt.shape != true.shape or rebuilt.ndim != 4 or rebuilt.shape[1] not in (1, 3):
        raise RunError(
            f"expected grey or colour pictures of one size, got {tuple(rebuilt.shape)} and {tuple(true.shape)}: rebuild them at the size of the true ones"
        )
    if not all(bool(((images >= 0) & (images <= 1)).all()) for images in (rebuilt, true)):
        raise RunError(
            "expected pictures in [0, 1], got values outside: only such pictures can be compared"
        )
    side = min(true.shape[2:])
    window = min(WINDOW, side - 1 + side % 2)
    mse = (rebuilt - true).square().mean((1, 2, 3))
    return {
        "ssim": piq.ssim(rebuilt, true, kernel_size=window, reduction="none"),
        "psnr": -10 * mse.clamp(min=10 ** (-HIGHEST / 10)).log10(),
        "fsim": piq.fsim(rebuilt, true, chromatic=true.shape[1] == 3, reduction="none"),
        "mse": mse,
    }
