"""NVIDIA's StyleGAN2 networks for ours: their pickles read as data, their names translated, and the result kept as safetensors."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.models.checkpoint import load_weights
from frostglass.networks.stylegan2.network import RATE, TAPS, StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.pickle_reader import Network, Stored, read_inert, refuse, shown
from frostglass.runtime.seeding import seeded
from frostglass.store.files import full_disk_reported, write_tensors

KIND = "stylegan2"  # what a converted file says it is
DEEPEST = 8  # networks within networks; NVIDIA's go to 4


def read_stylegan2(path: str | Path) -> tuple[StyleSettings, dict[str, Tensor]]:
    """The settings and the tensors (float32, by the names of `StyleGenerator`) of the averaged generator, "G_ema", in a pickle of StyleGAN2-ADA.

    Also reads the StyleGAN2 networks of the StyleGAN3 code, which have the same layout. Sizes come from the tensors' shapes; every tensor of the
    network must be there, and no other.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no file at {str(path)!r}: give the path of a StyleGAN2 pickle")
    try:
        parts = _parts(_generator(read_inert(path)))
        settings, tensors = _translated(parts, dict(_tensors(parts)))
    except CheckpointError as error:
        raise CheckpointError(f"{path.name} is not a StyleGAN2 that can be read: {error}") from None
    except (
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
    ) as error:  # what the machine raises for bytes cut off or changed
        raise CheckpointError(
            f"{path.name} is damaged, cut short or no pickle: {type(error).__name__}"
        ) from error
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{path.name} cannot be used: {len(broken)} of its tensors hold NaN or infinity ({_few(broken)})"
        )
    return settings, tensors


def _generator(content: Any) -> Network:
    found = content.get("G_ema") if isinstance(content, dict) else None
    if not isinstance(found, Network):
        held = (
            f"a dict of {_few(sorted(map(str, content)))}"
            if isinstance(content, dict)
            else f"a {type(content).__name__}"
        )
        refuse(f"expected a dict with a network G_ema, found {held}")
    return found


def _parts(network: Network) -> dict[str, Network]:
    """A network and all inside it by their dotted names; the network's own is empty."""
    parts, left, seen = {}, [("", network)], set()
    while left:
        name, part = left.pop()
        if (
            not isinstance(part, Network) or id(part) in seen or name.count(".") >= DEEPEST
        ):  # one inside itself would never end
            refuse(
                f"its part {shown(name)} is no network, in two places at once, or too deep inside others"
            )
        seen.add(id(part))
        parts[name] = part
        left += [
            (f"{name}.{inner}".lstrip("."), child) for inner, child in part.held("_modules").items()
        ]
    return parts


def _tensors(parts: dict[str, Network]) -> Iterator[tuple[str, Stored]]:
    for part, network in parts.items():
        for name, value in (network.held("_parameters") | network.held("_buffers")).items():
            if not isinstance(value, Stored):
                refuse(f"{shown(name)} in {shown(part)} is no tensor")
            yield f"{part}.{name}".lstrip("."), value


def _translated(
    parts: dict[str, Network], found: dict[str, Stored]
) -> tuple[StyleSettings, dict[str, Tensor]]:
    """Check everything against our network before a single tensor is made."""
    settings = _settings(parts, {name: value.shape for name, value in found.items()})
    with torch.device("meta"):  # shapes without memory
        own = {
            name: tuple(value.shape)
            for name, value in StyleGenerator(settings).state_dict().items()
        }
    theirs = {official_name(name, settings): name for name in own}
    filters = [name for name in found if name.endswith(".resample_filter")]
    extra = [name for name in found if name not in theirs and name not in filters]
    missing = [name for name in theirs if name not in found]
    shapes = [
        f"{name} {found[name].shape} for {own[theirs[name]]}"
        for name in theirs
        if name in found and found[name].shape != own[theirs[name]]
    ]
    problems = [(missing, "missing"), (extra, "unexpected"), (shapes, "of another shape")]
    if any(names for names, _ in problems):
        refuse(
            ", ".join(
                f"{len(names)} tensors {what} ({_few(names)})" for names, what in problems if names
            )
        )
    _check_layers(parts, settings)
    taps = torch.tensor(TAPS, dtype=torch.float32)
    expected = torch.outer(taps, taps) / taps.sum() ** 2
    if odd := [
        name
        for name in filters
        if found[name].shape != expected.shape or not torch.allclose(found[name].tensor(), expected)
    ]:
        refuse(f"{_few(odd)} is not the filter {list(TAPS)}")
    return settings, {theirs[name]: found[name].tensor() for name in theirs}


