"""Networks that an audit trains or reads: classifiers with their stages, evaluators, priors."""

from collections.abc import Sequence
from dataclasses import replace

from frostglass.auditing.steps import CUT, PRIOR, TARGET, TIMES
from frostglass.core.prior import Prior
from frostglass.core.types import Split, Target
from frostglass.core.views import ModelView
from frostglass.defenses.base import Defense
from frostglass.evaluators.embedder import Embedder, read_embedder
from frostglass.priors.base import PriorMethod
from frostglass.runtime.seeding import seed_for
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store
from frostglass.training.build import untrained
from frostglass.training.settings import (
    EVALUATORS,
    PUBLIC,
    STRANGERS,
    Training,
    classes_of,
    first_stage,
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
    if config.cut and not defenses and not config.weights:
        return _cut_classifier(store, config, split, seed=seed, data=data, public=public)
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


def _cut_classifier(
    store: Store, config: Training, split: Split, *, seed: int, data: str, public: str
) -> Target:
    """Train an undefended classifier once for all layers that it is cut at."""
    # A layer that cannot be cut at is refused before the training.
    layer = untrained(config, classes_of(config, split), split.train.shape, (), seed=seed).cut
    whole = classifier(store, replace(config, cut=""), split, seed=seed, data=data, public=public)
    target = store.step(CUT, layer, target=whole, seed=seed)
    times = {name: whole.info[name] for name in TIMES if name in whole.info}
    return replace(target, info={**target.info, **times})


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
