"""What would stop a config about split models; nothing is computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from frostglass.attacks.features._learned import Learned
from frostglass.attacks.features.base import FeatureAttack
from frostglass.audit.config import Fractions
from frostglass.audit.features import FeatureExperiment
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, FrostglassError
from frostglass.core.types import Halves, Shape
from frostglass.core.views import FeatureView
from frostglass.defenses.base import Defense
from frostglass.models.base import probe
from frostglass.models.cut import halves
from frostglass.networks.amortizer import Amortizer
from frostglass.plan.cost import (
    NOBODY,
    Once,
    counts_of,
    offered,
    on_public_people,
    try_classifier,
    try_prior,
    try_public_people,
)
from frostglass.priors.base import PriorMethod
from frostglass.runtime.seeding import seeded
from frostglass.training.build import untrained
from frostglass.training.settings import Training, attributes_of

Attempt = tuple[str, Callable[..., None], tuple[Any, ...]]


def feature_problems(
    chosen: Sequence[tuple[str, FeatureExperiment]], *, shipped: bool = False
) -> list[str]:
    """What would stop these experiments after hours of work: data that is not there, cuts that cannot be made, networks that cannot be built.

    With `shipped` it is what would stop their client and server from being made: nobody attacks them, and nobody judges that.
    """
    found, once = [], Once()
    for _, exp in chosen:
        try:
            classes, *_ = once(counts_of, exp.data)
            known, constant = once(known_attributes, exp.data)
        except FrostglassError as error:
            found.append(f"data: {error}")
            continue
        if not classes:
            found.append(NOBODY)
            continue
        wrong: set[str] = set()
        for where, attempt, given in _attempts(exp, once, known, constant, shipped=shipped):
            if where in ("defenses", "attack", "amortizer") and wrong & {
                "target",
                "prior",
                "attacker_prior",
            }:
                continue  # whether something would fit what cannot be is no question
            try:
                once(attempt, *given)
            except FrostglassError as error:
                found += [
                    f"{where}: {problem}" for problem in getattr(error, "problems", [str(error)])
                ]
                wrong.add(where)
    return list(dict.fromkeys(found))


def _attempts(
    exp: FeatureExperiment,
    once: Once,
    known: tuple[str, ...],
    constant: tuple[str, ...],
    *,
    shipped: bool,
) -> Iterator[Attempt]:
    shape: Shape = exp.data.image_shape
    classes, private, public = once(counts_of, exp.data)
    records = int(private * (1 - exp.split.test - exp.split.validation))
    yield "target", _try_attributes, (exp.target.attributes, known, constant)
    told = len(known if exp.target.attributes == ("all",) else exp.target.attributes) or 1
    yield "target", try_classifier, (exp.target, exp.training_defenses, told, shape, records)
    yield "judging", _try_people, (classes, exp.judging.identities)
    yield "judging", _try_victims, (private // classes, exp.split, exp.judging.pictures)
    if not shipped:
        yield (
            "data",
            _try_two_photos,
            (
                exp.data.most_of_one() if hasattr(exp.data, "most_of_one") else private // classes,
                exp.split,
            ),
        )
    for place, config in enumerate(() if shipped else exp.evaluators):
        yield f"evaluators[{place}]", try_classifier, (config, (), classes, shape, records)
    judges = _taught_by_the_public(exp, shipped=shipped)
    if judges or on_public_people(exp.target, exp.training_defenses):
        yield "data", try_public_people, (exp.data,)
    if on_public_people(exp.target, exp.training_defenses):
        yield "data", _try_public_attributes, (exp.data,)
    for name in judges:
        yield name, try_classifier, (getattr(exp, name), (), classes, shape, records)
    protector = exp.prior if exp.protection and "prior" in exp.protection.needs else None
    for section, method in (
        {"prior": protector}.items()
        if shipped
        else {"prior": exp.prior, "attacker_prior": exp.attacker_prior}.items()
    ):
        if method is not None:
            yield section, try_prior, (method, shape, 0, public)
            yield section, _try_latents_alone, (once, method, shape)
    victims = exp.judging.pictures * min(exp.judging.identities or classes, classes)
    if exp.protection:
        yield "defenses", _try_release, (once, exp.protection, protector, shape, victims)
    if exp.protection and "amortizer" in exp.protection.needs:
        yield (
            "amortizer",
            _try_amortizer,
            (once, exp.amortizer, exp.target, known, protector, shape),
        )
    if not shipped:
        attackers = (exp.attacker_prior or exp.prior) if "prior" in exp.attack.needs else None
        yield "attack", _try_attack, (once, exp.attack, exp.target, known, attackers, shape, public)
        if "amortizer" in exp.attack.needs:
            yield (
                "amortizer",
                _try_amortizer,
                (once, exp.amortizer, exp.target, known, attackers, shape),
            )


def _taught_by_the_public(exp: FeatureExperiment, *, shipped: bool) -> list[str]:
    """The networks besides the target that are trained on public people."""
    if shipped:
        return (
            ["perceptual"]
            if any("perceptual" in defense.needs for defense in exp.training_defenses)
            else []
        )
    return ["embedder", *(["perceptual"] if exp.needs("perceptual") else [])]


def known_attributes(data: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The attributes of a dataset, and those of them that are known to be the same for all private pictures."""
    names = data.attribute_names() if hasattr(data, "attribute_names") else ()
    return names, data.constant_attributes() if hasattr(data, "constant_attributes") else ()