def official_name(name: str, settings: StyleSettings) -> str:
    """NVIDIA's name for a tensor of `StyleGenerator`: "synthesis.blocks.1.conv0.weight" is "synthesis.b8.conv0.weight"."""
    if name == "synthesis.const":
        return "synthesis.b4.const"
    name = re.sub(r"^mapping\.layers\.(\d+)", r"mapping.fc\1", name)
    return re.sub(
        r"^synthesis\.blocks\.(\d+)",
        lambda block: f"synthesis.b{settings.sizes[int(block[1])]}",
        name,
    )


def _settings(parts: dict[str, Network], shapes: dict[str, tuple[int, ...]]) -> StyleSettings:
    """The sizes of a network, from its tensors' shapes."""
    if "synthesis.b4.const" not in shapes or "mapping.fc0.weight" not in shapes:
        kind = (
            "it looks like StyleGAN3"
            if "synthesis.input" in parts
            else f"its tensors are {_few(list(shapes))}"
        )
        refuse(f"its generator has no synthesis.b4.const or no mapping.fc0.weight; {kind}")
    if "mapping.embed" in parts:
        refuse("its generator takes class labels, and only those without are supported")

    def size(name: str, axis: int) -> int:
        if len(shapes.get(name, ())) <= axis:
            refuse(f"{name} is missing or no tensor of {axis + 1} axes")
        return shapes[name][axis]

    resolution = max(
        int(block[1]) for name in shapes if (block := re.match(r"synthesis\.b(\d{1,5})\.", name))
    )
    last = f"synthesis.b{resolution}"
    clamp = (
        parts[f"{last}.conv1"].state.get("conv_clamp") if f"{last}.conv1" in parts else None
    )  # the one setting that no shape tells
    if clamp is not None and type(clamp) not in (int, float):
        refuse(f"conv_clamp of {last}.conv1 is a {type(clamp).__name__} and no number")
    found: dict[str, Any] = {
        "resolution": resolution,
        "colours": size(f"{last}.torgb.bias", 0),
        "z_dim": size("mapping.fc0.weight", 1),
        "w_dim": size("mapping.w_avg", 0),
        "layers": len([name for name in shapes if re.fullmatch(r"mapping\.fc\d+\.weight", name)]),
        "channel_base": size(f"{last}.conv1.weight", 0) * resolution,
        "channel_max": size("synthesis.b4.const", 0),
        "clamp": clamp,
    }
    try:
        return StyleSettings(**found)
    except ConfigError as error:
        refuse(f"its sizes are none of a StyleGAN2 ({error})")


def _check_layers(parts: dict[str, Network], settings: StyleSettings) -> None:
    """Refuse what shapes do not tell: another activation, clamp or learning rate would give other pictures from the same tensors."""
    expected: dict[str, dict[str, Any]] = {
        r"mapping\.fc\d+": {"activation": "lrelu", "bias_gain": RATE},
        r"synthesis\.b\d+\.conv\d": {"activation": "lrelu", "conv_clamp": settings.clamp},
        r"synthesis\.b\d+\.torgb": {"conv_clamp": settings.clamp},
    }
    for pattern, values in expected.items():
        for name, part in parts.items():
            for attribute, value in values.items():
                if re.fullmatch(pattern, name) and part.state.get(attribute) != value:
                    refuse(f"{name} has another {attribute} than {value}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (", ..." if len(names) > 3 else "")


def convert_stylegan2(
    source: str | Path, out: str | Path, *, force: bool = False
) -> StyleGenerator:
    """Write the averaged generator of a StyleGAN2 pickle as safetensors, with its settings in the header, and read it back."""
    out = Path(out)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists already: give another name, or --force to replace it")
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out.name}: there is no folder {str(out.parent)!r}")
    settings, tensors = read_stylegan2(source)
    try:
        with full_disk_reported(out.parent):
            write_tensors(out, tensors, {KIND: asdict(settings)})
    except OSError as error:
        raise ConfigError(
            f"cannot write {out} ({error.strerror}): give the name of a file in a folder of your own"
        ) from error
    return load_generator(out)


def load_generator(path: str | Path) -> StyleGenerator:
    """The generator in a file of `convert_stylegan2`, in evaluation mode; strict: every tensor must be there, and no other."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"no file at {str(path)!r}: make one with frostglass convert stylegan2"
        )
    try:
        with safe_open(path, framework="pt") as file:
            settings = StyleSettings(**json.loads((file.metadata() or {})["values"])[KIND])
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name} is not a readable safetensors file ({error}): convert it again"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path.name} does not say how its StyleGAN2 is made: convert it again, or if it is a prior of ours, read it as prior.name = 'pretrained'"
        ) from error
    with seeded(0, "load_generator"):  # the weights drawn here are replaced below
        generator = StyleGenerator(settings)
    load_weights(generator, path)
    return generator.eval()
