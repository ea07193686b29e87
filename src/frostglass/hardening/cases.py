"""The attacks of the final table: the config's, the usual ones, those that know a defense."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from frostglass.attacks._search.augmented import AugmentedDescent
from frostglass.attacks._search.chained import ChainedAttack
from frostglass.attacks._search.descent import Descent
from frostglass.attacks._search.wrapped import OWN, WrappedAttack
from frostglass.attacks.base import Attack, attacks
from frostglass.attacks.features.base import FeatureAttack
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.hybrid import Hybrid
from frostglass.attacks.features.latent import Latent
from frostglass.attacks.model.mirror import Mirror
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.run_folder import described
from frostglass.core.errors import ConfigError
from frostglass.defenses.base import defenses
from frostglass.priors.pretrained import Pretrained

POOL_PER_STEP = 20  # draws that MIRROR starts from for each of its steps, as in the demo's attack
STUDENT_DRAWS = 4000  # images of the prior that a student learns from
# A large step that shrinks: imitates better than the published 20 epochs, in a third of the time.
STUDENT_SCHEDULE = {"epochs": 6, "lr": 0.1, "decay": 0.3, "decay_every": 2}
GUESSES = 5  # of attacks that list several people
ROUNDS = 3  # of attacks in rounds: `unlearn` trains a copy of the network in each
PROTECTED, PROTECTED_EPOCHS = 64, 40  # images that A1 asks the device to protect, and its epochs
RELEASES = 2  # of the same images, which A3 averages
POOL = 200  # draws that a search of latents starts from the best of
STYLES = {"faces32": "styles32"}  # embedded priors, and the StyleGAN2 of the same people

Case = dict[str, Any]

PLAIN: Case = {"alone": False, "erase": 0.0, "subtract": 0.0}  # knows no defense


def model_cases(exp: Experiment, names: Iterable[str]) -> list[Case]:
    """Return the cases of a grid for models with these defenses: attacks, perhaps with a prior.

    An adaptive attack is a variant of the config's attack, or of MIRROR where the config's has no
    such variant, or an attack of its own, which takes that attack as its base if it wraps one.
    An attack that needs students gets some that imitate the target.
    """
    mirror = _mirror(exp)
    searches: list[tuple[Attack, Case]] = [(exp.attack, {}), (mirror, _styles(exp))]
    base, prior = (exp.attack, {}) if isinstance(exp.attack, Descent) else (mirror, _styles(exp))
    if isinstance(base, AugmentedDescent):  # units of a crowd and copies have no students
        base = replace(base, **PLAIN, students=False)
    cases = [_case(exp.attack.display_title, exp.attack, {})]
    if exp.attack.name != mirror.name:
        cases.append(_case(mirror.display_title, mirror, _styles(exp)))
    for name in dict.fromkeys(each for one in names for each in defenses.get(one).adaptive):
        varied = next((each for each in searches if name in each[0].variants), None)
        if varied:
            attack, own = varied
            changed = _varied(attack, name)
            if isinstance(changed, AugmentedDescent) and (changed.students or changed.subtract):
                own = _students(exp, own)
            cases.append(_case(f"{attack.display_title}, {name}", changed, own))
        elif name not in attacks.names():
            continue  # it is for attackers who see answers alone, and this one has the weights
        elif issubclass(attacks.get(name), WrappedAttack):
            kind = attacks.get(name)
            rounds = {"rounds": ROUNDS} if issubclass(kind, ChainedAttack) else {}
            wrapped = kind(base=_searching(base), keep=min(GUESSES, base.candidates), **rounds)
            cases.append(_case(wrapped.display_title, wrapped, prior))
        else:
            attack = _resized(attacks.get(name)(), exp.attack)
            cases.append(_case(attack.display_title, attack, {}))
    return _distinct(cases)


def feature_cases(exp: Experiment, names: Iterable[str]) -> list[Case]:
    """Return the cases of a grid for features with these protections.

    The config's attack, a decoder and a search that starts from it; with a prior also a search of
    its latents, which finds most behind later layers. If a protection acts on what leaves the
    device, also decoders that know it: trained on what it releases for other images (A1), and given
    the mean of several releases (A3). And each in the variants that know a protection.
    """
    protections = [defenses.get(name) for name in names]
    decoder = _decoder(exp.attack)
    own = {key: value for key, value in asdict(decoder).items() if value != vars(Decoder())[key]}
    usual: list[FeatureAttack] = [decoder, Hybrid(starter=own)]
    if exp.prior or exp.attacker_prior:
        usual.append(Latent(pool=POOL, tries=1))
    adaptive = dict.fromkeys(name for each in protections for name in each.adaptive)
    knowing = [_knowing(each, name) for name in adaptive for each in usual if name in each.variants]
    if any(protection.releases for protection in protections):
        usual.append(replace(decoder, adapt=PROTECTED, adapt_epochs=PROTECTED_EPOCHS))
        usual.append(replace(decoder, averaged=RELEASES))
    cases: dict[str, Case] = {}
    for attack in [exp.attack, *usual, *knowing]:
        title = _feature_title(attack)
        cases.setdefault(title, _case(title, attack, {}))  # the config's comes first, and stays
    return list(cases.values())


def _knowing(attack: FeatureAttack, name: str) -> FeatureAttack:
    """Return a variant of an attack on features with its other settings, and its starter's."""
    varied = dict(attack.variants[name][1])
    if isinstance(attack, Hybrid):
        varied["starter"] = attack.starter | varied.get("starter", {})
    return replace(attack, **varied)


