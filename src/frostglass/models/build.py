"""Build networks by name: built-ins, `timm:NAME`, `torchvision:NAME`, `package.module:function`.

All weights are initialised from a seed. `load_weights` loads trained ones.
"""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from frostglass.core.errors import ConfigError, FrostglassError, ModelError
from frostglass.core.types import Shape
from frostglass.models.base import (
    MODEL_ERRORS,
    Preprocess,
    check_positive,
    first_line,
    models,
    noise_images,
    probe,
    refuse_probabilities,
)
from frostglass.runtime.seeding import seeded

# Options of timm and torchvision that contradict the arguments of `build`, or download weights.
RESERVED = {
    "num_classes": "set `classes`",
    "in_chans": "set `image_shape`",
    **dict.fromkeys(
        ("pretrained", "pretrained_cfg", "checkpoint_path", "weights"),
        "load weights with load_weights",
    ),
}


def build(
    name: str,
    *,
    classes: int,
    image_shape: Shape,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int,
    **options: Any,
) -> nn.Module:
    """Build a network that maps images in [0, 1] of `image_shape` to `classes` logits.

    The seed decides its weights. With `mean` and `std` (one value per channel) it normalises its
    input first. It is run once on noise, so that a size it cannot take is an error here and not
    during training.

    Args:
        name: a built-in, `timm:NAME`, `torchvision:NAME`, or `package.module:function`.
        options: other options of the network, such as `width`. Your own function is called with
            classes, image_shape and these.
    """
    _check_arguments(name, classes, image_shape, mean, std)
    size = "x".join(map(str, image_shape))
    with seeded(seed, "init", name):
        try:
            net = _builder(name)(classes=classes, image_shape=image_shape, **options)
        except FrostglassError:
            raise
        except MODEL_ERRORS as error:
            raise ModelError(
                f"{name} cannot be built for {size} images: {first_line(error)}{_size_hint(name)}"
            ) from error
    if not isinstance(net, nn.Module):
        raise ModelError(f"{name} returned a {type(net).__name__}: expected a torch.nn.Module")
    module = net if mean is None or std is None else Preprocess(net, mean, std)
    try:
        logits = probe(module, noise_images(module, image_shape, 1))
    except ModelError as error:
        raise ModelError(f"{name}: {error}{_size_hint(name)}") from error
    output = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if output != (1, classes):
        raise ModelError(
            f"{name} returns {output} for one {size} image: expected logits of shape (1, {classes})"
        )
    if not logits.is_meta:
        refuse_probabilities(name, logits)
    return module


