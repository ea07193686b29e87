"""An audit of a model that its owner has: the settings are chosen, no config is needed."""

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from frostglass.auditing.run import Run, run_all
from frostglass.core.errors import ConfigError
from frostglass.data.folder import Folder
from frostglass.models.answers import FUNCTION, answers_only, hold, is_whole
from frostglass.models.endpoint import SCHEMES
from frostglass.models.foreign import onnx_input
from frostglass.models.hub_folder import HUB, hub_size
from frostglass.runtime.device import default_device
from frostglass.store.store import Store
from frostglass.training.settings import Training

Access = Literal["weights", "scores", "labels"]
CHECKPOINTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
CONTROL = "resnet"  # what a positive control trains where the architecture is not known
SHIFT = 16  # evaluators see images moved by one in so many pixels


@dataclass(frozen=True)
class Effort:
    """How much is spent: people attacked, steps of evaluators, the prior, and the search."""

    people: int | None
    epochs: int
    least_steps: int
    prior: Mapping[str, Any]
    pool: int
    steps: int
    candidates: int

    def epochs_for(self, images: int) -> int:
        """Return the epochs of a training on so many images: few images need more of them."""
        return max(self.epochs, math.ceil(self.least_steps * Training().batch / max(images, 1)))


_FAST = {"lr": 5e-4, "average": 0.99}  # a generator that is usable after a thousand steps
EFFORTS = {
    "quick": Effort(
        people=20,
        epochs=15,
        least_steps=600,
        prior={"width": 16, "steps": 1000, "critic_steps": 3, **_FAST},
        pool=1000,
        steps=80,
        candidates=3,
    ),
    "usual": Effort(
        people=50,
        epochs=30,
        least_steps=1500,
        prior={"width": 32, "steps": 4000, "critic_steps": 3, **_FAST},
        pool=3000,
        steps=150,
        candidates=5,
    ),
    "thorough": Effort(
        people=None,
        epochs=40,
        least_steps=3000,
        prior={"steps": 20000},
        pool=5000,
        steps=300,
        candidates=10,
    ),
}
FASTER = {"thorough": "usual", "usual": "quick"}


