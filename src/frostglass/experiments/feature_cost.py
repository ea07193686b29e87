"""What would stop a config about split models, and what it would run; nothing is computed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from frostglass.errors import ConfigError, FrostglassError
from frostglass.experiments.cost import Once, try_classifier, try_prior, try_public_people
from frostglass.experiments.features import FeatureExperiment
from frostglass.training import Training, attributes_of
from frostglass.types import Shape

Attempt = tuple[str, Callable[..., None], tuple[Any, ...]]


def feature_problems(chosen: Sequence[tuple[str, FeatureExperiment]]) -> list[str]:
    """What would stop these experiments after hours of work: data that is not there, cuts that cannot be made, networks that cannot be built."""
    found, once = [], Once()
    for _, exp in chosen:
        try:
            classes, private, _ = once(_counts, exp.data)
        except FrostglassError as error:
            found.append(f"data: {error}")
            continue
        for where, attempt, given in _attempts(exp, classes, private):
            try:
                once(attempt, *given)
            except FrostglassError as error:
                found.append(f"{where}: {error}")
    return list(dict.fromkeys(found))


def _attempts(exp: FeatureExperiment, classes: int, private: int) -> Iterator[Attempt]:
    shape: Shape = exp.data.image_shape
    records = int(private * (1 - exp.split.test - exp.split.validation))
    known = exp.data.attribute_names() if hasattr(exp.data, "attribute_names") else ()
    yield "target", _try_attributes, (exp.target.attributes, known)
    yield "target", try_classifier, (exp.target, exp.training_defenses, len(attributes_of(exp.target, known)) or 1, shape, records)
    for place, config in enumerate(exp.evaluators):
        yield f"evaluators[{place}]", try_classifier, (config, (), classes, shape, records)
    yield "data", try_public_people, (exp.data,)
    yield "judging", _try_victims, (private // max(1, classes), exp.split.test, exp.judging.pictures)
    for name in ("embedder", "perceptual"):
        if name == "embedder" or exp.needs("perceptual"):
            yield name, try_classifier, (getattr(exp, name), (), classes, shape, records)
    for section, method in (("prior", exp.prior), ("attacker_prior", exp.attacker_prior)):
        if method is not None:
            yield section, try_prior, (method, shape, 0, exp.data.counts()[2])


def _try_attributes(asked: tuple[str, ...], known: tuple[str, ...]) -> None:
    attributes_of(Training(attributes=asked), known)


def _try_victims(pictures: int, share: float, wanted: int) -> None:
    held_out = max(1, round(pictures * share))
    if held_out < wanted:
        raise ConfigError(f"pictures is {wanted}, and about {held_out} of each person's are held out: lower it, or raise split.test")


def _counts(data: Any) -> tuple[int, int, int]:
    return data.counts()


def feature_steps(chosen: Sequence[tuple[str, FeatureExperiment]]) -> list[dict[str, str]]:
    """What the experiments would run, each thing once, in words."""
    rows: dict[str, dict[str, str]] = {}
    for label, exp in chosen:
        people = min(exp.judging.identities or exp.data.counts()[0], exp.data.counts()[0])
        victims = people * exp.judging.pictures
        trained = exp.training_defenses
        steps = [
            ("target", f"{exp.target}{trained}", f"{exp.target.model} cut at {exp.target.cut}: {exp.target.epochs} epochs"),
            *(("evaluator", f"{config}", f"{config.model}: {config.epochs} epochs") for config in exp.evaluators),
            ("embedder", f"{exp.embedder}", f"{exp.embedder.model}: {exp.embedder.epochs} epochs on public people"),
            *(
                [("perceptual", f"{exp.perceptual}", f"{exp.perceptual.model}: {exp.perceptual.epochs} epochs")]
                if exp.needs("perceptual")
                else []
            ),
            *([("prior", f"{exp.prior}", exp.prior.name)] if exp.prior else []),  # type: ignore[attr-defined]
            *_protecting(exp, f"{exp.target}{exp.defenses}", victims),
            (
                "attack",
                f"{exp.target}{exp.defenses}{exp.attack}{exp.attacker_prior}",
                f"{exp.attack.name} on {victims} pictures of {people} people",
            ),
        ]
        for step, key, work in steps:
            rows.setdefault(f"{step} {key}", {"step": step, "label": label, "work": work})
    return list(rows.values())


def _protecting(exp: FeatureExperiment, key: str, victims: int) -> list[tuple[str, str, str]]:
    if exp.protection is None:
        return []
    more = getattr(exp.attack, "adapt", 0)
    asked = [("release", f"{key} victims", f"{exp.protection.name} for {victims} pictures")]
    if more:
        asked.append(("release", f"{key} {more}", f"{exp.protection.name} for {more} public pictures, for an adaptive attack"))
    return asked
