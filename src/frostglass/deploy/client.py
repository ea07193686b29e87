"""The two halves of a split model as things to ship: a client that lets out protected features, a server that answers them."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.audit.pipeline import rebuild
from frostglass.core.assets import Assets
from frostglass.core.errors import CheckpointError, ConfigError, RunError
from frostglass.core.prior import Prior
from frostglass.core.types import Halves, Shape, Target
from frostglass.data._images import Crop
from frostglass.defenses.base import Defense, Release, defenses
from frostglass.models.build import source
from frostglass.models.cut import cut, halves
from frostglass.networks.amortizer import Amortizer
from frostglass.priors._files import code_in, read_prior, save_prior
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work, read_json, read_tensors, write_json, write_tensors

CHUNK = 128
FACTS, WEIGHTS, AMORTIZER, PRIOR = (
    "facts.json",
    "weights.safetensors",
    "amortizer.safetensors",
    "prior.safetensors",
)


@dataclass(frozen=True)
class TrainedAmortizer:
    """A trained amortizer, with what it takes to build it again."""

    network: nn.Module
    config: Amortizer
    feature_shape: tuple[int, ...]
    latent: int
    key: str = ""

    def save(self, folder: Path) -> None:
        about = {
            "config": asdict(self.config),
            "feature_shape": list(self.feature_shape),
            "latent": self.latent,
        }  # type: ignore[call-overload]
        write_tensors(folder / AMORTIZER, self.network.state_dict(), about)

    @classmethod
    def load(cls, folder: Path) -> "TrainedAmortizer":
        tensors, about = read_tensors(folder / AMORTIZER)
        config, shape = Amortizer(**about["config"]), tuple(about["feature_shape"])
        network = config.network(shape, about["latent"])
        network.load_state_dict(tensors)
        return cls(network.eval().to(default_device()), config, shape, about["latent"])


@dataclass(frozen=True)
class Client:
    """The device's half: `protect(images)` gives the features that may leave.

    `protection` is a defense that releases features, such as Crafter, or None: then plain features leave, of an encoder that may have been trained with a defense.
    `recipe` says how the network is built, so that a saved client can be loaded; a module of your own has none. `crop` is how picture files are made square for it.
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
        """Features (N, ...) for pictures (N, C, H, W) in [0, 1]. What is finished is kept in `work`, so that a call that was stopped goes on."""
        return self.release(images, seed=seed, work=work).features

    def release(self, images: Tensor, *, seed: int = 0, work: Work | None = None) -> Release:
        """The features with what the protection measured on the way."""
        if not isinstance(images, Tensor):
            raise ConfigError(
                f"expected a tensor of pictures, got a {type(images).__name__}: torch.from_numpy makes one of an array"
            )
        if (
            images.ndim != 4
            or tuple(images.shape[1:]) != tuple(self.image_shape)
            or not images.is_floating_point()
        ):
            raise ConfigError(
                f"expected float pictures of shape (N, {', '.join(map(str, self.image_shape))}) in [0, 1], got {images.dtype} {tuple(images.shape)}"
            )
        if len(images) and not (images.min() >= 0 and images.max() <= 1):
            raise ConfigError(
                f"expected pictures in [0, 1], got values from {images.min().item():.3g} to {images.max().item():.3g}: divide by 255?"
            )
        images = _as_weights(images, self.encoder)
        if self.protection is None:
            with frozen(self.encoder), torch.no_grad():
                return Release(torch.cat([self.encoder(part) for part in images.split(CHUNK)]))
        assets = Assets(
            prior=self.prior, amortizer=self.amortizer.network if self.amortizer else None
        )
        return self.protection.release(
            self.encoder, images, assets, seed=seed, work=work or Work.scratch()
        )

    def save(self, folder: Path | str) -> Path:
        """Write the client into a new folder: facts.json and safetensors, nothing else."""
        folder = _new(folder)
        facts = {
            "kind": "client", "image_shape": self.image_shape, "feature_shape": self.feature_shape, "cut": self.cut, "recipe": self.recipe, "crop": self.crop,
            "protection": None if self.protection is None else {"name": self.protection.name, **asdict(self.protection)},  # type: ignore[call-overload]
        }  # fmt: skip
        if self.prior is not None:
            if "method" not in self.prior.info or (code := code_in(self.prior.info)):
                how = (
                    f"is made by code ({code})"
                    if "method" in self.prior.info
                    else "does not say how it was made"
                )
                raise CheckpointError(
                    f"the client's prior {how}, and a client holds weights alone: use one that frostglass trained or converted"
                )
            save_prior(self.prior, folder)
        if self.amortizer is not None:
            self.amortizer.save(folder)
        write_tensors(folder / WEIGHTS, self.encoder.state_dict())
        write_json(folder / FACTS, facts)
        return folder

    @classmethod
    def load(cls, folder: Path | str, module: nn.Module | None = None) -> "Client":
        """The client that `save` wrote; one made of a network of your own is given such a network, whole, as `module`."""
        folder = Path(folder)
        facts = _facts(
            folder, "client", ("image_shape", "feature_shape", "cut", "recipe", "protection")
        )
        encoder = _halves(facts, folder, module).encoder
        _fill(encoder, folder)
        chosen = facts["protection"]
        protection = (
            defenses.get(chosen["name"])(
                **{name: value for name, value in chosen.items() if name != "name"}
            )
            if chosen
            else None
        )
        prior = read_prior(folder / PRIOR) if (folder / PRIOR).is_file() else None
        for module in prior.modules if prior else ():
            module.to(default_device())
        return cls(
            encoder.to(default_device()), tuple(facts["image_shape"]), tuple(facts["feature_shape"]), facts["cut"], protection, prior,
            TrainedAmortizer.load(folder) if (folder / AMORTIZER).is_file() else None, facts["recipe"], facts.get("crop", "centre"),
        )  # fmt: skip