def _decoder(attack: Attack) -> Decoder:
    """Return a decoder with the settings of the config's, without knowledge of a protection."""
    if isinstance(attack, Hybrid) and attack.first is not None:
        attack = attack.first
    if isinstance(attack, Decoder):
        return replace(attack, adapt=0, averaged=1, unit_channels=False)
    return Decoder()


def _feature_title(attack: Attack) -> str:
    assert isinstance(attack, FeatureAttack)  # the surface of an experiment and its attack agree
    fields = vars(attack)
    knows = {
        "A1": attack.protected_images > 0,
        "A3": attack.releases > 1,
        "channels": fields.get("gap") == "channels" or fields.get("unit_channels") is True,
    }
    return ", ".join([attack.display_title, *(name for name in knows if knows[name])])


def given_cases(tables: Sequence[Mapping[str, Any]], prior: str) -> list[Case]:
    """Check the cases that a user gives: each has a name and an attack, and perhaps a prior."""
    for number, table in enumerate(tables):
        if not isinstance(table, Mapping):
            raise ConfigError(f"attacks[{number}]: expected a table, got {table!r}")
        unknown = sorted(set(table) - {"case", "attack", prior})
        if unknown or not isinstance(table.get("case"), str) or "attack" not in table:
            raise ConfigError(
                f'attacks[{number}]: expected {{ case = "NAME", attack = {{ ... }} }}, perhaps '
                f"with {prior}; got {', '.join(table) or 'an empty table'}"
            )
    if not tables:
        raise ConfigError("attacks: expected at least one case, got none")
    return [dict(table) for table in tables]


def _mirror(exp: Experiment) -> Mirror:
    """Return MIRROR with the budget of the config's attack, where that has one to compare."""
    if isinstance(exp.attack, Mirror):
        return exp.attack
    steps = exp.attack.steps if isinstance(exp.attack, Descent) else 150
    mirror = _resized(Mirror(steps=steps, pool=POOL_PER_STEP * max(steps, 10)), exp.attack)
    return mirror if isinstance(mirror, Mirror) else Mirror()


def _resized(attack: Attack, like: Attack) -> Attack:
    """Return an attack by gradients with candidates, batch size and patience of another."""
    if isinstance(attack, Descent) and isinstance(like, Descent):
        return replace(
            attack,
            candidates=like.candidates,
            keep=min(like.keep, like.candidates),
            batch=like.batch,
            patience=like.patience,
        )
    return attack


def _varied(attack: Attack, name: str) -> Attack:
    """Return a variant of an attack with its other settings, but none for other defenses."""
    plain = PLAIN if isinstance(attack, AugmentedDescent) else {}
    try:
        return type(attack)(**{**vars(attack), **plain, **attack.variants[name][1]})
    except ConfigError as error:
        raise ConfigError(
            f"attack: its variant {name!r} knows a defense that is tuned: {error}"
        ) from error


def _searching(base: Attack) -> dict[str, Any]:
    """Return an attack as the base of another, which has its own number of candidates."""
    return {key: value for key, value in described(base).items() if key not in OWN}


def _students(exp: Experiment, prior: Case) -> Case:
    """Return a prior with a student of the target's architecture, beside the attack's own prior."""
    if exp.prior is None or exp.prior.tied:
        return prior
    student = {"model": exp.target.model, "options": exp.target.options}
    table = {"name": "students", "students": [student], "draws": STUDENT_DRAWS, "statistics": 0}
    base = prior.get("prior") or described(exp.prior)
    return {"prior": {**table, **STUDENT_SCHEDULE, "base": base}}


def _styles(exp: Experiment) -> Case:
    """Return a StyleGAN2 as the prior of MIRROR, if the config's prior is embedded beside one."""
    if isinstance(exp.prior, Pretrained) and exp.prior.weights in STYLES:
        return {"prior": described(replace(exp.prior, weights=STYLES[exp.prior.weights]))}
    return {}


def _case(name: str, attack: Attack, prior: Case) -> Case:
    return {"case": name, "attack": described(attack), **prior}


def _distinct(cases: Sequence[Case]) -> list[Case]:
    """Leave out attacks that differ from an earlier one in name alone."""
    kept: list[Case] = []
    for case in cases:
        rest = {key: value for key, value in case.items() if key != "case"}
        if all(rest != {k: v for k, v in one.items() if k != "case"} for one in kept):
            kept.append(case)
    return kept
