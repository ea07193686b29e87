"""BadNets: a backdoor whose trigger is a small patch."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.core.types import Shape
from frostglass.robustness.base import Backdoor, threats


@threats.register
@parameters
class Badnets(Backdoor):
    """BadNets: the trigger is a black and white chequered patch in the lower right corner.

    Use: the usual backdoor; is a defended model easier to poison?
    Paper: Gu et al., BadNets, 2017, arXiv 1708.06733; used by CALoR, Appendix F, at 1 % poisoning.
    Differs: the size and pattern of CALoR's patch are not known here. Poisoned images are flipped
        and shifted in training as all others are: half of them have the patch on the left.

    Args:
        size: side of the patch in pixels.
        margin: distance of the patch from the border.
    """

    size: Annotated[int, Field(ge=1)] = 3
    margin: Annotated[int, Field(ge=0)] = 1
    title: ClassVar[str] = "BadNets"

    def problems(self, image_shape: Shape, classes: int) -> list[str]:
        problems, (height, width) = super().problems(image_shape, classes), image_shape[1:]
        if self.size + self.margin > min(height, width):
            problems.append(
                f"size: expected a trigger within the image, size + margin at most "
                f"{min(height, width)} ({height}×{width} pixels), got {self.size} + {self.margin}: "
                "lower size"
            )
        return problems

    def stamp(self, images: Tensor, *, seed: int) -> Tensor:
        side = torch.arange(self.size, device=images.device)
        pattern = ((side[:, None] + side) % 2 == 0).to(images.dtype)
        bottom, right = (length - self.margin for length in images.shape[2:])
        changed = images.clone()
        changed[:, :, bottom - self.size : bottom, right - self.size : right] = pattern
        return changed
