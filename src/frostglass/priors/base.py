"""What an attacker knows of the world before touching a target: a generator learned on public images."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from frostglass.errors import CheckpointError, ConfigError, DataError
from frostglass.files import Work
from frostglass.registry import Registry
from frostglass.runtime import device_of, seeded, under_prefix, with_prefix
from frostglass.types import Capability, Images, Shape, View

priors = Registry("prior", "frostglass.priors")
UNKNOWN = "not known: nobody can check that the attacked people are not among those this generator was trained on"  # info["saw"] of priors made elsewhere


Condition = Literal["", "label", "hint"]


@dataclass(frozen=True)
class Prior:
    """A generator of images in [0, 1] from standard normal latents, perhaps with the critic that trained it.

    `critic(images)` (N, 1) is larger the more real an image looks. `saw` holds a hash of every identity whose pictures it was trained on; `tied_to`
    the key of the target it was fitted to, if any, and `classes` how many classes that has. What the generator takes beside latents is its
    `condition`: nothing, a class label, or a hint, a row of `hints` (K, ...) for each class. `students` are networks that imitate the target,
    `features` (2, F) mean and standard deviation of the target's penultimate features on public pictures.
    """

    generator: nn.Module
    critic: nn.Module | None
    latent: int
    image_shape: Shape
    saw: Tensor
    info: Mapping[str, Any] = field(default_factory=dict)
    tied_to: str | None = None
    classes: int = 0
    condition: Condition = ""
    hints: Tensor | None = None
    students: tuple[nn.Module, ...] = ()
    features: Tensor | None = None
    key: str = ""

    @property
    def modules(self) -> list[nn.Module]:
        """Every network of the prior."""
        return [self.generator, *([self.critic] if self.critic is not None else []), *self.students]

    @property
    def blocks(self) -> int:
        """How many blocks a StyleGAN2 can be entered at, each with two layers of styles; other generators have none."""
        return getattr(self.generator, "style_blocks", 0)

    def draw(self, *generators: torch.Generator) -> Tensor:
        """One latent from each (CPU) generator, (N, latent), on the generator network's device."""
        return torch.stack([torch.randn(self.latent, generator=generator) for generator in generators]).to(device_of(self.generator))

    def images(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Pictures for latents (N, latent), float32 in [0, 1], differentiable; a conditional generator makes them for `labels` (N,)."""
        if not self.condition:
            return self.generator(latents)
        if labels is None or (self.condition == "hint" and self.hints is None):
            missing = (
                "labels"
                if labels is None
                else "hints: bind them with dataclasses.replace(prior, hints=frostglass.priors.context.hints_of(prior.info, pictures))"
            )
            raise ConfigError(f"the generator makes pictures of a given {self.condition}, and got no {missing}")
        return self.generator(latents, labels if self.hints is None else self.hints[labels])

    def realism(self, images: Tensor) -> Tensor:
        """The critic's opinion of each picture, (N,)."""
        if self.critic is None:
            raise ConfigError("the prior has no critic: set attack.critic_weight to 0")
        return self.critic(images)[:, 0]


class PriorMethod(Protocol):
    """A frozen set of parameters that can make a prior; `tied` says whether it is fitted to one target and never reused for another.

    `needs` is what it asks of the target, if it asks. One that is `ready` needs no training: `read(image_shape)` gives the prior. `networks(image_shape, classes)` builds generator and critic; a method that adds to another prior names that
    one's method as `base_method`, and is given the prior it made.
    """

    @property
    def tied(self) -> bool: ...

    @property
    def needs(self) -> Capability | None: ...

    def train(self, public: Images, view: View | None = None, *, seed: int = 0, work: Work | None = None) -> Prior: ...


def identity_hashes(names: Iterable[str]) -> Tensor:
    """One 63-bit hash per identity name, sorted."""
    folded = (unicodedata.normalize("NFKC", name).casefold().encode() for name in names)
    return torch.tensor(
        sorted(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1 for name in folded), dtype=torch.int64
    )


def check_unseen(prior: Prior, private_names: Iterable[str]) -> None:
    """Refuse a prior that was trained on pictures of the people under attack: it would know them already."""
    names = list(private_names)
    known = torch.isin(identity_hashes(names), prior.saw)
    if known.any():
        one = next(n for n in names if torch.isin(identity_hashes([n]), prior.saw).any())
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


def save_prior(prior: Prior, folder: Path) -> None:
    """Write a prior as one safetensors file; `prior.info` must hold the method's name and parameters under "method"."""
    write_prior(prior, folder / "prior.safetensors")


def write_prior(prior: Prior, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a prior to `path`; half precision halves the file and is widened again on reading."""
    tensors = {
        name: t
        for part, module in _parts(prior.generator, prior.critic, prior.students)
        for name, t in with_prefix(part, module.state_dict()).items()
    }
    tensors = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    tensors["saw"] = prior.saw
    if prior.features is not None:
        tensors["features"] = prior.features
    facts = {
        "image_shape": prior.image_shape, "info": dict(prior.info), "tied_to": prior.tied_to, "critic": prior.critic is not None,
        "latent": prior.latent, "classes": prior.classes, "condition": prior.condition,
    }  # fmt: skip
    save_file(tensors, path, metadata={"frostglass_prior": json.dumps(facts, sort_keys=True)})


def _parts(generator: nn.Module, critic: nn.Module | None, students: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The networks of a prior by the names they have in its file."""
    named = [("generator", generator), *([("critic", critic)] if critic is not None else [])]
    return [*named, *((f"student{number}", student) for number, student in enumerate(students))]


def load_prior(folder: Path) -> Prior:
    """Read what `save_prior` wrote, also where it names code of the user's own to build its networks."""
    return read_prior(folder / "prior.safetensors", ours=True)


def read_prior(path: Path, *, ours: bool = False) -> Prior:
    """Rebuild a prior from its file, strictly: every tensor must be there, and no other. Unless it is `ours`, a file that names code to run is refused."""
    if not path.is_file():
        raise CheckpointError(f"no prior at {path}: give the path of a file written by frostglass, or the name of an embedded prior")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("frostglass_prior", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}): make the prior again") from None
    if facts is None:
        raise CheckpointError(f"{path} holds weights but does not say it is a frostglass prior: expected a file written by save_prior")
    try:
        code = code_in(facts["info"])
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not say how its prior was made ({type(error).__name__}): make the prior again") from error
    if code and not ours:
        raise CheckpointError(
            f"{path} names code to run ({code}), and a file must hold weights alone: name the code in a config, as prior.source or a student"
        )
    shape, classes = tuple(facts["image_shape"]), facts.get("classes", 0)
    with seeded(0, "read_prior"):  # the weights drawn here are replaced below
        generator, critic, students = _networks(facts["info"], shape, classes)
    parts = _parts(generator, critic if facts["critic"] else None, students)
    named = tuple(f"{part}." for part, _ in parts)
    stray = sorted(name for name in tensors if name not in ("saw", "features") and not name.startswith(named))
    broken = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all())
    if stray or broken or "saw" not in tensors:
        raise CheckpointError(
            f"{path} is not as it was written: {len(stray)} tensors too many ({', '.join(stray[:3])}), {len(broken)} not finite "
            f"({', '.join(broken[:3])}), {'no ' if 'saw' not in tensors else ''}list of the identities it saw; make the prior again"
        )
    for part, module in parts:
        found = {key: t.float() if t.is_floating_point() else t for key, t in under_prefix(part, tensors).items()}
        expected = {key: tuple(t.shape) for key, t in module.state_dict().items()}
        if {key: tuple(t.shape) for key, t in found.items()} != expected:
            raise CheckpointError(
                f"{path}: the {part}'s tensors do not match {facts['info']['method']['name']}: expected {len(expected)} names and shapes, got {len(found)}"
            )
        module.load_state_dict(found)
        module.eval()
    return Prior(
        generator=generator,
        critic=critic if facts["critic"] else None,
        latent=facts.get("latent", facts["info"]["method"]["parameters"].get("latent")),
        image_shape=shape,  # type: ignore[arg-type]
        saw=tensors["saw"],
        info=facts["info"],
        tied_to=facts["tied_to"],
        classes=classes,
        condition=facts.get("condition", ""),
        students=tuple(students),
        features=tensors.get("features"),
    )


def code_in(info: Mapping[str, Any]) -> str:
    """The code or file of somebody else's that a prior's networks are made by, if any."""
    given = info["method"]["parameters"]
    students = [student["model"] for student in given.get("students") or ()]
    named = [model for model in students if ":" in model and model.partition(":")[0] not in ("timm", "torchvision")]
    under = code_in(info["base"]) if "base" in info else ""
    return next(filter(None, [given.get("source"), *named, under]), "")


def _networks(info: Mapping[str, Any], shape: Any, classes: int) -> tuple[nn.Module, nn.Module | None, Sequence[nn.Module]]:
    """Generator, critic and students as the recorded method builds them; a prior that was added to has the record of the other as "base"."""
    method = priors.get(info["method"]["name"])(**info["method"]["parameters"])
    if "base" not in info:
        return *method.networks(shape, classes), ()
    generator, critic, _ = _networks(info["base"], shape, classes)
    return generator, critic, method.build_students(shape, classes)
