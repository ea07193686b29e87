"""The whole program: split, target, exposure, assets, attack, scores, and controls beside them."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from frostglass.auditing.agreement import prior_agreement
from frostglass.auditing.controls import is_broken, verdict
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.feature_facts import feature_facts
from frostglass.auditing.given import is_given, naming, refuse_target
from frostglass.auditing.networks import classifier, evaluator, public_classifier, trained_prior
from frostglass.auditing.private_facts import attribute_of_people
from frostglass.auditing.products import (
    Device,
    Exposure,
    FeatureExposure,
    ImageBatch,
    ModelExposure,
)
from frostglass.auditing.results import Audit, Products, Trial
from frostglass.auditing.steps import (
    AMORTIZER,
    ATTACK,
    PRETRAIN,
    PRIOR_ONLY,
    SCORES,
    SPLIT,
    VERIFIER,
)
from frostglass.auditing.victims import attacked_people, victims_of
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.evaluators.embedder import Embedder, usable
from frostglass.evaluators.verifier import Verifier
from frostglass.metrics.base import Rows
from frostglass.metrics.face import reference_similarities
from frostglass.models.cut import check_later
from frostglass.priors.base import check_unseen
from frostglass.priors.context import hints_of
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import seed_for
from frostglass.store.executor import together
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store
from frostglass.training.settings import Training


def audit(experiment: Experiment, store: Store) -> Audit:
    """Run one experiment, or what the store lacks of it, and assess it by its controls."""
    made = produce(experiment, store)
    experiment = experiment.limited(len(made.split.classes))  # as it was attacked
    exposure, references = made.trial.exposure, None
    facts: Mapping[str, Any] = prior_agreement(made, store)
    if isinstance(exposure, FeatureExposure) and made.embedder and made.more_draws:
        references = reference_similarities(made.embedder, made.split.train, made.split.public)
        facts = feature_facts(
            exposure, made.split, made.embedder, made.trial.reconstructions,
            (made.trial.baseline, made.more_draws),
        )  # fmt: skip
    controls = verdict(
        experiment,
        made.trial,
        made.control,
        evaluators=tuple(zip(made.evaluators, made.verifiers, strict=True)),
        references=references,
        public_known=bool(made.split.public.names),
    )
    return Audit(**vars(made), experiment=experiment, controls=controls, facts=facts)


def produce(exp: Experiment, store: Store) -> Products:
    """Run all steps of an experiment, in order.

    Private images are reachable from training, `expose`, scoring, and the examination of given
    networks only. Two exceptions say so by their names: a prior that completes hints is given a
    degraded image of each person, and the attack `known` one attribute of each person.
    """
    exp = replace(exp, evaluators=tuple(usable(exp.evaluators, exp.data)))
    split = split_of(exp, store)
    exp = exp.limited(len(split.classes))
    victims = victims_of(exp, split) if exp.surface == "features" else None
    given = _examine_given(exp, store, split)

    embed = partial(_embedder, exp, store, split)

    def attacked(exposed: Experiment) -> _Attacked:
        exposure = expose(exposed, store, split, victims)
        if exposed is exp and not exp.target.weights:  # else compared before
            _refuse_target(given, exposure.target, split)
        return _attack(exp, store, split, exposure, embed())

    def scored(found: _Attacked) -> Trial:
        return _score(exp, store, split, found, judging, embedder)

    undefended = replace(exp, target=exp.target.retrained(), defenses=())
    wanted = [exp, undefended] if exp.judging.positive_control is True else [exp]
    judging, embedder, *found = together(
        partial(_evaluators, exp, store, split, given),
        embed,
        *(partial(attacked, each) for each in wanted),
    )
    main, *control = together(*(partial(scored, each) for each in found))
    if exp.judging.positive_control == "if_needed":
        dry = store.device.type == "meta"  # then the work of the other case is counted
        broken = not dry and is_broken(exp, main, tuple(zip(*judging, strict=True)))
        control = [main if broken else scored(attacked(undefended))]
    more_draws = None
    if exp.surface == "features":
        more_draws = _second_baseline(exp, store, split, main.prior)
    return Products(
        split=split,
        evaluators=judging[0],
        verifiers=judging[1],
        embedder=embedder,
        trial=main,
        control=control[0] if control else None,
        more_draws=more_draws,
    )


def split_of(exp: Experiment, store: Store) -> Split:
    """Return the private and public images of an experiment."""
    return store.step(
        SPLIT, exp.data, fractions=exp.split, files=fingerprint(exp.data), seed=exp.seed
    )


def _evaluators(
    exp: Experiment, store: Store, split: Split, given: Mapping[int, Target]
) -> tuple[tuple[Target, ...], tuple[Verifier, ...]]:
    """Return the evaluators, and what each verifies with."""

    def one(number: int, config: Training | Embedder) -> tuple[Target, Verifier]:
        network = given.get(number) or evaluator(
            store, config, split, seed=seed_for(exp.seed, "evaluator", number)
        )
        return network, store.step(VERIFIER, None, evaluator=network, split=split, seed=0)

    pairs = together(*(partial(one, *each) for each in enumerate(exp.evaluators)))
    return tuple(network for network, _ in pairs), tuple(verifier for _, verifier in pairs)


def _embedder(exp: Experiment, store: Store, split: Split) -> Target | None:
    """Return the network that tells public people apart, where something needs it."""
    if exp.surface == "features" or exp.needs("embedder"):
        return public_classifier(store, exp.embedder, split, exp.seed, "embedder")
    return None


def expose(exp: Experiment, store: Store, split: Split, victims: Images | None) -> Exposure:
    """Return what an attacker faces: a trained model, or features a device released for victims."""
    needed = exp.protection.needs if exp.protection else frozenset()
    target = audited_target(exp, store, split)
    if victims is None:
        return ModelExposure(target)
    prior = None
    if exp.prior and "prior" in needed:
        prior = trained_prior(store, exp.prior, split, None, seed=exp.seed)
    amortizer = None
    if "amortizer" in needed:
        amortizer = store.step(AMORTIZER, exp.amortizer, target=target, prior=prior, seed=exp.seed)
    device = Device(store, target, exp.protection, prior, amortizer, exp.seed)
    batch = ImageBatch.of(victims.floats(), "victims")
    people = tuple(attacked_people(exp, len(split.classes)))
    return FeatureExposure(device, batch, people, victims, device.release(batch))


def audited_target(exp: Experiment, store: Store, split: Split) -> Target:
    """Return the target of an experiment, trained with its defenses or loaded."""
    perceptual = None
    if any("perceptual" in defense.needs for defense in exp.training_defenses):
        perceptual = public_classifier(store, exp.perceptual, split, exp.seed, "perceptual")
    with naming("target") if exp.target.weights else nullcontext():
        target = classifier(
            store, exp.audited, split, exp.training_defenses, perceptual, seed=exp.seed
        )
    if exp.target.cut and exp.moves_cut:
        check_later(target, exp.target.cut)
    return target


def _examine_given(exp: Experiment, store: Store, split: Split) -> dict[int, Target]:
    """Load and examine the networks that are read from files, before anything is trained.

    Returns the evaluators among them, by their place in the config.
    """
    for metric in exp.metrics:
        metric.check_files()
    target = audited_target(exp, store, split) if exp.target.weights else None
    if target and target.info.get("labels_only") and set(exp.attack.access) != {"labels"}:
        raise ConfigError(
            f"attack: {exp.attack.name} needs {', '.join(exp.attack.access)}, and the endpoint "
            "answers with labels alone: use brepmi, or let it return scores"
        )
    given = {}
    for number, config in enumerate(exp.evaluators):
        if is_given(config):
            with naming(f"evaluators[{number}]"):
                seed = seed_for(exp.seed, "evaluator", number)
                given[number] = evaluator(store, config, split, seed=seed)
    if exp.embedder.weights and (exp.surface == "features" or exp.needs("embedder")):
        with naming("embedder"):
            public_classifier(store, exp.embedder, split, exp.seed, "embedder")
    if target:
        _refuse_target(given, target, split)
    return given


def _refuse_target(given: Mapping[int, Target], target: Target, split: Split) -> None:
    """Refuse evaluators that are read from files and hold the target."""
    for number, network in given.items():
        with naming(f"evaluators[{number}]"):
            refuse_target(network, target, split.test)


@dataclass(frozen=True)
class _Attacked:
    """A trial before it is scored."""

    exposure: Exposure
    prior: Prior | None
    result: Reconstructions
    baseline: Reconstructions


def _attack(
    exp: Experiment, store: Store, split: Split, exposure: Exposure, embedder: Target | None
) -> _Attacked:
    """Attack what is exposed, and draw the baseline of the same prior."""
    prior = attacker_prior(exp, store, split, exposure)
    assets = attacker_assets(exp, store, split, exposure.target, prior, embedder)
    known = assets.attribute
    result, baseline = together(
        partial(_reconstruct, exp, store, split, exposure, assets),
        partial(_baseline, exp, store, split, prior, known=known, seed=exp.seed),
    )
    return _Attacked(exposure, prior, result, baseline)


def _score(
    exp: Experiment,
    store: Store,
    split: Split,
    found: _Attacked,
    judging: tuple[tuple[Target, ...], tuple[Verifier, ...]],
    embedder: Target | None,
) -> Trial:
    """Score reconstructions and prior-only draws in the same way."""
    exposure, baseline, more = found.exposure, found.baseline, None
    if any(metric.uses_draws for metric in exp.metrics):
        more = _second_baseline(exp, store, split, found.prior)

    def scores(reconstructions: Reconstructions, embeds: bool) -> Rows:
        # Draws are compared with other draws: with themselves they would look perfect.
        draws = (more, baseline) if reconstructions is baseline else (baseline, more)
        return store.step(
            SCORES,
            exp.metrics,
            reconstructions=reconstructions,
            victims=exposure.victims if isinstance(exposure, FeatureExposure) else None,
            split=split,
            evaluators=judging[0],
            verifiers=judging[1],
            embedder=embedder,
            target=exposure.target,
            embeds=embeds,
            files="".join(map(fingerprint, exp.metrics)),
            draws=draws if more else None,
            seed=exp.seed,
        )

    rows, baseline_rows = together(
        partial(scores, found.result, exp.attack.embeds), partial(scores, baseline, False)
    )
    return Trial(exposure, found.prior, found.result, baseline, rows, baseline_rows)


def _second_baseline(
    exp: Experiment, store: Store, split: Split, prior: Prior | None
) -> Reconstructions:
    """Draw other images of the prior, which the first are compared with."""
    return _baseline(exp, store, split, prior, seed=seed_for(exp.seed, "more draws"))


def _reconstruct(
    exp: Experiment, store: Store, split: Split, exposure: Exposure, assets: Assets
) -> Reconstructions:
    """Attack what is exposed, after what the attack learns from unprotected features."""
    pretrained = None
    if exp.attack.pretraining:
        known = replace(assets, prior=None, amortizer=None)
        pretrained = store.step(
            PRETRAIN, exp.attack.pretraining, target=exposure.target, assets=known, seed=exp.seed
        )
    result = store.step(
        ATTACK,
        exp.attack,
        exposure=exposure,
        assets=assets,
        people=list(attacked_people(exp, len(split.classes))),
        pretrained=pretrained,
        seed=exp.seed,
    )
    seconds = result.seconds + (pretrained.seconds if pretrained else 0.0)
    return replace(result, seconds=seconds)


def _baseline(
    exp: Experiment,
    store: Store,
    split: Split,
    prior: Prior | None,
    *,
    known: KnownAttribute | None = None,
    seed: int,
) -> Reconstructions:
    """Draw the prior-only baseline: as many images per person as the attack returns."""
    features = exp.surface == "features"
    return store.step(
        PRIOR_ONLY,
        exp.attack.kept * (exp.judging.images if features else 1),
        prior=prior,
        public=split.public if features or prior is None else None,
        people=list(attacked_people(exp, len(split.classes))),
        **({"known": known} if known else {}),
        seed=seed,
    )


def attacker_prior(exp: Experiment, store: Store, split: Split, exposure: Exposure) -> Prior | None:
    """Return the attacker's prior, trained on other people than the attacked ones."""
    if (method := exp.attacker_prior or exp.prior) is None:
        return None
    view = None
    if isinstance(exposure, ModelExposure):
        view = exposure.view(exp.attack).averaged(exp.attack.samples)
    prior = trained_prior(store, method, split, view, seed=exp.seed)
    check_unseen(prior, split.classes)
    if prior.condition == "hint":
        hints = hints_of(prior.info, split.test.first_of_each()).to(device_of(prior.generator))
        prior = replace(prior, hints=hints)
    return prior


def attacker_assets(
    exp: Experiment,
    store: Store,
    split: Split,
    target: Target,
    prior: Prior | None,
    embedder: Target | None,
) -> Assets:
    """Collect what the attack needs of the world, and nothing else."""
    needed = exp.attack.needs
    amortizer = perceptual = None
    if "amortizer" in needed:
        amortizer = store.step(AMORTIZER, exp.amortizer, target=target, prior=prior, seed=exp.seed)
    if "perceptual" in needed:
        perceptual = public_classifier(store, exp.perceptual, split, exp.seed, "perceptual")
    attribute = None
    if name := exp.attack.known_attribute:
        config = exp.attribute_training(name)
        recogniser = public_classifier(store, config, split, exp.seed, "attribute")
        attribute = KnownAttribute(name, attribute_of_people(split.test, name), recogniser)
    return Assets(
        public=split.public,
        prior=prior if "prior" in needed else None,
        amortizer=amortizer,
        embedder=embedder if "embedder" in needed else None,
        perceptual=perceptual,
        attribute=attribute,
    )
