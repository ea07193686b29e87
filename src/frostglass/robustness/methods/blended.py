"""Blended: a backdoor whose trigger is a faint pattern over the whole image."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.robustness.base import Backdoor, threats
from frostglass.runtime.seeding import generator_for


@threats.register
@parameters
class Blended(Backdoor):
    """Blended injection: x' = (1 - ratio) · x + ratio · pattern, with a random pattern.

    Use: a backdoor whose trigger covers the whole image.
    Paper: Chen et al., Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning,
        2017, arXiv 1712.05526; used by CALoR, Appendix F, at 1 % poisoning.
    Differs: of the paper's two patterns, a cartoon and random pixels, this is the second, drawn
        with the seed. Training and test blend with the same ratio.

    Args:
        ratio: share of the pattern in a poisoned image.
    """

    ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    title: ClassVar[str] = "Blended"

    def stamp(self, images: Tensor, *, seed: int) -> Tensor:
        pattern = torch.rand(images.shape[1:], generator=generator_for(seed, "blended pattern"))
        return (1 - self.ratio) * images + self.ratio * pattern.to(images)
