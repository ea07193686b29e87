"""Build the network that a training starts from, and check it against the defenses."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Shape, Target
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, TrainingProgress, TrainingSize
from frostglass.defenses.base import defenses as registry
from frostglass.models.answers import order_layer, read_whole
from frostglass.models.base import Preprocess
from frostglass.models.build import build
from frostglass.models.checkpoint import body, load_body, read_body
from frostglass.models.cut import cut
from frostglass.models.taps import find_head, find_taps
from frostglass.runtime.device import device_of
from frostglass.training.settings import Training


def untrained(
    config: Training,
    classes: tuple[str, ...],
    image_shape: Shape,
    defenses: Sequence[Defense],
    *,
    seed: int,
    start: Target | str | None = None,
) -> Target:
    """Build the network a training starts from, with the defenses' changes; fixed by the seed.

    `start` fills all but the head: the target of the first stage, or a checkpoint file.
    """
    module = _network(config, len(classes), image_shape, seed=seed)
    order = order_layer(module)
    plain = Target(
        module=module,
        classes=classes,
        image_shape=image_shape,
        head=order or find_head(module, image_shape),
        # Of the plain network: replaced heads have none, and of one that is asked nothing is read.
        taps=() if order else find_taps(module, image_shape),
        attributes=bool(config.attributes),
        cut=cut(module, config.cut, image_shape).tap if config.cut else "",
    )
    if isinstance(start, Target):
        plain = compose.prepare(compose.during_stage(defenses), plain, seed=seed)
        if device_of(start.module).type != "meta":  # a dry run has no content to copy
            load_body(plain.module, plain.head, body(start.module, start.head))
    elif start is not None:
        tensors = read_body(plain.module, plain.head, start, config.start_parts)
        load_body(plain.module, plain.head, tensors, config.start_parts)
    return compose.prepare(defenses, plain, seed=seed)


def _network(config: Training, classes: int, image_shape: Shape, *, seed: int) -> nn.Module:
    """Build an untrained network, or read a given one that is whole."""
    if config.weights and config.whole:
        network = read_whole(config.weights, classes, image_shape, config.endpoint, rebuild_network)
        if config.mean is None or config.std is None:
            return network
        return Preprocess(network, config.mean, config.std)
    return build(
        config.model,
        classes=classes,
        image_shape=image_shape,
        mean=config.mean,
        std=config.std,
        seed=seed,
        **config.options,
    )


def rebuild_network(recipe: Mapping[str, Any]) -> nn.Module:
    """Build the network of a stored target from its recipe, without its weights."""
    methods = [registry.build(table) for table in recipe["defenses"]]
    classes = tuple(map(str, range(recipe["classes"])))
    config = Training(**recipe["training"])
    return untrained(config, classes, recipe["image_shape"], methods, seed=recipe["seed"]).module


def check_recipe(config: Training, defenses: Sequence[Defense]) -> None:
    """Refuse settings that no network can satisfy.

    These are defenses of identities for attributes, faster arithmetic for defenses that need the
    gradient of each image, and a training that ends before the defenses reach full strength.
    """
    if config.attributes and (
        unfit := [defense.name for defense in defenses if not defense.takes_attributes]
    ):
        raise ConfigError(
            f"{', '.join(unfit)} defends a classifier of people, and target.attributes asks for "
            "one of attributes: leave one of the two out"
        )
    separate = [defense.name for defense in defenses if defense.separates_samples()]
    if separate and (config.precision != "32" or config.compile):
        raise ConfigError(
            f"{', '.join(separate)} needs the gradient of each image, in full precision and not "
            "compiled: leave target.precision and target.compile out"
        )
    last = TrainingProgress(config.epochs - 1, config.epochs)
    weak = [defense.name for defense in defenses if not defense.at_full_strength(last)]
    if weak and not config.weights:
        raise ConfigError(
            f"no epoch of {config.epochs} is at full defense strength ({', '.join(weak)}): "
            "raise target.epochs, or let the defense begin earlier"
        )


def check_devices(devices: int, config: Training, defenses: Sequence[Defense]) -> None:
    """Refuse a training that cannot be shared by so many processes."""
    separate = [defense.name for defense in defenses if defense.separates_samples()]
    if devices > 1 and separate:
        raise ConfigError(
            f"{', '.join(separate)} needs the gradient of each image in one process, got "
            f"{devices} devices: use 1"
        )
    if config.batch < 2 * devices:
        raise ConfigError(
            f"a batch of {config.batch} images is too small for {devices} devices: raise batch to "
            f"at least {2 * devices}, or use fewer devices"
        )


def check_training(
    config: Training, target: Target, defenses: Sequence[Defense], size: TrainingSize
) -> None:
    """Refuse defenses that cannot work on a prepared network with these settings."""
    check_recipe(config, defenses)
    if not config.weights and (problems := compose.problems(defenses, target, size)):
        raise ConfigError(problems)
