"""What an attacker knows of the world before touching a target: a generator learned on public images."""

import hashlib
import unicodedata
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from frostglass.core.errors import CheckpointError, DataError
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.store.files import Work

priors = Registry("prior", "frostglass.priors")


class PriorMethod(Protocol):
    """A frozen set of parameters that can make a prior; `tied` says whether it is fitted to one target and never reused for another.

    `needs` is what it asks of the target, if it asks. One that is `ready` needs no training: `read(image_shape)` gives the prior. `networks(image_shape, classes)` builds generator and critic; a method that adds to another prior names that
    one's method as `base_method`, and is given the prior it made.
    """

    @property
    def tied(self) -> bool: ...

    @property
    def needs(self) -> Capability | None: ...

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior: ...


def identity_hashes(names: Iterable[str]) -> Tensor:
    """One 63-bit hash per identity name, sorted."""
    folded = (unicodedata.normalize("NFKC", name).casefold().encode() for name in names)
    return torch.tensor(
        sorted(
            int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
            for name in folded
        ),
        dtype=torch.int64,
    )


def check_unseen(prior: Prior, private_names: Iterable[str]) -> None:
    """Refuse a prior that was trained on pictures of the people under attack: it would know them already."""
    names = list(private_names)
    known = torch.isin(identity_hashes(names), prior.seen_identities)
    if known.any():
        one = next(
            n for n in names if torch.isin(identity_hashes([n]), prior.seen_identities).any()
        )
        raise DataError(
            f"the prior was trained on {int(known.sum())} of the {len(names)} private identities (one is {one!r}): "
            "an attack with it proves nothing; use a prior trained on other people"
        )


def check_size(name: str, made: Shape, wanted: Shape) -> None:
    """Refuse a generator that was made elsewhere for pictures of another size than the data has."""
    if made[1:] != tuple(wanted[1:]):
        sizes = ("×".join(map(str, shape[1:])) for shape in (made, wanted))
        raise CheckpointError(
            "{} makes pictures of {} pixels, the data has {}: set prior.resize to true, or use a prior or data of that size".format(
                name, *sizes
            )
        )