@dataclass(frozen=True)
class OwnModel:
    """What its owner says about a model.

    `model` is a checkpoint of `arch`, a TorchScript or ONNX file, `package.module:function`, or the
    address of an endpoint. `private` has a folder for each person, in the order of the outputs by
    name, or in that of `classes`; `public` has images of other people. `size` is that of the images
    in pixels a side, where the architecture or the file does not say it. `access` is what an
    attacker would have.
    """

    model: str
    private: Path
    public: Path | None = None
    arch: str = ""
    classes: Sequence[str] = ()
    size: int | None = None
    access: Access = "weights"
    effort: str = "usual"
    trust: bool = False

    def __post_init__(self) -> None:
        for option, value, known in (
            ("access", self.access, ("weights", "scores", "labels")),
            ("effort", self.effort, tuple(EFFORTS)),
        ):
            if value not in known:
                raise ConfigError(f"{option}: expected {', '.join(known)}, got {value!r}")

    @property
    def _public(self) -> Path:
        if self.public is None:
            raise ConfigError(
                "--public: expected a folder of images of other people, got none: a generator of "
                "faces and the thresholds of the evaluators are learned from it; a few hundred "
                "people with three images or more each are enough"
            )
        return self.public

    def settings(self) -> dict[str, Any]:
        """Return the config of the audit."""
        weights = self._weights()
        if self.access == "weights" and answers_only(weights):
            raise ConfigError(
                f"--access weights: {self.model} can only be asked: use --access scores or labels, "
                "or give a checkpoint with --arch, or MODULE:FUNCTION"
            )
        effort, size = EFFORTS[self.effort], self._size(weights)
        people, private, public = Folder(
            private=self.private, public=self._public, size=size
        ).counts()
        epochs, embedding = effort.epochs_for(private), effort.epochs_for(public)
        attacked = people if effort.people is None else min(people, effort.people)
        target = {"model": self.arch or CONTROL, "weights": weights, "epochs": epochs}
        optional = {"classes": list(self.classes), "trust": self.trust}
        table = {
            "name": f"audit-{_stem(self.model)}",
            "seed": 0,
            "data": {
                "name": "folder",
                "private": str(self.private),
                "public": str(self._public),
                "size": size,
            },
            "target": target | {key: value for key, value in optional.items() if value},
            "evaluators": [
                {"model": "resnet", "epochs": epochs},
                {"model": "convmixer", "epochs": epochs, "shift": max(1, size // SHIFT)},
                {"kind": "embedder", "training": {"model": "resnet", "epochs": embedding}},
            ],
            "prior": {"name": "wgan", **effort.prior},
            "judging": {"identities": attacked, "positive_control": "if_needed"},
        }
        return table | _attacks(self.access, self.effort)

    def _weights(self) -> str:
        """Return what `target.weights` calls the model."""
        path, suffix = Path(self.model), Path(self.model).suffix.lower()
        if self.model.partition(":")[0] in SCHEMES or is_whole(self.model):
            return self.model
        if not path.is_file():
            raise ConfigError(
                f"no model at {self.model}: expected a file (safetensors, torch, TorchScript or "
                "ONNX), hf:FOLDER, MODULE:FUNCTION, or an address such as https://host/path"
            )
        if suffix == ".onnx":
            return f"onnx:{self.model}"
        if _is_torchscript(path):
            return f"torchscript:{self.model}"
        if suffix not in CHECKPOINTS:
            raise ConfigError(
                f"{self.model}: expected a file that ends in {', '.join(CHECKPOINTS)} or .onnx, "
                f"got {suffix or 'no ending'}"
            )
        if not self.arch:
            raise ConfigError(
                f"--arch: {path.name} holds weights alone: name their network, such as "
                "timm:resnet18, torchvision:resnet50 or MODULE:FUNCTION"
            )
        return self.model

    def _size(self, weights: str) -> int:
        found = self.size or _size_of_network(self.arch) or _size_of_file(weights)
        if found is None:
            raise ConfigError(
                "--size: expected the pixels a side of the images that the model takes, got none: "
                f"{self.arch or self.model} does not say it"
            )
        return found


def audit_model(
    model: nn.Module | str | Path,
    *,
    private: Path | str,
    public: Path | str,
    store: Store | Path | str = ".frostglass",
    arch: str = "",
    classes: Sequence[str] = (),
    size: int | None = None,
    access: Access = "weights",
    effort: str = "usual",
    **changes: Any,
) -> Run:
    """Audit a model that you have: a network, or what `frostglass audit` takes.

    The settings are chosen, as for that command; `changes` replace whole sections of them, such as
    `attack={"name": "gmi", "steps": 50}`. Give `size` for a network in memory.
    """
    given = hold(model) if isinstance(model, nn.Module) else str(model)
    own = OwnModel(
        given, Path(private), Path(public), arch, tuple(classes), size, access, effort
    ).settings()
    steps = store if isinstance(store, Store) else Store(store)
    return run_all(own | changes, steps)


def _attacks(access: Access, effort: str) -> dict[str, Any]:
    """Return the attacks for an access: one, or cases of a grid."""
    size = EFFORTS[effort]
    common = {"candidates": size.candidates, "keep": min(size.candidates, 5)}
    if access == "labels":
        return {"attack": {"name": "brepmi", **common}}
    if access == "scores":
        genetic = {"pool": size.pool, "generations": size.steps, **common}
        return {"attack": {"name": "mirror_genetic", **genetic}}
    gmi = {
        "name": "gmi",
        "variant": "margin",
        "optimizer": "adam",
        "lr": 0.05,
        "weight": 1.0,
        "critic_weight": 0.05,
        "coupling": 1,
        "clamp": 0.0,
        "pool": size.pool,
        "steps": size.steps,
    }
    if effort != "thorough":
        return {"attack": gmi | common}
    listing = {"name": "modes", "candidates": 2 * size.candidates, "keep": 5, "base": gmi}
    tied = {"name": "conditional", "steps": size.prior["steps"]}
    guided = {"name": "plgmi", "steps": size.steps, **common}
    cases = [
        {"case": "GMI, margin", "attack": gmi | common},
        {"case": "GMI, modes", "attack": listing},
        {"case": "PLG-MI", "attack": guided, "prior": tied},
    ]
    return {"grid": {"case": cases}}


def _stem(model: str) -> str:
    """Return a name for a run's folder."""
    if FUNCTION.fullmatch(model):
        return model.replace(":", ".")
    kept = Path(model).stem if ":" not in model else model.partition("://")[2] or "network"
    return "".join(each if each.isalnum() or each in ".-" else "-" for each in kept)


def _is_torchscript(path: Path) -> bool:
    """Return whether a file is an archive with TorchScript's code in it."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


def _size_of_network(arch: str) -> int | None:
    """Return the usual size of a library's network."""
    library, _, name = arch.partition(":")
    if library == "torchvision":
        return 299 if name.startswith("inception") else 224
    if library != "timm":
        return None
    import timm  # slow to import

    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return None if config is None else int(config.input_size[-1])


def _size_of_file(weights: str) -> int | None:
    kind, _, place = weights.partition(":")
    if kind == HUB:
        return hub_size(place)
    shape = onnx_input(Path(place)) if kind == "onnx" else None
    return shape[-1] if shape and len(shape) == 3 else None


def has_gpu() -> bool:
    """Return whether this machine computes on something faster than its processor."""
    return default_device().type != "cpu"