@dataclass(frozen=True)
class Server:
    """The server's half: `answer(features)` gives the logits of `classes`, attributes or not."""

    rest: nn.Module
    classes: tuple[str, ...]
    image_shape: Shape
    feature_shape: tuple[int, ...]
    cut: str
    attributes: bool = False
    recipe: Mapping[str, Any] | None = None

    def answer(self, features: Tensor) -> Tensor:
        """Logits (N, K) for features (N, ...)."""
        self._check(features)
        with frozen(self.rest), torch.no_grad():
            return torch.cat(
                [self.rest(_as_weights(part, self.rest)) for part in features.split(CHUNK)]
            )

    def retrained(
        self,
        features: Tensor,
        answers: Tensor,
        *,
        epochs: int = 20,
        batch: int = 64,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> "Server":
        """This server after learning from released features (N, ...) what they stand for: labels (N,), or attributes (N, K) of 0.0 and 1.0.

        So a service can be trained by people who never send a plain feature. This server stays as it was.
        """
        self._check(features)
        if len(features) != len(answers) or len(features) < 2:
            raise ConfigError(
                f"{len(features)} features and {len(answers)} answers: as many of both are needed, and at least 2"
            )
        if self.attributes != (answers.ndim == 2) or (
            self.attributes and answers.shape[1] != len(self.classes)
        ):
            wanted = (
                f"(N, {len(self.classes)}) of 0 and 1" if self.attributes else "(N,) of classes"
            )
            raise ConfigError(
                f"expected answers {wanted}, got {answers.dtype} {tuple(answers.shape)}"
            )
        answers = answers.float() if self.attributes else answers.long()
        rest = copy.deepcopy(self.rest).train()
        device = device_of(rest)
        rule = torch.optim.AdamW(rest.parameters(), lr=lr)
        loss_of = F.cross_entropy if answers.ndim == 1 else F.binary_cross_entropy_with_logits
        with seeded(seed, "retrain"):  # dropout inside the network
            for epoch in range(epochs):
                count = max(1, len(features) // batch)
                for index in torch.randperm(
                    len(features), generator=generator_for(seed, "retrain", epoch)
                ).tensor_split(count):
                    loss = loss_of(rest(features[index].to(device)), answers[index].to(device))
                    if not loss.isfinite():
                        raise RunError(f"the loss is not finite at epoch {epoch}: lower lr")
                    rule.zero_grad(set_to_none=True)
                    loss.backward()
                    rule.step()
        return replace(self, rest=rest.eval())

    def save(self, folder: Path | str) -> Path:
        """Write the server into a new folder: facts.json and safetensors, nothing else."""
        folder = _new(folder)
        write_tensors(folder / WEIGHTS, self.rest.state_dict())
        facts = {
            "kind": "server", "classes": self.classes, "image_shape": self.image_shape, "feature_shape": self.feature_shape, "cut": self.cut,
            "attributes": self.attributes, "recipe": self.recipe,
        }  # fmt: skip
        write_json(folder / FACTS, facts)
        return folder

    @classmethod
    def load(cls, folder: Path | str, module: nn.Module | None = None) -> "Server":
        """The server that `save` wrote; one made of a network of your own is given such a network, whole, as `module`."""
        folder = Path(folder)
        facts = _facts(
            folder,
            "server",
            ("image_shape", "feature_shape", "cut", "recipe", "classes", "attributes"),
        )
        rest = _halves(facts, folder, module).rest
        _fill(rest, folder)
        shapes = tuple(facts["image_shape"]), tuple(facts["feature_shape"])
        return cls(
            rest.to(default_device()),
            tuple(facts["classes"]),
            *shapes,
            facts["cut"],
            facts["attributes"],
            facts["recipe"],
        )

    def _check(self, features: Tensor) -> None:
        if tuple(features.shape[1:]) != tuple(self.feature_shape):
            raise ConfigError(
                f"expected features of shape (N, {', '.join(map(str, self.feature_shape))}), got {tuple(features.shape)}: "
                "they come from another model, or from another cut of it"
            )
        if not features.isfinite().all():
            raise ConfigError(
                "some of the features are NaN or infinite: nothing can be answered of them"
            )


def split_model(
    target: Target,
    protection: Defense | None = None,
    *,
    prior: Prior | None = None,
    amortizer: TrainedAmortizer | None = None,
) -> tuple[Client, Server]:
    """A target with a cut as the two things to ship; they are copies, and have the weights of their own half alone where the network can be traced."""
    if protection is not None and not protection.releases:
        raise ConfigError(
            f"{protection.name} acts while a network is trained, and not on what it releases: use it with train_target"
        )
    assets = Assets(prior=prior, amortizer=amortizer.network if amortizer else None)
    if protection is not None and (lacking := assets.missing(protection.needs, protection.name)):
        raise ConfigError(lacking)
    both = halves(replace(target, module=copy.deepcopy(target.module)))
    recipe = target.info.get("build")
    recipe = (
        None
        if recipe is None
        else {**recipe, "classes": len(target.classes), "image_shape": list(target.image_shape)}
    )
    shapes = target.image_shape, both.feature_shape
    client = Client(both.encoder.eval(), *shapes, both.tap, protection, prior, amortizer, recipe)
    return client, Server(
        both.rest.eval(), target.classes, *shapes, both.tap, target.attributes, recipe
    )


def _new(folder: Path | str) -> Path:
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already: give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _as_weights(given: Tensor, network: nn.Module) -> Tensor:
    """Pictures or features where a network's weights are, in their precision."""
    return given.to(
        next((weight for weight in network.parameters()), torch.zeros(0, device=device_of(network)))
    )


def _facts(folder: Path, kind: str, needed: tuple[str, ...]) -> dict[str, Any]:
    if not (folder / FACTS).is_file():
        raise CheckpointError(
            f"no {kind} in {folder}: expected a folder that frostglass protect wrote, with a {FACTS}"
        )
    facts = read_json(folder / FACTS)
    if not isinstance(facts, dict) or facts.get("kind") != kind:
        found = facts.get("kind") if isinstance(facts, dict) else type(facts).__name__
        raise CheckpointError(f"{folder} holds a {found}, expected a {kind}: give the other folder")
    if missing := [name for name in needed if name not in facts]:
        raise CheckpointError(
            f"{folder / FACTS} does not say {missing[0]}: it is not as it was written; save the {kind} again"
        )
    return facts


def _halves(facts: Mapping[str, Any], folder: Path, module: nn.Module | None) -> Halves:
    """The network that a folder's weights belong to, cut: `module`, or as the recipe says."""
    recipe = facts["recipe"]
    if module is not None:
        return cut(module, facts["cut"], tuple(facts["image_shape"]))
    if recipe is None:
        raise CheckpointError(
            f"{folder} was made of a module of its owner's: build one and give it to load()"
        )
    model = recipe["training"]["model"]
    if ":" in model and model.partition(":")[0] not in ("timm", "torchvision"):
        where = source(model) or "its file"
        raise CheckpointError(
            f"{folder} names code to run ({model}, {where}), and files must hold weights alone: build the module and give it to load()"
        )
    return cut(
        rebuild({**recipe, "image_shape": tuple(recipe["image_shape"])}),
        facts["cut"],
        tuple(facts["image_shape"]),
    )


def _fill(module: nn.Module, folder: Path) -> None:
    """Load a half's weights, all of them and no others."""
    tensors, _ = read_tensors(folder / WEIGHTS)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        odd = sorted(expected.keys() ^ found.keys()) or [
            name for name in expected if expected[name] != found[name]
        ]
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit the network: {len(odd)} tensors differ, such as {odd[0]}; build it as it was saved"
        )
    if broken := [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]:
        raise CheckpointError(
            f"{folder / WEIGHTS} holds NaN or infinity in {broken[0]}: save it again"
        )
    module.load_state_dict(tensors)
    module.eval()
