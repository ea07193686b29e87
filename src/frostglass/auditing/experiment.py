"""An experiment: one audit as a frozen set of plain values, on either surface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from frostglass.attacks.base import Attack, Surface, attacks
from frostglass.auditing.expand import expand
from frostglass.auditing.fractions import Fractions
from frostglass.auditing.reader import Reader
from frostglass.auditing.thresholds import Thresholds
from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize
from frostglass.core.parameters import parameters
from frostglass.core.registry import nearest
from frostglass.data.base import Dataset, datasets
from frostglass.defenses.base import Defense, defenses
from frostglass.defenses.compose import conflicts
from frostglass.evaluators.embedder import Embedder
from frostglass.metrics.base import Metric, metrics
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.base import PriorMethod, priors
from frostglass.robustness.base import DEFAULTS as THREATS
from frostglass.robustness.base import Threat, threats
from frostglass.training.settings import Training

EVALUATORS = [{"model": "resnet"}, {"model": "convmixer"}, {"kind": "embedder"}]
KINDS: dict[str, type[Training] | type[Embedder]] = {"classifier": Training, "embedder": Embedder}
DEFAULTS: dict[Surface, dict[str, Any]] = {
    "model": {
        "attack": {"name": "gmi"},
        "metrics": [
            {"name": "verification"},
            {"name": "accuracy"},
            {"name": "distance"},
            {"name": "manifold"},
        ],
        "required": ("verification", "accuracy"),
    },
    "features": {
        "attack": {"name": "decoder"},
        "metrics": [
            {"name": "verification"},
            {"name": "top1"},
            {"name": "face"},
            {"name": "likeness"},
            {"name": "manifold"},
        ],
        "required": ("verification", "face"),
    },
}


@parameters
class Judging:
    """Who is attacked, and what makes the audit believable.

    Args:
        identities: how many private people to attack, from the first on; all by default.
        images: held-out images of each person: those whose features leave the device, in audits of
            features, and those that are made adversarial examples, by `frostglass robustness`.
        margin: the positive control counts as broken if the attack beats the prior-only baseline
            by this much (share of people recognised; similarity on features), and by more than
            chance explains at the 1 % level.
        min_accuracy: held-out accuracy below which a classifier is excluded from the verdict.
        min_true_accepts: share of genuine images accepted, at a false-accept rate of 1 %, below
            which an evaluator is excluded from the verdict.
        positive_control: attack an undefended model too; the audit is vacuous if that fails. With
            "if_needed" only if the attack does not break the audited model itself: one that
            breaks shows that the attack works.
    """

    identities: Annotated[int, Field(ge=2)] | None = None
    images: Annotated[int, Field(ge=1)] = 2
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    min_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.7
    min_true_accepts: Annotated[float, Field(ge=0, le=1)] = 0.5
    positive_control: bool | Literal["if_needed"] = True


@dataclass(frozen=True)
class Experiment:
    """One audit: data, target with defenses, evaluators, prior, attack, metrics.

    The surface follows from `target.cut`: without a cut the model is exposed, with one the
    features behind it. `embedder` (who is it?) and `perceptual` (whose layers compare images) are
    trained on public people, where something needs them. `prior` serves protection and attacker;
    `attacker_prior`, if given, is what the attacker has instead. `case` names the attack in a grid.
    `threats` are what `frostglass robustness` measures; an audit ignores them.
    `query_budget`, if not 0, is how many images the attack may show to the target, per person.
    `thresholds` change nothing that is computed: a report answers against them.
    """

    name: str
    case: str
    seed: int
    data: Dataset
    split: Fractions
    target: Training
    defenses: tuple[Defense, ...]
    evaluators: tuple[Training | Embedder, ...]
    embedder: Training
    perceptual: Training
    prior: PriorMethod | None
    attacker_prior: PriorMethod | None
    amortizer: Amortizer
    attack: Attack
    metrics: tuple[Metric, ...]
    threats: tuple[Threat, ...]
    judging: Judging
    thresholds: Thresholds | None
    query_budget: int

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Experiment":
        """Build an experiment from nested plain values or objects; raise all problems at once."""
        reader = Reader(values)
        target = reader.section("target", Training)
        surface: Surface = "features" if target is not None and target.cut else "model"
        default = DEFAULTS[surface]
        prior = {"prior": {"name": "wgan"}} if surface == "model" else {}

        def optional_prior(key: str) -> PriorMethod | None:
            return reader.method(key, priors, prior.get(key)) if key in {*values, *prior} else None

        experiment = cls(
            name=reader.value("name", str, "audit" if surface == "model" else "features"),
            case=reader.value("case", str, ""),
            seed=reader.value("seed", int, 0),
            data=reader.method("data", datasets, {"name": "faces"}),
            split=reader.section("split", Fractions),
            target=target,
            defenses=reader.methods("defenses", defenses, []),
            evaluators=reader.kinds("evaluators", KINDS, EVALUATORS),
            embedder=reader.section("embedder", Training),
            perceptual=reader.section("perceptual", Training),
            prior=optional_prior("prior"),
            attacker_prior=optional_prior("attacker_prior"),
            amortizer=reader.section("amortizer", Amortizer),
            attack=reader.method("attack", attacks, default["attack"]),
            metrics=reader.methods("metrics", metrics, default["metrics"]),
            threats=reader.methods("threats", threats, THREATS),
            judging=reader.section("judging", Judging),
            thresholds=reader.section("thresholds", Thresholds) if "thresholds" in values else None,
            query_budget=reader.value("query_budget", int, 0),
        )
        problems = [*reader.problems, *_unknown(values, cls), *_problems(experiment, surface)]
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        return experiment

    @property
    def surface(self) -> Surface:
        return "features" if self.target.cut else "model"

    @property
    def audited(self) -> Training:
        """The settings of the target, cut where the defenses let features leave."""
        layer = self.target.cut
        for defense in self.defenses:
            layer = defense.cut(layer)
        return replace(self.target, cut=layer)

    @property
    def moves_cut(self) -> bool:
        """Whether a defense decides where features leave."""
        return any("cut" in defense.replaces() for defense in self.defenses)

    @property
    def training_defenses(self) -> tuple[Defense, ...]:
        """The defenses that act while the network is trained."""
        return tuple(defense for defense in self.defenses if defense.trains())

    @property
    def protection(self) -> Defense | None:
        """The defense that acts on the features that leave the device, if there is one."""
        return next((defense for defense in self.defenses if defense.releases), None)

    def limited(self, classes: int) -> "Experiment":
        """Return the experiment with an attack that keeps to the query budget."""
        if not self.query_budget:
            return self
        people = self.size(classes, 0).people
        return replace(self, attack=self.attack.within(self.query_budget, people))

    def attribute_training(self, name: str) -> Training:
        """Return how an attacker's classifier of an attribute is trained: as the embedder is."""
        return replace(self.embedder, weights=None, classes=(), attributes=(name,))

    def needs(self, asset: Asset) -> bool:
        """Whether the attack, a defense or a metric needs an asset."""
        users: Sequence[Attack | Defense | Metric] = (self.attack, *self.defenses, *self.metrics)
        return any(asset in user.needs for user in users)

    def size(self, classes: int, public: int) -> AuditSize:
        """Return the size of this audit for a dataset of so many people and public images."""
        people = min(self.judging.identities or classes, classes)
        images = self.judging.images if self.surface == "features" else 1
        return AuditSize(people, images, public, classes)


