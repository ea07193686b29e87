"""The only classifier loop: it trains targets and evaluators, undefended or with any defenses."""

from collections.abc import Sequence

from frostglass.core.errors import ConfigError
from frostglass.core.types import Shape, Target
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, Size, TrainingProgress
from frostglass.models.build import build
from frostglass.models.checkpoint import body, load_body, read_body
from frostglass.models.cut import cut
from frostglass.models.taps import find_head, find_taps
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
    """The network a training run starts from, with the defenses' changes applied; the same for the same seed.

    `start` fills it, all but the head: with what the first stage trained, or from a checkpoint file.
    """
    module = build(
        config.model,
        classes=len(classes),
        image_shape=image_shape,
        mean=config.mean,
        std=config.std,
        seed=seed,
        **config.options,
    )
    # Taps are those of the plain network: what a defense puts in place of its head has none.
    head, taps = find_head(module, image_shape), find_taps(module, image_shape)
    bare = Target(
        module=module, classes=classes, image_shape=image_shape, head=head, taps=taps, attributes=bool(config.attributes),
        cut=cut(module, config.cut, image_shape).tap if config.cut else "",
    )  # fmt: skip
    if isinstance(start, Target):
        bare = compose.prepare(compose.during_stage(defenses), bare, seed=seed)
        load_body(bare.module, bare.head, body(start.module, start.head))
    elif start is not None:
        load_body(
            bare.module,
            bare.head,
            read_body(bare.module, bare.head, start, config.start_parts),
            config.start_parts,
        )
    return compose.prepare(defenses, bare, seed=seed)


def check_recipe(config: Training, defenses: Sequence[Defense]) -> None:
    """Refuse what no network can mend: defenses of people for attributes, and an end before full strength: a half-defended model."""
    if config.attributes and (
        unfit := [defense.name for defense in defenses if not defense.takes_attributes]
    ):
        raise ConfigError(
            f"{', '.join(unfit)} defends a classifier of people, and target.attributes asks for one of attributes: leave one of the two out"
        )
    weak = [
        defense.name
        for defense in defenses
        if not defense.at_full_strength(TrainingProgress(config.epochs - 1, config.epochs))
    ]
    if weak and not config.weights:
        raise ConfigError(
            f"no epoch of {config.epochs} is at full defense strength ({', '.join(weak)}): raise target.epochs, or let the defense begin earlier"
        )


def check_training(
    config: Training, target: Target, defenses: Sequence[Defense], records: int
) -> None:
    """Refuse defenses that cannot work on a prepared network with this recipe, before anything is computed."""
    check_recipe(config, defenses)
    if not config.weights and (
        found := compose.problems(defenses, target, Size(records, config.batch, config.epochs))
    ):
        raise ConfigError(found)
