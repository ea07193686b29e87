"""The whole program: split, target, exposure, assets, attack, scores, and controls beside them."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from frostglass.auditing.agreement import prior_agreement
from frostglass.auditing.controls import verdict
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.feature_facts import feature_facts
from frostglass.auditing.given import is_given, naming, refuse_target
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
    PRIOR,
    PRIOR_ONLY,
    SCORES,
    SPLIT,
    TARGET,
    VERIFIER,
)
from frostglass.auditing.victims import attacked_people, victims_of
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.core.views import ModelView
from frostglass.defenses.base import Defense
from frostglass.evaluators.embedder import Embedder, read_embedder, usable
from frostglass.evaluators.verifier import Verifier
from frostglass.metrics.base import Rows
from frostglass.metrics.face import reference_similarities
from frostglass.priors.base import PriorMethod, check_unseen
from frostglass.priors.context import hints_of
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import seed_for
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store
from frostglass.training.settings import EVALUATORS, PUBLIC, STRANGERS, Training, first_stage


def audit(experiment: Experiment, store: Store) -> Audit:
    """Run one experiment, or what the store lacks of it, and assess it by its controls."""
    made = produce(experiment, store)
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
    split = store.step(
        SPLIT, exp.data, fractions=exp.split, files=fingerprint(exp.data), seed=exp.seed
    )
    victims = victims_of(exp, split) if exp.surface == "features" else None
    given = _examine_given(exp, store, split)
    evaluators = tuple(
        given.get(number)
        or evaluator(store, config, split, seed=seed_for(exp.seed, "evaluator", number))
        for number, config in enumerate(exp.evaluators)
    )
    verifiers = tuple(
        store.step(VERIFIER, None, evaluator=network, split=split, seed=0) for network in evaluators
    )
    embedder = None
    if exp.surface == "features" or exp.needs("embedder"):
        embedder = public_classifier(store, exp.embedder, split, exp.seed, "embedder")

    def trial(exposure: Exposure) -> Trial:
        return _trial(exp, store, split, exposure, (evaluators, verifiers), embedder)

    exposure = expose(exp, store, split, victims)
    if not exp.target.weights:  # else compared before
        _refuse_target(given, exposure.target, split)
    main = trial(exposure)
    control = None
    if exp.judging.positive_control:
        recipe = replace(exp.target, weights=None, classes=())
        plain = replace(exp, target=recipe, defenses=())
        control = trial(expose(plain, store, split, victims))
    more = None
    if exp.surface == "features":
        more = _baseline(exp, store, split, main.prior, seed=seed_for(exp.seed, "more draws"))
    return Products(
        split=split,
        evaluators=evaluators,
        verifiers=verifiers,
        embedder=embedder,
        trial=main,
        control=control,
        more_draws=more,
    )


def expose(exp: Experiment, store: Store, split: Split, victims: Images | None) -> Exposure:
    """Return what an attacker faces: a trained model, or features a device released for victims."""
    needed = exp.protection.needs if exp.protection else frozenset()
    target = _target(exp, store, split)
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


def _target(exp: Experiment, store: Store, split: Split) -> Target:
    perceptual = None
    if any("perceptual" in defense.needs for defense in exp.training_defenses):
        perceptual = public_classifier(store, exp.perceptual, split, exp.seed, "perceptual")
    with naming("target") if exp.target.weights else nullcontext():
        return classifier(
            store, exp.target, split, exp.training_defenses, perceptual, seed=exp.seed
        )


def _examine_given(exp: Experiment, store: Store, split: Split) -> dict[int, Target]:
    """Load and examine the networks that are read from files, before anything is trained.

    Returns the evaluators among them, by their place in the config.
    """
    for metric in exp.metrics:
        metric.check_files()
    target = _target(exp, store, split) if exp.target.weights else None
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


def _trial(
    exp: Experiment,
    store: Store,
    split: Split,
    exposure: Exposure,
    evaluators: tuple[tuple[Target, ...], tuple[Verifier, ...]],
    embedder: Target | None,
) -> Trial:
    """Attack what is exposed, and score reconstructions and prior-only draws in the same way."""
    prior = attacker_prior(exp, store, split, exposure)
    assets = attacker_assets(exp, store, split, exposure.target, prior, embedder)
    result = _attacked(exp, store, split, exposure, assets)
    baseline = _baseline(exp, store, split, prior, known=assets.attribute, seed=exp.seed)
    more = None
    if any(metric.uses_draws for metric in exp.metrics):
        more = _baseline(exp, store, split, prior, seed=seed_for(exp.seed, "more draws"))

    def scores(reconstructions: Reconstructions, embeds: bool, draws: Reconstructions) -> Rows:
        return store.step(
            SCORES,
            exp.metrics,
            reconstructions=reconstructions,
            victims=exposure.victims if isinstance(exposure, FeatureExposure) else None,
            split=split,
            evaluators=evaluators[0],
            verifiers=evaluators[1],
            embedder=embedder,
            target=exposure.target,
            embeds=embeds,
            files="".join(map(fingerprint, exp.metrics)),
            draws=(draws, more if draws is baseline else baseline) if more else None,
            seed=exp.seed,
        )

    rows = scores(result, exp.attack.embeds, baseline)
    # Draws are compared with other draws: with themselves they would look perfect.
    baseline_rows = scores(baseline, False, more or baseline)
    return Trial(exposure, prior, result, baseline, rows, baseline_rows)


def _attacked(
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


def classifier(
    store: Store,
    config: Training,
    split: Split,
    defenses: Sequence[Defense] = (),
    perceptual: Target | None = None,
    *,
    seed: int,
    data: str = "private",
    public: str = PUBLIC,
) -> Target:
    """Train a classifier, after the stages that come first; grids share stages.

    `public` names the public people of such stages: all, or "strangers" for an evaluator, whose
    thresholds are set on the others.
    """
    start = None
    if first := first_stage(config, defenses):
        start = classifier(
            store,
            first.config,
            split,
            first.defenses,
            seed=seed_for(seed, "stage"),
            data=public if first.data == PUBLIC else first.data,
            public=public,
        )
    target = store.step(
        TARGET,
        config,
        split=split,
        defenses=tuple(defenses),
        data=data,
        files=fingerprint(config) + "".join(map(fingerprint, defenses)),
        start=start,
        perceptual=perceptual,
        seed=seed,
    )
    if start is None:
        return target
    seconds = start.info["seconds"] + start.info.get("stage_seconds", 0.0)
    return replace(target, info={**target.info, "stage_seconds": seconds})


def evaluator(store: Store, config: Training | Embedder, split: Split, *, seed: int) -> Target:
    """Return an evaluator: a trained classifier, or an embedder, which has no classes.

    Those that learn from public people leave some of them out, to calibrate with.
    """
    if isinstance(config, Training):
        data = "private" if split.evaluators is None else EVALUATORS
        network = classifier(store, config, split, seed=seed, data=data, public=STRANGERS)
        if config.start != PUBLIC:
            return network
    elif config.trained:
        network = classifier(store, config.training, split, seed=seed, data=STRANGERS)
        network = replace(network, classes=())
    else:
        return store.read(read_embedder, config, split.train.shape, store.device)
    return replace(network, info={**network.info, "trained_on": PUBLIC})


def public_classifier(
    store: Store, config: Training, split: Split, seed: int, purpose: str
) -> Target:
    """Train a classifier of public people."""
    return classifier(store, config, split, seed=seed_for(seed, purpose), data="public")


def trained_prior(
    store: Store, method: PriorMethod, split: Split, view: ModelView | None, *, seed: int
) -> Prior:
    """Train a prior, after its base; a tied one is trained again for every target."""
    base = None
    if method.base_method:
        base = trained_prior(store, method.base_method, split, view, seed=seed)
    return store.step(
        PRIOR,
        method,
        public=split.public,
        view=view if method.tied else None,
        files=fingerprint(method),
        base=base,
        seed=seed,
    )