def experiments(values: Mapping[str, Any]) -> list[tuple[str, Experiment]]:
    """Return all experiments of a config by label; raise the problems of all of them at once."""
    chosen, parsed = expand(values), []
    places: dict[str, list[str]] = {}
    for label, config in chosen:
        try:
            parsed.append((label, Experiment.parse(config)))
        except ConfigError as error:
            for problem in error.problems:
                places.setdefault(problem, []).append(label)
    problems = [
        problem + ("" if len(labels) == len(chosen) else _among(labels))
        for problem, labels in places.items()
    ]
    problems += _differences([experiment for _, experiment in parsed])
    if problems:
        raise ConfigError(problems)
    return parsed


def _among(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return f" (in the grid's {labels[0]!r}{more})"


def _differences(chosen: Sequence[Experiment]) -> list[str]:
    """Check what the experiments of one run must share, so that one table can hold them."""
    shared = ["surface", "metrics", "evaluators", "thresholds"]
    advice = dict.fromkeys(shared, "use several configs")
    if any(experiment.surface == "features" for experiment in chosen):
        advice |= dict.fromkeys(["data", "split", "embedder", "judging"], "use several configs")
        # The attacked images are drawn with the seed, and a run shows one set of them.
        advice["seed"] = "run once for each with --set seed=1, and join the runs by report --table"
    return [
        f"grid: {name} must be the same in all experiments of one run: {fix}"
        for name, fix in advice.items()
        if len({repr(getattr(experiment, name)) for experiment in chosen}) > 1
    ]


def _unknown(values: Mapping[str, Any], cls: type[Experiment]) -> list[str]:
    known = {field.name for field in fields(cls)} | {"grid"}
    unknown = [key for key in values if key not in known]
    problems = [f"{key}: no such section; {nearest(key, known)}" for key in unknown]
    if "grid" in values:
        problems.append("grid: one experiment has none: read the config with `experiments`")
    return problems


def _problems(exp: Experiment, surface: Surface) -> list[str]:
    """List what only the parts together can tell; a part that could not be read is None."""
    chosen = [defense for defense in exp.defenses if defense is not None]
    problems = [f"defenses: {problem}" for problem in conflicts(chosen)]
    if exp.target is not None and exp.target.weights:
        problems += [
            f"defenses: {defense.name} acts on training, and target.weights are loaded without "
            "training: remove one of the two"
            for defense in chosen
            if "head" not in defense.replaces() and defense.trains()
        ]
    if exp.attack is not None and exp.attack.surface != surface:
        fix = "set target.cut" if surface == "model" else "remove target.cut"
        problems.append(
            f"attack: {exp.attack.name} attacks {exp.attack.surface}, and this config exposes "
            f"{surface}: use another attack, or {fix}"
        )
    if exp.query_budget < 0 or (exp.query_budget and surface == "features"):
        problems.append(
            "query_budget: expected 0 or more, for attacks on models only, got "
            f"{exp.query_budget}: remove it"
        )
    problems += exp.thresholds.problems(surface) if exp.thresholds is not None else []
    problems += [*_metric_problems(exp, surface), *_evaluator_problems(exp)]
    return problems + (_model_problems if surface == "model" else _feature_problems)(exp, chosen)


def _metric_problems(exp: Experiment, surface: Surface) -> list[str]:
    measured = [metric for metric in exp.metrics if metric is not None]
    problems = [
        f"metrics: {metric.name} cannot be measured on {surface}: remove it"
        for metric in measured
        if surface not in metric.surfaces
    ]
    if exp.attack is not None and exp.judging is not None:
        candidates = exp.attack.kept * (exp.judging.images if surface == "features" else 1)
        for metric in measured:
            problems += [f"metrics: {problem}" for problem in metric.problems(candidates)]
    if len(measured) < len(exp.metrics):
        return problems
    return problems + [
        f'metrics: {name} is required, because the controls use it: add {{ name = "{name}" }}'
        for name in DEFAULTS[surface]["required"]
        if name not in {metric.name for metric in measured}
    ]


def _evaluator_problems(exp: Experiment) -> list[str]:
    """Check that evaluators classify people, first with classifiers, then with embedders."""
    problems = []
    embedders = [isinstance(config, Embedder) for config in exp.evaluators]
    if embedders != sorted(embedders) or all(embedders):
        problems.append("evaluators: expected at least one classifier first, then embedders")
    # Data may lack it, and the numbers of the others must be the same in all audits of a grid.
    open_source = [config.source == "" for config in exp.evaluators if isinstance(config, Embedder)]
    if open_source != sorted(open_source):
        problems.append(
            "evaluators: expected the embedder without source last, because some data has none: "
            "move it to the end, or name its source"
        )
    for where, config in {
        **{f"evaluators[{i}]": config for i, config in enumerate(exp.evaluators)},
        "embedder": exp.embedder,
        "perceptual": exp.perceptual,
    }.items():
        if isinstance(config, Training) and (config.attributes or config.cut):
            key = "attributes" if config.attributes else "cut"
            problems.append(f"{where}: classifies people and is not cut: remove {where}.{key}")
    return problems


def _model_problems(exp: Experiment, chosen: Sequence[Defense]) -> list[str]:
    problems = [
        f"defenses: {defense.name} acts on features that leave a device, and this target has no "
        "cut: set target.cut and target.attributes"
        for defense in chosen
        if not defense.trains()
    ]
    if exp.attacker_prior is not None:
        problems.append("attacker_prior: used by audits of features only: set prior instead")
    return problems


def _feature_problems(exp: Experiment, chosen: Sequence[Defense]) -> list[str]:
    problems = []
    if str(exp.target.cut).lower() in ("none", "null"):
        problems.append(
            f'target.cut: {exp.target.cut!r} names no layer; expected one such as "stage1"; '
            "remove target.cut to audit the whole model"
        )
    if not exp.target.attributes:
        problems.append(
            'target.attributes: required with target.cut; name the attributes, or set ["all"]'
        )
    problems += [
        f"defenses: {defense.name} defends a classifier of people, and a split model predicts "
        "attributes: remove it"
        for defense in chosen
        if not defense.takes_attributes
    ]
    return problems + _feature_prior_problems(exp, chosen)


def _feature_prior_problems(exp: Experiment, chosen: Sequence[Defense]) -> list[str]:
    problems = [
        f"{section}: {method.name} is fitted to a classifier of the attacked people, and features "
        "have none: use another prior"
        for section, method in (("prior", exp.prior), ("attacker_prior", exp.attacker_prior))
        if method is not None and method.tied
    ]
    users: list[Defense | Attack] = [user for user in chosen if user.needs & {"prior", "amortizer"}]
    if exp.attack is not None and exp.attacker_prior is None:
        users += [exp.attack] if exp.attack.needs & {"prior", "amortizer"} else []
    if users and exp.prior is None:
        problems.append(
            f"prior: {users[0].name} needs one, got none: set [prior], such as "
            '{ name = "pretrained" }'
        )
    return problems
