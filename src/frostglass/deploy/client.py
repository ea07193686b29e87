"""The device's half of a split model, and the function that splits a model in two."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.core.assets import Assets
from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Shape, Target
from frostglass.data._images import Crop
from frostglass.defenses.base import Defense, Release, defenses
from frostglass.deploy._facts import ClientFacts
from frostglass.deploy._files import (
    load_weights,
    match_weights,
    new_folder,
    read_facts,
    rebuild_halves,
    refuse_code,
    save_half,
    shape_of,
)
from frostglass.deploy.amortizer import AMORTIZER, TrainedAmortizer
from frostglass.deploy.server import Server
from frostglass.models.cut import encoded, halves
from frostglass.priors._files import code_in, read_prior, save_prior
from frostglass.runtime.device import default_device
from frostglass.store.files import Work

PRIOR = "prior.safetensors"


@dataclass(frozen=True)
class Client:
    """The device's half: `protect(images)` returns the features that may leave the device.

    `protection` is a defense that releases features, such as Crafter. Without one plain features
    leave, possibly of an encoder trained with a defense. `recipe` describes how to build the
    network, so that a saved client can be loaded; a module of your own has none. `crop` is how
    image files are made square.
    """

    encoder: nn.Module
    image_shape: Shape
    feature_shape: tuple[int, ...]
    cut: str
    protection: Defense | None = None
    prior: Prior | None = None
    amortizer: TrainedAmortizer | None = None
    recipe: Mapping[str, Any] | None = None
    crop: Crop = "centre"

    def protect(self, images: Tensor, *, seed: int = 0, work: Work | None = None) -> Tensor:
        """Return features (N, ...) of images (N, C, H, W) in [0, 1]; `work` allows to resume."""
        return self.release(images, seed=seed, work=work).features

    def release(self, images: Tensor, *, seed: int = 0, work: Work | None = None) -> Release:
        """Return the features, with the measurements of the protection."""
        self._check(images)
        images = match_weights(images, self.encoder)
        if self.protection is None:
            return Release(encoded(self.encoder, images))
        assets = Assets(prior=self.prior, amortizer=self.amortizer)
        work = work or Work.scratch()
        return self.protection.release(self.encoder, images, assets, seed=seed, work=work)

    def save(self, folder: Path | str) -> Path:
        """Write the client into a new folder: facts.json and safetensors, nothing else."""
        self._check_prior()
        protection = None
        if self.protection is not None:
            values = asdict(self.protection)  # type: ignore[call-overload]
            protection = {"name": self.protection.name, **values}
        facts = {
            "kind": "client",
            "image_shape": self.image_shape,
            "feature_shape": self.feature_shape,
            "cut": self.cut,
            "recipe": self.recipe,
            "crop": self.crop,
            "protection": protection,
        }
        folder = new_folder(folder)
        if self.prior is not None:
            save_prior(self.prior, folder)
        if self.amortizer is not None:
            self.amortizer.save(folder)
        return save_half(folder, self.encoder, facts)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        module: nn.Module | None = None,
        *,
        device: torch.device | None = None,
    ) -> "Client":
        """Load what `save` wrote; for a network of your own, pass the whole network as `module`."""
        folder, device = Path(folder), device or default_device()
        facts = read_facts(folder, "client", ClientFacts)
        encoder = rebuild_halves(facts, folder, module).encoder
        load_weights(encoder, folder)
        protection = _protection(facts, folder)
        prior = read_prior(folder / PRIOR) if (folder / PRIOR).is_file() else None
        for network in prior.modules if prior else ():
            network.to(device)
        return cls(
            encoder.to(device),
            shape_of(facts),
            tuple(facts.feature_shape),
            facts.cut,
            protection,
            prior,
            TrainedAmortizer.load(folder, device) if (folder / AMORTIZER).is_file() else None,
            facts.plain_recipe,
            facts.crop,
        )

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor):
            raise ConfigError(
                f"expected a tensor of images, got a {type(images).__name__}. Convert an array "
                "with torch.from_numpy."
            )
        shape = tuple(images.shape)
        if shape[1:] != tuple(self.image_shape) or not images.is_floating_point():
            expected = ", ".join(map(str, self.image_shape))
            raise ConfigError(
                f"expected float images of shape (N, {expected}) in [0, 1], got {images.dtype} "
                f"{shape}"
            )
        if len(images) and not (images.min() >= 0 and images.max() <= 1):
            span = f"{images.min().item():.3g} to {images.max().item():.3g}"
            raise ConfigError(f"expected images in [0, 1], got values from {span}. Divide by 255?")

    def _check_prior(self) -> None:
        if self.prior is None:
            return
        problem = ""
        if "method" not in self.prior.info:
            problem = "does not say how it was made"
        elif code := code_in(self.prior.info):
            problem = f"is made by code ({code})"
        if problem:
            raise CheckpointError(
                f"the client's prior {problem}, but a client holds weights alone. Use a prior that "
                "frostglass trained or converted."
            )


def _protection(facts: ClientFacts, folder: Path) -> Defense | None:
    if facts.protection is None:
        return None
    refuse_code(facts.protection.model_dump(), folder)
    protection: Defense = defenses.build(facts.protection.model_dump())
    if not protection.releases:
        raise CheckpointError(
            f"{folder} names {protection.name} as its protection, which releases no features: it "
            "was changed. Save the client again."
        )
    return protection


def split_model(
    target: Target,
    protection: Defense | None = None,
    *,
    prior: Prior | None = None,
    amortizer: TrainedAmortizer | None = None,
) -> tuple[Client, Server]:
    """Split a target with a cut into a client and a server.

    Both are copies, and hold the weights of their own half alone if the network can be traced.
    """
    if protection is not None:
        if not protection.releases:
            does = (
                "says where to cut: cut the target there"
                if protection.moves_cut
                else "acts during training. Pass it to train_target."
            )
            raise ConfigError(
                f"expected a protection of released features, got {protection.name}, which {does}"
            )
        assets = Assets(prior=prior, amortizer=amortizer)
        if missing := assets.missing(protection.needs, protection.name):
            raise ConfigError(missing)
    both = halves(replace(target, module=copy.deepcopy(target.module)))
    recipe = target.info.get("build")
    if recipe is not None:
        shape = list(target.image_shape)
        recipe = {**recipe, "classes": len(target.classes), "image_shape": shape}
    shapes = target.image_shape, both.feature_shape
    client = Client(both.encoder.eval(), *shapes, both.tap, protection, prior, amortizer, recipe)
    server = Server(both.rest.eval(), target.classes, *shapes, both.tap, target.attributes, recipe)
    return client, server
