"""Batches with the same number of images of each of several identities."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError


def balanced_batches(
    labels: Tensor, identities: int, images: int, rng: torch.Generator
) -> list[Tensor]:
    """Return an epoch of batches of `identities` different identities with `images` images each.

    Batches are indices into `labels`. The images of an identity are shuffled and divided into
    groups of `images`; the last group is filled up with others of its images. Batches take the
    identities with the most groups left, and end when too few identities have any: nearly every
    image is used, and used once. If there are fewer identities than requested, every batch has all
    of them.
    """
    if not len(labels) or identities < 1 or images < 1:
        raise DataError(
            "balanced batches need images, and at least 1 identity and 1 image of each, got "
            f"{len(labels)} images, {identities} identities and {images} of each"
        )
    counts = labels.unique(return_counts=True)[1].tolist()
    groups = [_groups(own, images, rng) for own in labels.argsort(stable=True).split(counts)]
    left = torch.tensor([len(own) for own in groups])
    size = min(identities, len(groups))
    batches = []
    while int((left > 0).sum()) >= size:
        # Below 1, so it only breaks ties.
        ties = torch.rand(len(left), generator=rng, dtype=torch.float64)
        chosen = (left + ties).topk(size).indices
        left[chosen] -= 1
        batches.append(torch.cat([groups[number].pop() for number in chosen.tolist()]))
    # Identities with many images come first above; an epoch should not begin with them.
    return [batches[number] for number in torch.randperm(len(batches), generator=rng).tolist()]


def _groups(own: Tensor, images: int, rng: torch.Generator) -> list[Tensor]:
    """Divide one identity's images, in random order, into groups of `images`."""
    order = own[torch.randperm(len(own), generator=rng)]
    *whole, last = order.split(images)
    missing, others = images - len(last), order[: len(order) - len(last)]
    if len(others):  # then there are at least `images` of them, so none repeats within a group
        extra = others[torch.randperm(len(others), generator=rng)[:missing]]
    else:
        extra = own[torch.randint(len(own), (missing,), generator=rng)]
    return [*whole, torch.cat([last, extra])]
