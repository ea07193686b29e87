"""Batches with the same number of pictures of each of several identities."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError


def balanced_batches(
    labels: Tensor, identities: int, images: int, rng: torch.Generator
) -> list[Tensor]:
    """An epoch of batches, as indices into `labels`, each of `identities` different identities with `images` pictures of each.

    Every identity's pictures are shuffled and dealt in hands of `images`; the last hand is filled up with others of its pictures. Batches
    take the identities with the most hands left, and end when too few identities have any: nearly every picture is used, and once. Where
    there are fewer identities than asked for, every batch has them all.
    """
    if not len(labels) or identities < 1 or images < 1:
        raise DataError(
            f"balanced batches need pictures, and at least 1 identity and 1 picture of each; got {len(labels)} pictures, {identities} and {images}"
        )
    counts = labels.unique(return_counts=True)[1].tolist()
    hands = [_hands(own, images, rng) for own in labels.argsort(stable=True).split(counts)]
    left = torch.tensor([len(own) for own in hands])
    wanted = min(identities, len(hands))
    batches = []
    while int((left > 0).sum()) >= wanted:
        ties = torch.rand(
            len(left), generator=rng, dtype=torch.float64
        )  # below 1, so it decides between equals only
        chosen = (left + ties).topk(wanted).indices
        left[chosen] -= 1
        batches.append(torch.cat([hands[number].pop() for number in chosen.tolist()]))
    # Identities with many pictures come first above; an epoch should not begin with them.
    return [batches[number] for number in torch.randperm(len(batches), generator=rng).tolist()]


def _hands(own: Tensor, images: int, rng: torch.Generator) -> list[Tensor]:
    """One identity's pictures in random order, `images` at a time."""
    order = own[torch.randperm(len(own), generator=rng)]
    *whole, last = order.split(images)
    missing, others = images - len(last), order[: len(order) - len(last)]
    if len(others):  # then there are at least `images` of them, so none comes twice in a hand
        extra = others[torch.randperm(len(others), generator=rng)[:missing]]
    else:
        extra = own[torch.randint(len(own), (missing,), generator=rng)]
    return [*whole, torch.cat([last, extra])]