def _try_attributes(
    asked: tuple[str, ...], known: tuple[str, ...], constant: tuple[str, ...]
) -> None:
    chosen = attributes_of(Training(attributes=asked), known)
    if chosen and set(chosen) <= set(constant):
        raise ConfigError(
            f"attributes: all private pictures have the same {', '.join(chosen)}, so nothing can be learned or measured: name one that varies, "
            "or mend the table in data.attributes"
        )


def _try_people(people: int, wanted: int | None) -> None:
    if wanted is not None and wanted > people:
        raise ConfigError(
            f"identities is {wanted}, and there are {people} private people: lower it, or leave it out to attack all of them"
        )


def _try_victims(pictures: int, split: Fractions, wanted: int) -> None:
    if (held_out := max(1, round(pictures * split.test))) < wanted:
        raise ConfigError(
            f"pictures is {wanted}, and about {held_out} of each person's are held out: lower it, or raise split.test"
        )


def _try_two_photos(pictures: int, split: Fractions) -> None:
    held_out = sum(max(1, round(pictures * share)) for share in (split.test, split.validation))
    if pictures - held_out < 2:
        raise ConfigError(
            f"nobody has more than {pictures} pictures, of which {held_out} are held out, and two photos of one person that are not must be compared to tell what "
            "a similarity means: give more pictures of a person"
        )


def _try_public_attributes(data: Any) -> None:
    if hasattr(data, "describes_public") and not data.describes_public():
        raise ConfigError(
            f'{data.attributes} says nothing of public pictures, and a training that begins on public people (target.start = "public") learns their attributes '
            "first: add a line for each public picture, or leave target.start out"
        )


def _try_latents_alone(once: Once, method: Any, shape: Shape) -> None:
    if condition := once(offered, method, shape).condition:
        raise ConfigError(
            f"{method.name} makes pictures of a given {condition}, and a feature comes without one: use another, such as wgan"
        )


def _try_release(
    once: Once, protection: Defense, method: PriorMethod | None, shape: Shape, pictures: int
) -> None:
    if found := protection.misfits(
        shape, pictures, None if method is None else once(offered, method, shape)
    ):
        raise ConfigError(found)


def _try_amortizer(
    once: Once,
    config: Amortizer,
    target: Training,
    known: tuple[str, ...],
    method: PriorMethod,
    shape: Shape,
) -> None:
    both = once(_halves, target, known, shape)
    with seeded(0, "cost"):
        network = config.network(both.feature_shape, once(offered, method, shape).latent)
    probe(network, torch.zeros(2, *both.feature_shape))


def _try_attack(
    once: Once,
    attack: FeatureAttack,
    target: Training,
    known: tuple[str, ...],
    method: PriorMethod | None,
    shape: Shape,
    public: int,
) -> None:
    """Whether the attack has what it needs, and whether what it learns with can be built; told before anything is made."""
    both, there = (
        once(_halves, target, known, shape),
        nn.Identity(),
    )  # where a network will be, this one stands
    view = FeatureView(both, torch.zeros(2, *both.feature_shape), attack.granted)
    prior = method and once(offered, method, shape)
    assets = Assets(range(public), prior, there, there, there)  # type: ignore[arg-type]
    if found := attack.problems(view, assets):
        raise ConfigError(found)
    if isinstance(attack.lesson, Learned):
        with seeded(0, "cost"):
            _, network = attack.lesson.untaught(view, assets, (1,))
        probe(network, torch.zeros(2, *both.feature_shape))


def _halves(config: Training, known: tuple[str, ...], shape: Shape) -> Halves:
    return halves(
        untrained(
            replace(config, weights=None, start=None, start_parts=()),
            attributes_of(config, known),
            shape,
            (),
            seed=0,
        )
    )
