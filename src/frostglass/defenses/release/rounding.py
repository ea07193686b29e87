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


def rounded(features: Tensor, bits: int, limit: float) -> Tensor:
    """Replace each number by the centre of its cell: 2ᵇ equal cells divide [-limit, limit].

    Numbers beyond are in the outer cells. None of the centres is 0, and signs are kept.
    """
    width = 2 * limit / 2**bits
    cells = torch.floor(features / width).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (cells + 0.5) * width


@defenses.register
@parameters
class Rounding(Defense):
    """Rounds each number of a feature to one of a few values, so that few bits leave the device.

    x ↦ w (⌊x / w⌋ + 1/2) with w = 2 · limit / 2ᵇ, and numbers beyond ±limit in the outer cells.
    With one bit it is sign(x) · limit / 2. At most `bits` times the numbers of a feature leave,
    whatever the attacker knows, and the same image always gives the same feature: nothing can be
    averaged away. Network and server stay as they are.

    Use: with `target.cut` at the head: the device sends its predictions, whose signs name the
        attributes. Before the head the server has to bear the rounding, and more bits leave.
    Cost: nothing.
    Differs: it is in none of the papers. Attackers who know it: `adapt` of `decoder` trains on
        rounded features, and `tolerance` of `latent`, half a cell, accepts any number of a cell.

    Args:
        bits: bits of each number; 0 releases the plain features.
        limit: the largest number that is distinguished, in the units of the feature.
    """

    bits: Annotated[int, Field(ge=0, le=16)] = 1
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0

    title = "Rounding"
    disabled: ClassVar[Mapping[str, Any]] = {"bits": 0}
    releases: ClassVar[bool] = True
    takes_attributes: ClassVar[bool] = True
    needs_cut: ClassVar[bool] = True

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
        return Release(rounded(plain, self.bits, self.limit), (facts,))
