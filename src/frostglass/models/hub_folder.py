"""Networks in folders of the Hugging Face Hub, as timm and transformers write them; local only."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.core.limits import within_file
from frostglass.core.special_files import refuse_special
from frostglass.core.types import Shape
from frostglass.models import checkpoint
from frostglass.models.base import MODEL_ERRORS, Preprocess, first_line
from frostglass.models.build import build
from frostglass.models.checkpoint import DESCRIPTION, load_target, load_weights
from frostglass.models.weight_files import shapes_in

HUB = "hf"
CONFIG, WEIGHTS, PREPROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"


OWN = (DESCRIPTION, checkpoint.WEIGHTS)
Rebuild = Callable[[dict[str, Any]], nn.Module]


class Logits(nn.Module):
    """A classifier of transformers that returns its logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(pixel_values=images).logits


def hub_files(place: str) -> list[Path]:
    """List the files that a network in a folder is read from."""
    folder = _folder(place)
    names = (CONFIG, WEIGHTS, PREPROCESSOR, *OWN)
    return [folder / name for name in names if (folder / name).is_file()]


def hub_size(place: str) -> int | None:
    """Return the pixels a side that the folder states, if it does."""
    folder = _folder(place)
    if (folder / OWN[0]).is_file():
        sides = json.loads((folder / OWN[0]).read_text(encoding="utf-8")).get("image_shape")
        return sides[-1] if sides else None
    config = _config(folder)
    shape = config.get("pretrained_cfg", {}).get("input_size") or [config.get("image_size")]
    return int(shape[-1]) if isinstance(shape[-1], int) else None


def read_hub_folder(place: str, image_shape: Shape, rebuild: Rebuild | None = None) -> nn.Module:
    """Read the network of a folder with config.json and model.safetensors, in evaluation mode.

    A folder that `frostglass export` wrote is read with `rebuild`, which builds its network. The
    mean and std that the folder states are applied to images in [0, 1]. No code of the folder
    is run, and nothing is downloaded.
    """
    folder = _folder(place)
    if rebuild and (folder / OWN[0]).is_file():
        return load_target(folder, rebuild).module
    config = _config(folder)
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"no {WEIGHTS} in {folder}: other files of weights are pickles. Save the network with "
            "safetensors (save_pretrained does)"
        )
    refuse_special(folder / WEIGHTS)
    if "architecture" in config:
        network = _of_timm(folder, config, image_shape)
    elif "architectures" in config:
        network = _of_transformers(folder, config)
    else:
        raise ConfigError(
            f"{folder / CONFIG} names no network: expected architecture (timm) or architectures "
            "(transformers)"
        )
    return network.float().eval()


def _folder(place: str) -> Path:
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    raise ConfigError(
        f"no folder at {place}: nothing is downloaded here. Get the files with `hf download "
        f"{place} --local-dir DIR` where there is a network, and name {HUB}:DIR"
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        refuse_special(folder / CONFIG)
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no {CONFIG} in {folder}: expected a folder of the Hub") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("pretrained_cfg", {}), dict):
        raise ConfigError(f"{folder / CONFIG} is not the description of a network")
    return content


def _of_timm(folder: Path, config: dict[str, Any], image_shape: Shape) -> nn.Module:
    stated = config.get("pretrained_cfg", {})
    classes = config.get("num_classes", stated.get("num_classes"))
    options = config.get("model_args") or {}
    if not isinstance(classes, int) or not isinstance(options, dict):
        raise ConfigError(f"{folder / CONFIG}: expected num_classes and model_args of timm")
    try:
        with within_file(folder / CONFIG, shapes_in(folder / WEIGHTS)):
            network = build(
                f"timm:{config['architecture']}",
                classes=classes,
                image_shape=image_shape,
                mean=stated.get("mean"),
                std=stated.get("std"),
                seed=0,
                **options,
            )
    except TypeError as error:
        raise ConfigError(f"{folder / CONFIG}: {first_line(error)}") from error
    load_weights(network, folder / WEIGHTS)
    return network


def _of_transformers(folder: Path, config: dict[str, Any]) -> nn.Module:
    if "auto_map" in config:
        raise ConfigError(
            f"{folder} needs code of its own (auto_map), and none is run: give the network as "
            "MODULE:FUNCTION"
        )
    try:
        from transformers import AutoModelForImageClassification
    except ImportError as error:
        raise ConfigError(
            f"{folder} was written by transformers, which is not installed: install it with "
            "`pip install transformers`"
        ) from error
    how: Any = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    try:
        with within_file(folder / CONFIG, shapes_in(folder / WEIGHTS)):
            network, report = AutoModelForImageClassification.from_pretrained(
                folder, output_loading_info=True, **how
            )
    except CheckpointError:
        raise
    except (*MODEL_ERRORS, OSError) as error:
        raise ModelError(f"transformers cannot read {folder}: {first_line(error)}") from error
    if wrong := [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]:
        raise CheckpointError(
            f"{WEIGHTS} in {folder} does not fit its network: {len(wrong)} tensors are missing, "
            f"unknown or of another shape, such as {wrong[0]}"
        )
    module = Logits(network)
    mean, std = _normalisation(folder)
    return Preprocess(module, mean, std) if mean and std else module


def _normalisation(folder: Path) -> tuple[list[float] | None, list[float] | None]:
    """Return the mean and std that transformers' preprocessor of the folder applies."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return None, None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not values.get("do_normalize", True):
            return None, None
        mean, std = ([float(each) for each in values[name]] for name in ("image_mean", "image_std"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    return mean, std
