"""Everything that would stop a run, found before anything is computed.

Networks are built on the meta device, which costs nothing. One that fails there is built again for
real: its code may read values.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from frostglass.attacks.base import Attack
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.products import blank_view
from frostglass.core.assets import Assets
from frostglass.core.errors import FrostglassError
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.data._impostors import HELD_OUT
from frostglass.data._splits import MIN_IMAGES, check_people, held_out_share
from frostglass.data.base import listed
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, TrainingSize
from frostglass.evaluators.embedder import Embedder, read_embedder, usable
from frostglass.models.base import MODEL_ERRORS, probe
from frostglass.models.checkpoint import load_weights
from frostglass.models.class_order import check_names
from frostglass.models.cut import check_moved, halves
from frostglass.plan.attack_problems import access_problems, known_attribute, pretraining_problems
from frostglass.plan.brief import blank_split
from frostglass.plan.dry_run import without_floats
from frostglass.plan.ledger import Ledger
from frostglass.plan.people_problems import too_few_images, too_few_people, too_few_victims
from frostglass.priors.base import PriorMethod
from frostglass.runtime.seeding import seeded
from frostglass.store.keys import plain
from frostglass.training.build import check_training, untrained
from frostglass.training.settings import Training, attributes_of, first_stage, starts_public

T = TypeVar("T")


def problems(chosen: Sequence[tuple[str, Experiment]], *, attacks: bool = True) -> list[str]:
    """List what would stop these experiments, each problem once.

    Without `attacks`, only what a split model and its protection need is checked.
    """
    known: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of networks that are never used
        every = [_Checks(experiment, attacks, known).problems() for _, experiment in chosen]
    return list(dict.fromkeys(problem for found in every for problem in found))


class _Checks:
    """The checks of one experiment; `known` has the results and networks of others."""

    def __init__(self, exp: Experiment, attacks: bool, known: dict[str, Any]):
        self.exp, self.attacks, self._known = exp, attacks, known
        self._failed: set[str] = set()
        self._ledger: Ledger | None = None  # None while networks are built for real

    def _shared(self, make: Callable[..., T], *depends: Any) -> T:
        """Return what `make` returns, which other experiments use too: it must not be changed."""
        key = f"{make.__name__} {depends} {self.exp.data} {self.exp.split} {self._ledger is None}"
        if key not in self._known:
            self._known[key] = make(*depends)
        return self._known[key]

    def problems(self) -> list[str]:
        """Run all checks; skip those that depend on a part that already failed."""
        problems = list(self._run("data", self._data, self.exp.data, self.exp.split))
        if problems:
            return problems
        for section, check, *depends in self._sections():
            if section in ("defenses", "amortizer", "attack") and self._failed:
                continue  # whether a method fits an invalid part cannot be said
            problems += self._run(section, check, *depends)
        return problems

    def _run(self, section: str, check: Callable[[], Any], *depends: Any) -> list[str]:
        """Return the problems of a check, from memory if its dependencies are known."""
        name = check.func.__name__ if isinstance(check, partial) else check.__name__
        key = f"{section} {name} {depends} {self.attacks}"
        if key not in self._known:
            problems = self._problems_of(check)
            self._known[key] = [f"{section}: {problem}" for problem in problems]
        if self._known[key] and section in ("target", "prior", "attacker_prior", "perceptual"):
            self._failed.add(section)
        return self._known[key]

    def _problems_of(self, check: Callable[[], Any]) -> list[str]:
        """Run a check on the meta device, and for real if that finds a problem."""
        for self._ledger in (Ledger(), None):
            try:
                with self._ledger or nullcontext():
                    problems = check()
            except FrostglassError as error:
                problems = list(error.problems)
            except MODEL_ERRORS as error:
                if self._ledger is None:
                    raise
                problems = [str(error)]
            if not isinstance(problems, list) or not problems:
                return []
        return problems

    def _sections(self) -> Iterator[tuple[Any, ...]]:
        exp = self.exp
        data, split, cut = exp.data, exp.split, exp.surface == "features"
        model = (data, split, exp.audited, exp.training_defenses)
        control = (exp.target, exp.judging.positive_control) if exp.moves_cut else ()
        yield "target", self._attributes, *model
        yield "target", self._target, *model, *control
        yield "judging", self._people, data, exp.judging
        if cut:
            yield "judging", self._victims, data, split, exp.judging
        if self.attacks:
            for number, config in enumerate(usable(exp.evaluators, data)):
                check = partial(self._evaluator, config)
                yield f"evaluators[{number}]", check, data, split, config
            if cut:
                yield "data", self._two_images, data, split
        yield "data", self._public_people, *model, self._public_networks()
        for section in self._public_networks():
            config = getattr(exp, section)
            yield section, partial(self._classifier, config, ()), data, split, config
        for section, method in self._priors():
            yield section, partial(self._prior, method), data, method, exp.surface
        if exp.target.cut:
            cuts = (exp.target, exp.audited, exp.moves_cut)
            yield "target", partial(self._cut, exp.target.cut), data, *cuts
        if exp.protection:
            yield "defenses", self._release, data, exp.protection, exp.prior, exp.judging
        for user in (exp.protection, exp.attack if self.attacks else None):
            if user and "amortizer" in user.needs:
                prior = self._prior_of(user)
                check = partial(self._amortizer, prior)
                yield "amortizer", check, data, exp.audited, prior, exp.amortizer
        if self.attacks:
            assets = (exp.prior, exp.attacker_prior, exp.embedder, exp.perceptual)
            yield "attack", self._attack, data, exp.audited, exp.attack, *assets

    def _public_networks(self) -> list[str]:
        """Name the networks besides the target that are trained on public people."""
        exp = self.exp
        users = exp.training_defenses
        if not self.attacks:
            return ["perceptual"] if any("perceptual" in user.needs for user in users) else []
        embedder = exp.surface == "features" or exp.needs("embedder")
        needed = {
            "embedder": embedder or exp.needs("attribute"),
            "perceptual": exp.needs("perceptual"),
        }
        return [name for name, wanted in needed.items() if wanted]

    def _priors(self) -> list[tuple[str, PriorMethod]]:
        exp = self.exp
        protection = exp.protection is not None and "prior" in exp.protection.needs
        sections = {
            "prior": exp.prior if self.attacks or protection else None,
            "attacker_prior": exp.attacker_prior if self.attacks else None,
        }
        return [(section, method) for section, method in sections.items() if method]

    def _prior_of(self, user: Attack | Defense) -> PriorMethod | None:
        exp = self.exp
        return (exp.attacker_prior or exp.prior) if user is exp.attack else exp.prior

    @cached_property
    def _counts(self) -> tuple[int, int, int]:
        return self.exp.data.counts()

    def _data(self) -> list[str]:
        """Check that there are people, on one side each, with enough images."""
        classes, private, public = self._counts
        if not classes:
            return [
                "no private person has a name: private images need one sub-folder per person, "
                "named after them"
            ]
        problems = [] if public else ["there are no public images: an attacker needs some"]
        paths = [path.resolve() for path in self.exp.data.files()]
        if twice := len(paths) - len(set(paths)):
            return [
                f"{twice} files are private and public at once: expected two folders with "
                "different people, got the same one twice. Change data.public."
            ]
        ours, theirs = self.exp.data.people()
        if both := sorted(ours.keys() & theirs.keys()):
            problems.append(
                f"{len(both)} people are private and public at once: {listed(both)}. Keep each on "
                "one side."
            )
        few = [f"{name} ({count})" for name, count in ours.items() if count < MIN_IMAGES]
        if few or private / classes < MIN_IMAGES:
            names = listed(few) if few else f"{private} images of {classes} people"
            problems.append(
                f"expected at least {MIN_IMAGES} images of each private person, one each for "
                f"training, validation and test, got {names}. Add images or remove people."
            )
        self.exp.data.attribute_names()  # reads the attribute table, if there is one
        return problems

    def _attributes(self) -> list[str]:
        config, data = self.exp.target, self.exp.data
        if not config.attributes:
            return []
        chosen = attributes_of(config, data.attribute_names())
        if chosen and set(chosen) <= set(data.constant_attributes()):
            return [
                f"attributes: {', '.join(chosen)} is the same for all private images, so nothing "
                "can be learned or measured. Name one that varies, or fix data.attributes."
            ]
        return []

    def _classes(self, config: Training) -> tuple[str, ...]:
        if config.attributes:
            return attributes_of(config, self.exp.data.attribute_names())
        return tuple(map(str, range(self._counts[0])))

    def _target(self) -> None:
        self._classes_named(self.exp.target)
        self._classifier(self.exp.audited, self.exp.training_defenses)
        if self.exp.moves_cut and self.exp.target.weights and self.exp.judging.positive_control:
            self._plain(self.exp.target.retrained())  # the control, which is trained

    def _cut(self, given: str) -> list[str]:
        """Cut the network for real: values tell what a skip connection passes by."""
        if self._ledger is not None:
            return ["a cut cannot be tried on tensors without content"]
        target = self._plain(self.exp.audited)
        if self.exp.moves_cut:
            check_moved(target, given)
        return []

    def _classes_named(self, config: Training) -> None:
        """Check the order of classes by name, if the names are known without reading images."""
        if config.classes and (names := self.exp.data.people()[0]):
            check_names(config.classes, list(names))

    def _evaluator(self, config: Training | Embedder) -> None:
        """Build the network of an evaluator; an embedder that is read is loaded and tried."""
        if isinstance(config, Training):
            self._classes_named(config)
            self._classifier(config, ())
        elif config.trained:
            self._classifier(config.training, ())
        else:
            read_embedder(config, self.exp.data.image_shape, torch.device("cpu"))

    def _classifier(self, config: Training, defenses: Sequence[Defense]) -> Target:
        """Build the network of each training stage, and load the weights it starts from."""
        split, shape = self.exp.split, self.exp.data.image_shape
        records = int(self._counts[1] * (1 - self._test_share() - split.validation))
        stage = first_stage(config, defenses)
        if start := None if stage else config.starting_file:
            target = untrained(config, self._classes(config), shape, defenses, seed=0, start=start)
        else:
            target = self._plain(config)
            if defenses or config.weights:
                target = replace(target, module=deepcopy(target.module))
            target = compose.prepare(defenses, target, seed=0)
        secret = len(self.exp.data.secret_people()) + split.secret
        size = TrainingSize(records, config.batch, config.epochs, secret)
        check_training(config, target, defenses, size)
        if config.weights and not config.whole:
            load_weights(target.module, config.weights)
        if stage:
            self._classifier(stage.config, stage.defenses)
        return target

    def _test_share(self) -> float:
        return held_out_share(self.exp.data, self.exp.split.test)

    def _plain(self, config: Training) -> Target:
        """Return the network of a training, without defenses and weights."""
        names = ["model", "options", "mean", "std", "attributes", "cut"]
        names += ["weights", "trust", "endpoint"] if config.whole else []
        network = Training(**{name: getattr(config, name) for name in names})
        return self._shared(self._built, network)

    def _built(self, config: Training) -> Target:
        return untrained(config, self._classes(config), self.exp.data.image_shape, (), seed=0)

    def _people(self) -> list[str]:
        return too_few_people(self.exp, self._counts[0])

    def _victims(self) -> list[str]:
        return too_few_victims(self.exp, self._counts, self._test_share())

    def _two_images(self) -> list[str]:
        return too_few_images(self.exp, self._test_share())

    def _public_people(self) -> list[str]:
        """Check the public people that networks are trained on."""
        exp = self.exp
        start = starts_public(exp.target, exp.training_defenses)
        configs = usable(exp.evaluators, exp.data) if self.attacks else []
        # Evaluators leave people out, to calibrate with.
        if any(
            each.trained if isinstance(each, Embedder) else starts_public(each, ())
            for each in configs
        ):
            people = enumerate(exp.data.public_people())
            check_people([count for number, count in people if number % HELD_OUT])
        if start or self._public_networks():
            check_people(exp.data.public_people())
        if start and exp.target.attributes and not exp.data.describes_public():
            return [
                "public images have no attributes, and a training that starts on public people "
                '(target.start = "public") needs them. Add a line for each public image to '
                "data.attributes, or remove target.start."
            ]
        return []

    def _prior(self, method: PriorMethod) -> list[str]:
        problems = method.problems(self._counts[2])
        prior = self._untrained(method)
        if self.exp.surface == "features" and prior.condition:
            problems.append(
                f"{method.name} generates images for a given {prior.condition}, which features do "
                "not have. Use another, such as wgan."
            )
        return problems

    def _untrained(self, method: PriorMethod) -> Prior:
        classes = self._counts[0] if self.exp.surface == "model" else 0
        return self._shared(self._untrained_prior, method, classes)

    def _untrained_prior(self, method: PriorMethod, classes: int) -> Prior:
        with seeded(0, "check"):
            return method.untrained(self.exp.data.image_shape, classes)

    def _release(self) -> list[str]:
        exp, method = self.exp, self.exp.prior
        assert exp.protection is not None
        prior = self._untrained(method) if method and "prior" in exp.protection.needs else None
        images = exp.judging.images * min(exp.judging.identities or 10**9, self._counts[0])
        return exp.protection.release_problems(exp.data.image_shape, images, prior)

    def _amortizer(self, method: PriorMethod | None) -> None:
        if method is not None:
            shape = halves(self._plain(self.exp.audited)).feature_shape
            with seeded(0, "check"):
                network = self.exp.amortizer.network(shape, self._untrained(method).latent)
            probe(network, torch.zeros(2, *shape))

    def _attack(self) -> list[str]:
        """Check attack, view and assets together, before any of them is trained."""
        exp, target = self.exp, self._plain(self.exp.audited)
        attack = exp.limited(self._counts[0]).attack
        method = self._prior_of(attack)
        networks = {
            name: self._plain(getattr(exp, name))
            for name in ("embedder", "perceptual")
            if name in attack.needs
        }
        assets = Assets(
            public=self._shared(blank_split, exp.data, exp.split).public,
            prior=self._untrained(method) if method and "prior" in attack.needs else None,
            amortizer=nn.Identity() if "amortizer" in attack.needs else None,
            attribute=known_attribute(exp, self._plain) if attack.known_attribute else None,
            **networks,
        )
        if exp.surface == "features":
            problems = attack.problems(blank_view(target, attack), assets)
            if attack.pretraining and not problems:
                depends = (plain(attack.pretraining, "", False), exp.audited, networks.keys())
                key = f"{without_floats(list(depends))}"
                if key not in self._known:
                    self._known[key] = pretraining_problems(attack, target, assets)
                problems = self._known[key]
            return problems
        prior = self._untrained(method) if method else None
        view = target.view(attack.access)  # type: ignore[arg-type]
        return [
            *attack.problems(view, replace(assets, prior=prior)),
            *access_problems(attack, method, self.exp.target),
        ]
