"""An audit of split inference as a frozen set of plain values: what leaves the device is a feature, and what is asked is what it gives away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from frostglass.attacks.features.base import FeatureAttack, feature_attacks
from frostglass.audit.config import Fractions, Reader, parsed
from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.data.base import Dataset, datasets
from frostglass.defenses.base import Defense, defenses
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.base import PriorMethod, priors
from frostglass.training.settings import Training


@parameters
class FeatureJudging:
    """Whose features are intercepted, and what makes the audit believable.

    Args:
        identities: how many private people, from the first on; all by default.
        pictures: held-out pictures of each whose features leave the device.
        margin: the positive control counts as broken when the similarity of what is rebuilt to the victim, minus that of blind draws, is with 95 % confidence above this.
        positive_control: attack the plain features of an undefended model too, and call the audit vacuous if that fails.
    """

    identities: Annotated[int, Field(ge=2)] | None = None
    pictures: Annotated[int, Field(ge=1)] = 2
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.2
    positive_control: bool = True


@dataclass(frozen=True)
class FeatureExperiment:
    """One audit of a split model: `target` says where it is cut and what it learns, `defenses` how it is trained and what it releases.

    `embedder` (who is it?) and `perceptual` (by whose layers pictures are compared) are trained on public people. The `prior` is what a protection and an attacker use,
    where one does; `attacker_prior`, if given, is what the attacker has instead. Blind draws come from it, and without one they are public pictures.
    """

    name: str
    case: str
    seed: int
    data: Dataset
    split: Fractions
    target: Training
    defenses: tuple[Defense, ...]
    evaluators: tuple[Training, ...]
    embedder: Training
    perceptual: Training
    prior: PriorMethod | None
    attacker_prior: PriorMethod | None
    amortizer: Amortizer
    attack: FeatureAttack
    judging: FeatureJudging

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "FeatureExperiment":
        """Build an experiment from nested plain values; raises one ConfigError that lists every problem."""
        reader = Reader(values)
        found = cls(
            name=reader.value("name", str, "features"),
            case=reader.value("case", str, ""),
            seed=reader.value("seed", int, 0),
            data=reader.method("data", datasets, {"name": "faces"}),
            split=reader.section("split", Fractions),
            target=reader.section("target", Training),
            defenses=reader.methods("defenses", defenses, []),
            evaluators=reader.sections(
                "evaluators", Training, [{"model": "resnet"}, {"model": "convmixer"}]
            ),
            embedder=reader.section("embedder", Training),
            perceptual=reader.section("perceptual", Training),
            prior=reader.method("prior", priors, {}) if "prior" in values else None,
            attacker_prior=reader.method("attacker_prior", priors, {})
            if "attacker_prior" in values
            else None,
            amortizer=reader.section("amortizer", Amortizer),
            attack=reader.method("attack", feature_attacks, {"name": "decoder"}),
            judging=reader.section("judging", FeatureJudging),
        )
        reader.problems += _problems(found, given="prior" in values)
        reader.finish(
            {field.name for field in fields(cls)},
            [defense for defense in found.defenses if defense is not None],
        )
        return found

    @property
    def training_defenses(self) -> tuple[Defense, ...]:
        """Those that act while the network is trained."""
        return tuple(defense for defense in self.defenses if not defense.releases)

    @property
    def protection(self) -> Defense | None:
        """The one that acts on what leaves the device, if there is one."""
        return next((defense for defense in self.defenses if defense.releases), None)

    def needs(self, asset: Asset) -> bool:
        """Whether anybody needs this."""
        return asset in self.attack.needs or any(
            asset in defense.needs for defense in self.defenses
        )


def _problems(found: FeatureExperiment, *, given: bool) -> list[str]:
    """What only the parts together can tell."""
    problems = []
    if found.target is not None and not found.target.cut:
        problems.append(
            'target.cut: required, and not given; name a layer, such as "stage1": what it puts out leaves the device'
        )
    elif found.target is not None and str(found.target.cut).lower() in ("none", "null"):
        problems.append(
            f'target.cut: {found.target.cut!r} names no layer; name one, such as "stage1", or audit the whole model: with a config that has no target.cut'
        )
    if found.target is not None and not found.target.attributes:
        problems.append(
            'target.attributes: required, and not given; name what the server should tell of a picture, or set ["all"]'
        )
    judges = {
        **{f"evaluators[{number}]": config for number, config in enumerate(found.evaluators)},
        "embedder": found.embedder,
        "perceptual": found.perceptual,
    }
    problems += [
        f"{where}: tells people apart, and is not cut: leave {name} out"
        for where, config in judges.items()
        for name in ("attributes", "cut")
        if config is not None and getattr(config, name)
    ]
    chosen = [defense for defense in found.defenses if defense is not None]
    if len(names := [defense.name for defense in chosen if defense.releases]) > 1:
        problems.append(
            f"defenses: {' and '.join(names)} both decide what leaves the device: keep one of them"
        )
    problems += [
        f"defenses: {defense.name} defends a classifier of people, and a split model tells attributes: leave it out"
        for defense in chosen
        if not defense.takes_attributes
    ]
    for section in ("prior", "attacker_prior"):
        method = getattr(found, section)
        if method is not None and method.tied:
            problems.append(
                f"{section}: {method.name} is fitted to a classifier of the attacked people, which features have none of: use another"
            )
    users: list[Any] = [user for user in chosen if user.needs & {"prior", "amortizer"}]
    if (
        found.attack is not None
        and found.attacker_prior is None
        and found.attack.needs & {"prior", "amortizer"}
    ):
        users.append(found.attack)
    if users and not given:
        problems.append(
            f'prior: {users[0].name} needs one, and none is given; set [prior], such as {{ name = "pretrained" }}'
        )
    return problems


def is_about_features(values: Mapping[str, Any]) -> bool:
    """Whether a config audits a split model: one that names a cut, alone, in its grid or in a case."""
    target, grid = values.get("target", {}), values.get("grid", {})
    if not isinstance(target, Mapping) or not isinstance(grid, Mapping):
        return False
    cases = grid.get("case", [])
    tables = [
        target,
        grid.get("target", {}),
        *(
            case.get("target", {})
            for case in (cases if isinstance(cases, list) else [])
            if isinstance(case, Mapping)
        ),
    ]
    return "target.cut" in grid or any(
        isinstance(table, Mapping) and "cut" in table for table in tables
    )


def feature_experiments(values: Mapping[str, Any]) -> list[tuple[str, FeatureExperiment]]:
    """All experiments of a config; the problems of all of them in one error."""
    found, problems = parsed(values, FeatureExperiment.parse)
    problems += _together([experiment for _, experiment in found])
    if problems:
        raise ConfigError(problems)
    return found


def _together(chosen: Sequence[FeatureExperiment]) -> list[str]:
    """What the experiments of one run must have in common, so that one table can hold them."""
    shared = ("data", "split", "evaluators", "embedder", "judging", "seed")
    differing = [
        name
        for name in shared
        if len({repr(getattr(experiment, name)) for experiment in chosen}) > 1
    ]
    return [
        f"grid: {name} must be the same in all experiments of one run: use several configs"
        for name in differing
    ]
