"""Whom a classifier takes for one of its people although it never saw them."""

import torch
from torch import Tensor

from frostglass.core.pixels import per_image
from frostglass.core.types import Images, Split, Target
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

ACCEPTED = 0.95  # share of held-out private images that pass the threshold
MOST = 2000  # public images that are looked at


def strangers_accepted(target: Target, split: Split) -> float | None:
    """Return the share of public images that pass as one of the private people.

    An image passes if the largest probability is at least what 95 % of held-out private images
    reach. None if the target has no people, or if there is nothing to look at.
    """
    if target.attributes or split.public.pixels.is_meta or not len(split.public):
        return None
    step = max(1, len(split.public) // MOST)
    others = _confidence(target, split.public, torch.arange(0, len(split.public), step)[:MOST])
    own = _confidence(target, split.test, torch.arange(len(split.test)))
    return (others >= own.quantile(1 - ACCEPTED)).double().mean().item()


def _confidence(target: Target, images: Images, index: Tensor) -> Tensor:
    device = device_of(target.module)

    def confidence(rows: Tensor) -> Tensor:
        return target.module(target.fit(images.floats(rows).to(device))).softmax(1).amax(1).cpu()

    with frozen(target.module), torch.no_grad():
        return per_image(confidence, index, images.shape)
