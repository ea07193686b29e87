"""What the steps of an audit hand to one another, besides splits, targets and priors."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frostglass.attacks.base import Attack
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target
from frostglass.core.views import FeatureView, ModelView
from frostglass.defenses.base import Defense
from frostglass.deploy.amortizer import TrainedAmortizer
from frostglass.models.cut import halves
from frostglass.runtime.device import device_of

if TYPE_CHECKING:
    from frostglass.store.store import Store


@dataclass(frozen=True)
class ImageBatch:
    """Images (N, C, H, W) in [0, 1], keyed by content, so that their features can be stored."""

    images: Tensor
    key: str

    @classmethod
    def of(cls, images: Tensor, owner: str = "") -> "ImageBatch":
        """Key images by content; meta tensors are keyed by shape and owner."""
        content = owner.encode()
        if not images.is_meta:
            content = images.detach().cpu().contiguous().numpy().tobytes()
        shape = f"{tuple(images.shape)}".encode()
        return cls(images, hashlib.sha256(shape + content).hexdigest()[:24])


@dataclass(frozen=True)
class Released:
    """Features that left a device, what its protection measured, and where it started from."""

    features: Tensor
    facts: tuple[Mapping[str, Any], ...] = ()
    key: str = ""
    ceiling: Tensor | None = None


@dataclass(frozen=True)
class PretrainedAttack:
    """What an attack learned from unprotected features of public images: its checkpoints."""

    checkpoints: Mapping[str, tuple[dict[str, Tensor], dict[str, Any]]]
    seconds: float = 0.0
    key: str = ""


@dataclass(frozen=True)
class Device:
    """A deployed device: the encoder of a target and its protection; releases are stored."""

    store: "Store"
    target: Target
    protection: Defense | None = None
    prior: Prior | None = None
    amortizer: TrainedAmortizer | None = None
    seed: int = 0

    def release(self, images: ImageBatch, number: int = 0) -> Released:
        """Release features; different numbers use different random numbers."""
        from frostglass.auditing.steps import RELEASE  # steps are made of these products

        return self.store.step(
            RELEASE,
            self.protection,
            target=self.target,
            images=images,
            prior=self.prior,
            amortizer=self.amortizer,
            number=number if self.protection else 0,  # plain features do not vary
            seed=self.seed,
        )


@dataclass(frozen=True)
class ModelExposure:
    """A released model: an attacker gets a view of the target."""

    target: Target

    @property
    def key(self) -> str:
        return self.target.key

    def view(self, attack: Attack) -> ModelView:
        return self.target.view(attack.access)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FeatureExposure:
    """Intercepted traffic: the features that a device released for the victims' images."""

    device: Device
    victims: ImageBatch
    people: tuple[int, ...]
    images: Images
    released: Released

    @property
    def key(self) -> str:
        return self.released.key

    @property
    def target(self) -> Target:
        return self.device.target

    def view(self, attack: Attack) -> FeatureView:
        both = halves(self.target)
        device = device_of(both.encoder)

        def released(images: ImageBatch, number: int) -> Tensor:
            return self.device.release(images, number).features.to(device)

        return FeatureView(
            both,
            released(self.victims, 0),
            attack.access,  # type: ignore[arg-type]
            protect=lambda images, number: released(ImageBatch.of(images, "public"), number),
            again=lambda number: released(self.victims, number),
        )


Exposure = ModelExposure | FeatureExposure


def blank_view(target: Target, attack: Attack) -> FeatureView:
    """Return a view of an encoder without intercepted features: for what is learned before."""
    both = halves(target)
    blank = torch.zeros(2, *both.feature_shape, device=device_of(both.encoder))
    return FeatureView(both, blank, attack.access)  # type: ignore[arg-type]
