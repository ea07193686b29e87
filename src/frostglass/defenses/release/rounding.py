"""Rounding: fewer bits of each number leave the device."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.assets import Assets
from frostglass.core.parameters import parameters
from frostglass.defenses.base import Defense, Release, defenses
from frostglass.defenses.strengths import Range, Whole
from frostglass.models.cut import encoded
from frostglass.store.files import Work


def rounded(features: Tensor, bits: int, limit: float, *, zero: bool = False) -> Tensor:
    """Replace each number by the centre of its cell: 2ᵇ equal cells divide [-limit, limit].

    Numbers beyond are in the outer cells. None of the centres is 0, and signs are kept. With `zero`
    the cells are shifted by a half, so that 0 is a centre; there is one cell less.
    """
    width, most = 2 * limit / 2**bits, 2 ** (bits - 1) - 1
    if zero:
        return torch.round(features / width).clamp(-most, most) * width
    return (torch.floor(features / width).clamp(-most - 1, most) + 0.5) * width


@defenses.register
@parameters
class Rounding(Defense):
    """Rounds each number of a feature to one of a few values, so that few bits leave the device.

    x ↦ w (⌊x / w⌋ + 1/2) with w = 2 · limit / 2ᵇ, and numbers beyond ±limit in the outer cells.
    With one bit it is sign(x) · limit / 2. At most `bits` times the numbers of a feature leave,
    whatever the attacker knows, and the same image always gives the same feature: nothing can be
    averaged away. Network and server stay as they are. With `zero`, x ↦ w · round(x / w): what is
    far smaller than a cell becomes 0, such as channels that `disco` weakened.

    Use: with `target.cut` at the head: the device sends its predictions, whose signs name the
        attributes. Before it, the server has to bear the rounding, and with one bit nothing
        leaves from behind a ReLU.
    Cost: nothing.
    Paper: none; ours.
    Differs: it is in none of the papers. `adapt` of `decoder` trains on rounded features, and
        `tolerance` of `latent`, half a cell, accepts any number of a cell.

    Args:
        bits: bits of each number; 0 releases the plain features.
        limit: the largest number that is distinguished, in the units of the feature; features
            that are all much smaller share one or two values.
        zero: keep 0 as a value; needs two bits.
    """

    bits: Annotated[int, Field(ge=0, le=16)] = 1
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    zero: bool = False

    title = "Rounding"
    adaptive: ClassVar = ("adapt", "tolerance")
    disabled: ClassVar[Mapping[str, Any]] = {"bits": 0}
    unkeyed: ClassVar[Mapping[str, Any]] = {"zero": False}
    releases: ClassVar[bool] = True
    takes_attributes: ClassVar[bool] = True
    needs_cut: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.zero and self.bits == 1:
            raise ValueError("zero = true needs at least 2 bits, got 1: raise bits")

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"bits": Whole(1, 8)}

    def release(
        self, encoder: nn.Module, images: Tensor, assets: Assets, *, seed: int, work: Work
    ) -> Release:
        """Return the rounded features of all images, and how many bits of each leave."""
        plain = encoded(encoder, images)
        if not self.bits:
            return Release(plain)
        beyond = (plain.abs() > self.limit).double().mean().item()
        facts = {"bits": self.bits * plain[0].numel(), "beyond_limit": beyond}
        return Release(rounded(plain, self.bits, self.limit, zero=self.zero), (facts,))