def _check_arguments(
    name: str,
    classes: int,
    image_shape: Shape,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> None:
    if len(image_shape) != 3:
        raise ConfigError(
            f"{name}: image_shape must be (channels, height, width), got {tuple(image_shape)}"
        )
    channels, height, width = image_shape
    check_positive(name, classes=classes, channels=channels, height=height, width=width)
    if (mean is None) != (std is None):
        raise ConfigError(f"{name}: give both mean and std, or neither")
    if mean is not None and std is not None:
        if not len(mean) == len(std) == channels:
            raise ConfigError(
                f"{name}: {channels} channels need as many values, got {len(mean)} of mean and "
                f"{len(std)} of std"
            )
        if min(std) <= 0:
            raise ConfigError(f"{name}: std must be above zero, got {min(std)}")


def _builder(name: str) -> Callable[..., nn.Module]:
    library, colon, function = name.partition(":")
    if not colon:
        return _checked(name, _built_in(name))
    if library == "timm":
        return lambda **options: _timm(function, **options)
    if library == "torchvision":
        return lambda **options: _torchvision(function, **options)
    return _checked(name, users_factory(library, function))


def _built_in(name: str) -> Callable[..., nn.Module]:
    if name not in models.names():
        import timm  # slow to import, and needed only for a better hint
        from torchvision import models as zoo

        for library, known in (
            ("timm", timm.list_models()),
            ("torchvision", zoo.list_models(module=zoo)),
        ):
            if name in known:
                raise ConfigError(
                    f"no model named {name!r}: did you mean '{library}:{name}'? built in: "
                    f"{', '.join(models.names())}"
                )
    return models.get(name)


def users_factory(package: str, function: str) -> Callable[..., nn.Module]:
    """Import a user's function that builds a network."""
    try:
        module = importlib.import_module(package)
    except (*MODEL_ERRORS, ImportError, SyntaxError, NameError, OSError) as error:
        raise ConfigError(
            f"cannot import {package!r} for '{package}:{function}': {first_line(error)}"
        ) from error
    factory = getattr(module, function, None)
    if not callable(factory):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise ConfigError(f"no function {function!r} in {package!r}{_closest(function, known)}")
    return factory


def source(name: str) -> str | None:
    """Return the file of a user's network; None for networks of this package and of libraries."""
    package, colon, _ = name.partition(":")
    if not colon or package in ("timm", "torchvision"):
        return None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # reported when the network is built
        return None
    return spec.origin if spec and spec.has_location else None


def _checked(name: str, factory: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make the factory refuse arguments that do not match its signature before it runs."""

    def make(**options: Any) -> nn.Module:
        signature = inspect.signature(factory)
        try:
            signature.bind(**options)
        except TypeError as error:
            known = ", ".join(signature.parameters) or "nothing"
            raise ConfigError(f"{name}: {first_line(error)}; it takes {known}") from error
        return factory(**options)

    return make


def _timm(name: str, *, classes: int, image_shape: Shape, **options: Any) -> nn.Module:
    import timm

    _refuse_reserved(f"timm:{name}", options)
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model named {name!r}{_closest(name, timm.list_models())}")
    channels, height, width = image_shape
    # Convolutional networks take any size and have no `img_size`; networks whose size is fixed at
    # construction say so in their configuration.
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        options = {"img_size": height if height == width else (height, width), **options}
    return _with_options(
        f"timm:{name}", timm.create_model, name, num_classes=classes, in_chans=channels, **options
    )


def _torchvision(name: str, *, classes: int, image_shape: Shape, **options: Any) -> nn.Module:
    from torchvision import models as zoo

    _refuse_reserved(f"torchvision:{name}", options)
    known = zoo.list_models(module=zoo)
    if name not in known:
        raise ConfigError(f"torchvision has no classifier named {name!r}{_closest(name, known)}")
    channels, height, width = image_shape
    if channels != 3:
        raise ModelError(
            f"torchvision:{name} takes 3 channels and not {channels}: use a built-in or a timm "
            "network, or load colour images"
        )
    # Otherwise they return a tuple in training, and their old initialiser warns.
    if name in ("inception_v3", "googlenet"):
        options = {"aux_logits": False, "init_weights": True, **options}
    if name.startswith("vit_"):
        if height != width:
            raise ModelError(f"torchvision:{name} takes square images and not {height}x{width}")
        options = {"image_size": height, **options}
    if name.startswith("maxvit"):
        options = {"input_size": (height, width), **options}
    return _with_options(
        f"torchvision:{name}", zoo.get_model, name, weights=None, num_classes=classes, **options
    )


def _with_options(
    name: str, create: Callable[..., nn.Module], *args: Any, **options: Any
) -> nn.Module:
    try:
        return create(*args, **options)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise ConfigError(f"{name} refuses an option: {first_line(error)}") from error


def _refuse_reserved(name: str, options: dict[str, Any]) -> None:
    problems = [
        f"{name} does not take {option!r} here: {RESERVED[option]}"
        for option in options
        if option in RESERVED
    ]
    if problems:
        raise ConfigError(problems)


def _closest(name: str, known: Iterable[str]) -> str:
    """Suggest similar names, where a list of all known ones would be too long."""
    close = " or ".join(map(repr, difflib.get_close_matches(name, known, n=3, cutoff=0.5)))
    return f": did you mean {close}?" if close else ": no known name is similar"


def _size_hint(name: str) -> str:
    """Explain the sizes of two families of windowed transformers, which are hard to guess."""
    if name.startswith("timm:maxvit"):
        return "; MaxViT's windows must divide the size at every stage: use 64, 128 or 224"
    if name.startswith("timm:swin"):
        return (
            "; Swin needs 64 px or more and windows that divide its maps: at 112 or 224 px set "
            "window_size=7"
        )
    return ""
