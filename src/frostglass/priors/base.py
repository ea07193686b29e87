"""The contract of a prior method, and checks that every prior must pass."""

import hashlib
import logging
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from frostglass.core.errors import CheckpointError, DataError
from frostglass.core.method import Method
from frostglass.core.prior import UNKNOWN, Prior
from frostglass.core.ranks import default_devices
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.runtime.device import default_device
from frostglass.store.files import Work


@dataclass(frozen=True)
class PriorTask:
    """What a prior is trained with: public images, a view if it is tied, the prior it extends."""

    public: Images
    view: ModelView | None
    base: Prior | None
    seed: int
    work: Work
    device: torch.device
    devices: int = 1


class PriorMethod(Method):
    """Base of all priors: parameters are fields, `fit` trains a generator of images.

    A method is trained on public images. One that is `tied` also asks the target, and its prior
    serves that target alone. One that is `ready` reads its prior from a file.
    """

    @property
    def tied(self) -> bool:
        """Whether training asks a target."""
        return False

    @property
    def access(self) -> Capability | None:
        """Access to the target that training needs; None if the method is not tied."""
        return None

    @property
    def ready(self) -> bool:
        """Whether the prior is read from a file and needs no training."""
        return False

    @property
    def shares_batches(self) -> bool:
        """Whether several processes may train it, each on its part of every batch."""
        return False

    @property
    def base_method(self) -> "PriorMethod | None":
        """The method of the prior that this one extends; `train` gets that prior as `base`."""
        return None

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        base: Prior | None = None,
        seed: int = 0,
        work: Work | None = None,
        device: torch.device | None = None,
        devices: int | None = None,
    ) -> Prior:
        """Return the prior; a stopped training resumes from `work` with the same result.

        With `devices` above 1 a method that `shares_batches` is trained by as many processes,
        others by one, with a warning.
        If public images have no identities, `Prior.info` says that whom it saw is unknown.
        """
        work, device = work or Work.scratch(), device or default_device()
        devices = devices or default_devices()
        if devices > 1 and not self.shares_batches:
            if not self.ready:
                log.warning("prior %s is trained by 1 process, not by %d", self.name, devices)
            devices = 1
        prior = self.fit(PriorTask(public, view, base, seed, work, device, devices))
        if self.ready or public.names:
            return prior
        return replace(prior, info={**prior.info, "seen_identities": UNKNOWN})

    @abstractmethod
    def fit(self, task: PriorTask) -> Prior:
        """Return the trained prior; finished parts go to `task.work`."""

    @abstractmethod
    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        """Return the prior before training, with networks of the right size.

        A `ready` method reads its file. Raises ConfigError or CheckpointError for what cannot work.
        """

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        """Return networks to load the weights of a stored prior into; by default the untrained."""
        return self.untrained(image_shape, classes)

    def record(self) -> dict[str, Any]:
        """Return name and parameters, as `Prior.info` keeps them under "method"."""
        return {"name": self.name, "parameters": asdict(self)}  # type: ignore[call-overload]

    def problems(self, public: int) -> list[str]:
        """List what keeps the method from training on this many public images."""
        return []


log = logging.getLogger(__name__)
LOADED = "load weights"  # the budget of a ready method
priors = Registry("prior", "frostglass.priors", contract=PriorMethod)


def on_device(prior: Prior, device: torch.device) -> Prior:
    """Move a prior's networks to a device."""
    for module in prior.modules:
        module.to(device)
    return prior


def identity_hashes(names: Iterable[str]) -> Tensor:
    """Return one 63-bit hash per identity name, sorted."""
    folded = (unicodedata.normalize("NFKC", name).casefold().encode() for name in names)
    digests = (hashlib.blake2b(name, digest_size=8).digest() for name in folded)
    return torch.tensor(
        sorted(int.from_bytes(digest, "big") >> 1 for digest in digests), dtype=torch.int64
    )


def check_unseen(prior: Prior, private_names: Iterable[str]) -> None:
    """Refuse a prior that was trained on images of the attacked people."""
    names = list(private_names)
    if count := int(torch.isin(identity_hashes(names), prior.seen_identities).sum()):
        seen = (n for n in names if torch.isin(identity_hashes([n]), prior.seen_identities).any())
        raise DataError(
            f"the prior was trained on {count} of the {len(names)} private identities (one is "
            f"{next(seen)!r}): an attack with it proves nothing; use a prior of other people"
        )


def check_size(name: str, generated: Shape, expected: Shape) -> None:
    """Refuse a generator from a file whose images have another size than the data."""
    if generated[1:] != tuple(expected[1:]):
        sizes = ["×".join(map(str, shape[1:])) for shape in (generated, expected)]
        raise CheckpointError(
            f"{name} makes images of {sizes[0]} pixels, the data has {sizes[1]}: set prior.resize "
            "to true, or use a prior or data of that size"
        )
