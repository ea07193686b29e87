"""What an attacker knows of the world before touching a target: a generator learned on public images."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from frostglass.errors import CheckpointError, DataError
from frostglass.files import Work
from frostglass.registry import Registry
from frostglass.runtime import device_of, seeded, under_prefix, with_prefix
from frostglass.types import Images, Shape, View

priors = Registry("prior", "frostglass.priors")


@dataclass(frozen=True)
class Prior:
    """A generator of images in [0, 1] from standard normal latents, perhaps with the critic that trained it.

    `saw` holds a hash of every identity whose pictures it was trained on; `tied_to` the key of the target it was fitted to, if any.
    """

    generator: nn.Module
    critic: nn.Module | None
    latent: int
    image_shape: Shape
    saw: Tensor
    info: Mapping[str, Any] = field(default_factory=dict)
    tied_to: str | None = None
    key: str = ""

    def draw(self, *generators: torch.Generator) -> Tensor:
        """One latent from each (CPU) generator, (N, latent), on the generator network's device."""
        return torch.stack([torch.randn(self.latent, generator=generator) for generator in generators]).to(device_of(self.generator))

    def images(self, latents: Tensor) -> Tensor:
        """Pictures for latents, float32 in [0, 1], differentiable."""
        return self.generator(latents)


class PriorMethod(Protocol):
    """A frozen set of parameters that can make a prior; `tied` says whether it is fitted to one target and never reused for another."""

    tied: ClassVar[bool]

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


def save_prior(prior: Prior, folder: Path) -> None:
    """Write a prior as one safetensors file; `prior.info` must hold the method's name and parameters under "method"."""
    write_prior(prior, folder / "prior.safetensors")


def write_prior(prior: Prior, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a prior to `path`; half precision halves the file and is widened again on reading."""
    tensors = with_prefix("generator", prior.generator.state_dict())
    if prior.critic is not None:
        tensors |= with_prefix("critic", prior.critic.state_dict())
    tensors = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    tensors["saw"] = prior.saw
    facts = {"image_shape": prior.image_shape, "info": dict(prior.info), "tied_to": prior.tied_to, "critic": prior.critic is not None}
    save_file(tensors, path, metadata={"frostglass_prior": json.dumps(facts, sort_keys=True)})


def load_prior(folder: Path) -> Prior:
    return read_prior(folder / "prior.safetensors")


def read_prior(path: Path) -> Prior:
    """Rebuild a prior from its file, strictly: every tensor must be there, and no other."""
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
    parts_named = ("generator.", "critic.") if facts["critic"] else ("generator.",)
    stray = sorted(name for name in tensors if name != "saw" and not name.startswith(parts_named))
    broken = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all())
    if stray or broken or "saw" not in tensors:
        raise CheckpointError(
            f"{path} is not as it was written: {len(stray)} tensors too many ({', '.join(stray[:3])}), {len(broken)} not finite "
            f"({', '.join(broken[:3])}), {'no ' if 'saw' not in tensors else ''}list of the identities it saw; make the prior again"
        )
    method = priors.get(facts["info"]["method"]["name"])(**facts["info"]["method"]["parameters"])
    shape = tuple(facts["image_shape"])
    with seeded(0, "read_prior"):  # the weights drawn here are replaced below
        generator, critic = method.networks(shape)
    parts: list[tuple[str, nn.Module]] = [("generator", generator)] + ([("critic", critic)] if facts["critic"] else [])
    for name, module in parts:
        found = {key: t.float() if t.is_floating_point() else t for key, t in under_prefix(name, tensors).items()}
        expected = {key: tuple(t.shape) for key, t in module.state_dict().items()}
        if {key: tuple(t.shape) for key, t in found.items()} != expected:
            raise CheckpointError(
                f"{path}: the {name}'s tensors do not match {method!r}: expected {len(expected)} names and shapes, got {len(found)}"
            )
        module.load_state_dict(found)
        module.eval()
    return Prior(
        generator=generator,
        critic=critic if facts["critic"] else None,
        latent=method.latent,
        image_shape=shape,
        saw=tensors["saw"],
        info=facts["info"],
        tied_to=facts["tied_to"],
    )
