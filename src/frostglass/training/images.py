"""The images a network is trained on: private ones, and those that a defense adds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from frostglass.core.pixels import joined
from frostglass.core.types import Images, Split
from frostglass.defenses.base import Defense


@dataclass(frozen=True)
class TrainingImages:
    """All images of a training, with what the network should say of each.

    `people` (N,) numbers the person in each image, and is None where no defense adds people; the
    first `private` images are the private ones. Then an epoch shows `per_epoch` images of each
    person: an added person must be shown as often as a private one, or an attacker could tell them
    apart.
    """

    images: Images
    labels: Tensor
    people: Tensor | None = None
    private: int = 0
    per_epoch: int = 0

    @classmethod
    def of(
        cls, split: Split, labels: Tensor, defenses: Sequence[Defense], *, seed: int
    ) -> "TrainingImages":
        """Collect the private training images, with these labels, and what the defenses add."""
        images = split.train
        added = [more for each in defenses if (more := each.added_images(split, seed=seed))]
        if not added:
            return cls(images, labels)
        (more,) = added  # as `compose.conflicts` checks
        private, people = len(images), torch.cat([more.private[images.labels], more.people])
        images = replace(
            images,
            pixels=joined([images.pixels, more.pixels]),
            labels=torch.cat([images.labels, more.labels]),
            sources=images.sources + ("",) * len(more.labels),
            attributes=None,
            attribute_names=(),
        )
        return cls(images, images.labels, people, private, more.per_epoch)

    def added(self, index: Tensor) -> Tensor | None:
        """Return which of the images at `index` show added people."""
        return None if self.people is None else index >= self.private

    def of_epoch(self, rng: torch.Generator) -> Tensor:
        """Return the images of an epoch: all, or equally many of each person.

        A person's images are shuffled and taken in turn; a person with too few repeats some.
        """
        if self.people is None:
            return torch.arange(len(self.images))
        order = torch.rand(len(self.people), generator=rng).argsort()
        order = order[self.people[order].argsort(stable=True)]  # by person, shuffled within
        counts = self._counts[self._counts > 0]  # a dry run leaves people without images
        first = counts.cumsum(0) - counts
        place = torch.arange(self.per_epoch) % counts[:, None]
        return order[first[:, None] + place].flatten()

    def __len__(self) -> int:
        """Number of images shown in an epoch."""
        if self.people is None:
            return len(self.images)
        return int((self._counts > 0).sum()) * self.per_epoch

    @property
    def _counts(self) -> Tensor:
        """Number of images of each person."""
        assert self.people is not None
        return torch.bincount(self.people)
