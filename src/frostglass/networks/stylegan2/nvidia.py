"""Converting NVIDIA's StyleGAN2 pickles, read only as data, to our names and safetensors."""

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
from frostglass.core.limits import within_file
from frostglass.models.checkpoint import load_weights
from frostglass.networks.stylegan2.network import RATE, TAPS, StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.pickle_reader import Network, Stored, read_inert, refuse, shown
from frostglass.runtime.seeding import seeded
from frostglass.store.files import full_disk_reported, write_tensors

KIND = "stylegan2"  # the header entry of a converted file
MAX_DEPTH = 8  # of nested networks; NVIDIA's have 4


def read_stylegan2(path: str | Path) -> tuple[StyleSettings, dict[str, Tensor]]:
    """Read settings and float32 tensors of the averaged generator in a pickle of StyleGAN2-ADA.

    The generator is "G_ema"; its tensors get the names of `StyleGenerator`. Also reads StyleGAN2
    networks of the StyleGAN3 code, which have the same layout. Sizes come from the tensors' shapes;
    every tensor of the network must be there, and no other.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no file at {str(path)!r}: expected a StyleGAN2 pickle")
    try:
        parts = _parts(_generator(read_inert(path)))
        settings, tensors = _translated(parts, dict(_tensors(parts)))
    except CheckpointError as error:
        raise CheckpointError(f"{path.name} is not a readable StyleGAN2: {error}") from None
    # What the reader raises for truncated or changed bytes.
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path.name} is damaged, truncated or no pickle: {type(error).__name__}; give a "
            "StyleGAN2 pickle as NVIDIA publishes them"
        ) from error
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{path.name} cannot be used: {len(broken)} of its tensors hold NaN or infinity "
            f"({_few(broken)})"
        )
    return settings, tensors


def _generator(content: Any) -> Network:
    if not isinstance(content, dict):
        refuse(f"expected a dict with a network G_ema, got a {type(content).__name__}")
    if not isinstance(network := content.get("G_ema"), Network):
        names = _few(sorted(map(str, content)))
        refuse(f"expected a dict with a network G_ema, got a dict of {names}")
    return network


def _parts(network: Network) -> dict[str, Network]:
    """Return a network and all inside it by dotted names; the network's own is empty."""
    parts, left, seen = {}, [("", network)], set()
    while left:
        name, part = left.pop()
        # A network inside itself would never end.
        if not isinstance(part, Network) or id(part) in seen or name.count(".") >= MAX_DEPTH:
            refuse(
                f"its part {shown(name)} is no network, in two places at once, or nested too deep"
            )
        seen.add(id(part))
        parts[name] = part
        inner = part.entries("_modules").items()
        left += [(f"{name}.{child}".lstrip("."), network) for child, network in inner]
    return parts


def _tensors(parts: dict[str, Network]) -> Iterator[tuple[str, Stored]]:
    for part, network in parts.items():
        for name, value in (network.entries("_parameters") | network.entries("_buffers")).items():
            if not isinstance(value, Stored):
                refuse(f"{shown(name)} in {shown(part)} is no tensor")
            yield f"{part}.{name}".lstrip("."), value


def _translated(
    parts: dict[str, Network], stored: dict[str, Stored]
) -> tuple[StyleSettings, dict[str, Tensor]]:
    """Check everything against our network before any tensor is created."""
    settings = _settings(parts, {name: value.shape for name, value in stored.items()})
    with torch.device("meta"):  # shapes without memory
        own = StyleGenerator(settings).state_dict()
    theirs = {official_name(name, settings): name for name in own}
    filters = [name for name in stored if name.endswith(".resample_filter")]
    extra = [name for name in stored if name not in theirs and name not in filters]
    missing = [name for name in theirs if name not in stored]
    shapes = [
        f"{name} {stored[name].shape} for {tuple(own[theirs[name]].shape)}"
        for name in theirs
        if name in stored and stored[name].shape != tuple(own[theirs[name]].shape)
    ]
    problems = [(missing, "missing"), (extra, "unexpected"), (shapes, "of another shape")]
    if lines := [f"{len(some)} tensors {what} ({_few(some)})" for some, what in problems if some]:
        refuse(", ".join(lines))
    _check_layers(parts, settings)
    taps = torch.tensor(TAPS, dtype=torch.float32)
    expected = torch.outer(taps, taps) / taps.sum() ** 2
    for name in filters:
        value = stored[name]
        if value.shape != expected.shape or not torch.allclose(value.tensor(), expected):
            refuse(f"{shown(name)} is not the filter {list(TAPS)}")
    return settings, {theirs[name]: stored[name].tensor() for name in theirs}


def official_name(name: str, settings: StyleSettings) -> str:
    """Return NVIDIA's name for a tensor of `StyleGenerator`.

    "synthesis.blocks.1.conv0.weight" is "synthesis.b8.conv0.weight".
    """
    if name == "synthesis.const":
        return "synthesis.b4.const"
    name = re.sub(r"^mapping\.layers\.(\d+)", r"mapping.fc\1", name)
    block = re.match(r"synthesis\.blocks\.(\d+)", name)
    return f"synthesis.b{settings.sizes[int(block[1])]}{name[block.end() :]}" if block else name


def _settings(parts: dict[str, Network], shapes: dict[str, tuple[int, ...]]) -> StyleSettings:
    """Derive the settings of a network from its tensors' shapes."""
    if "synthesis.b4.const" not in shapes or "mapping.fc0.weight" not in shapes:
        kind = f"its tensors are {_few(list(shapes))}"
        if "synthesis.input" in parts:
            kind = "it looks like StyleGAN3"
        refuse(f"its generator has no synthesis.b4.const or no mapping.fc0.weight; {kind}")
    if "mapping.embed" in parts:
        refuse("its generator is class-conditional, and only unconditional ones are supported")

    def size(name: str, axis: int) -> int:
        if len(shapes.get(name, ())) <= axis:
            refuse(f"{name} is missing or no tensor of {axis + 1} axes")
        return shapes[name][axis]

    resolution = max(
        int(block[1]) for name in shapes if (block := re.match(r"synthesis\.b(\d{1,5})\.", name))
    )
    last = f"synthesis.b{resolution}"
    conv = parts.get(f"{last}.conv1")
    clamp = conv.state.get("conv_clamp") if conv else None  # the one setting not seen in a shape
    if clamp is not None and type(clamp) not in (int, float):
        refuse(f"conv_clamp of {last}.conv1 is a {type(clamp).__name__}, not a number")
    sizes: dict[str, Any] = {
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
        return StyleSettings(**sizes)
    except ConfigError as error:
        refuse(f"its sizes are not those of a StyleGAN2 ({error})")


def _check_layers(parts: dict[str, Network], settings: StyleSettings) -> None:
    """Refuse other activations, clamps and learning rates, which shapes do not show.

    With them the same tensors would give other images.
    """
    expected: dict[str, dict[str, Any]] = {
        r"mapping\.fc\d+": {"activation": "lrelu", "bias_gain": RATE},
        r"synthesis\.b\d+\.conv\d": {"activation": "lrelu", "conv_clamp": settings.clamp},
        r"synthesis\.b\d+\.torgb": {"conv_clamp": settings.clamp},
    }
    for pattern, values in expected.items():
        for name, part in parts.items():
            for attribute, value in values.items():
                if re.fullmatch(pattern, name) and part.state.get(attribute) != value:
                    refuse(f"expected {attribute} {value} of {name}, got another")


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (", ..." if len(names) > 3 else "")


def convert_stylegan2(
    source: str | Path, out: str | Path, *, force: bool = False
) -> StyleGenerator:
    """Write the averaged generator of a StyleGAN2 pickle as safetensors, and read it back.

    The settings are in the header.
    """
    out = Path(out)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists: choose another name, or replace it with --force")
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out.name}: no folder at {str(out.parent)!r}")
    settings, tensors = read_stylegan2(source)
    try:
        with full_disk_reported(out.parent):
            write_tensors(out, tensors, {KIND: asdict(settings)})
    except OSError as error:
        raise ConfigError(
            f"cannot write {out} ({error.strerror}): choose a file in a writable folder"
        ) from error
    return load_generator(out)


def load_generator(path: str | Path) -> StyleGenerator:
    """Load the generator from a file of `convert_stylegan2`, in evaluation mode.

    Every tensor must be there, and no other.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"no file at {str(path)!r}: make one with frostglass convert stylegan2"
        )
    try:
        with safe_open(path, framework="pt") as file:
            settings = StyleSettings(**json.loads((file.metadata() or {})["values"])[KIND])
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name} is not a readable safetensors file ({error}): convert it again"
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} has no StyleGAN2 settings in its header: convert it again, or if it is a "
            "prior of ours, load it with prior.name = 'pretrained'"
        ) from error
    with torch.device("meta"), within_file(path.name, shapes):  # without memory first
        StyleGenerator(settings)
    with seeded(0, "load_generator"):  # replaced by the file's weights below
        generator = StyleGenerator(settings)
    load_weights(generator, path)
    return generator.eval()
