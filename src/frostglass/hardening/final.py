"""The final table: models of the other half of the people and of everybody, and all attacks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frostglass.auditing.expand import UNDEFENDED
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.run import Run as AuditRun
from frostglass.auditing.run import run_all
from frostglass.auditing.run_folder import described as as_table
from frostglass.auditing.run_folder import write_run
from frostglass.core.errors import RunError
from frostglass.hardening.cases import Case
from frostglass.hardening.goal import Goal
from frostglass.hardening.space import Values, built, described
from frostglass.hardening.study import Trial
from frostglass.hardening.tuning import half
from frostglass.report.load import Run, read_run
from frostglass.report.seeds import SeedRow, Share, seed_rows
from frostglass.store.store import Store

OTHER_HALF, EVERYBODY = "second half", "everybody"
POPULATIONS = (OTHER_HALF, EVERYBODY)
MOST_FINALISTS = 4  # each costs a model and all attacks for every population and seed
MOST_TRIES = 3  # settings of one candidate whose model of everybody is trained


@dataclass(frozen=True)
class Finalist:
    """The settings of a candidate that leaked least in tuning and keep the utility.

    `utility` is that of the model of everybody with the first seed, which is the one to ship.
    """

    trial: Trial
    utility: float

    @property
    def title(self) -> str:
        return self.trial.candidate.title

    @property
    def tables(self) -> list[Values]:
        return self.trial.tables


@dataclass(frozen=True)
class Model:
    """A model in the final table: utility, and what its strongest attacks reach.

    `leak` is that of the strongest attack, `widest` the highest of any: see the goal.
    """

    title: str
    settings: list[Values]
    utility: Share
    leak: Share
    widest: Share
    attack: str
    rows: Mapping[str, SeedRow]


@dataclass(frozen=True)
class Final:
    """The models of each population.

    `failed` says which audits are missing, `vacuous` which populations prove nothing: those where
    no attack breaks the undefended model with every seed.
    """

    models: Mapping[str, list[Model]]
    runs: tuple[Run, ...]
    folders: tuple[Path, ...]
    failed: tuple[str, ...]
    vacuous: tuple[str, ...]


def finalists(trials: Sequence[Trial], exp: Experiment, store: Store, goal: Goal) -> list[Finalist]:
    """Return the settings to compare, the least leak in tuning first.

    Of each candidate the first settings whose model of everybody reaches the utility. Only tuning
    and utility decide, so that the evaluators of the final table select nothing.
    """
    attacked = [trial for trial in trials if trial.outcome.leak is not None]
    if not attacked:
        raise RunError(_nothing(trials, goal))
    ranked = sorted(attacked, key=lambda trial: trial.outcome.rank)
    found: list[Finalist] = []
    tried: list[Finalist] = []
    for title in dict.fromkeys(trial.candidate.title for trial in ranked):
        if len(found) == MOST_FINALISTS:
            break
        for trial in [each for each in ranked if each.candidate.title == title][:MOST_TRIES]:
            defended = replace(exp, defenses=built(trial.tables))
            tried.append(Finalist(trial, goal.utility(defended, store)))
            if tried[-1].utility >= goal.least:
                found.append(tried[-1])
                break
    if not found:
        best = max(tried, key=lambda each: each.utility)
        raise RunError(
            f"no defended model of everybody reaches an {goal.title} of {goal.text(goal.least)}: "
            f"the best is {described(best.tables)} with {goal.text(best.utility)}. Accept less "
            f"{goal.key}, raise --budget, or train longer."
        )
    return sorted(found, key=lambda each: each.trial.outcome.rank)


def _nothing(trials: Sequence[Trial], goal: Goal) -> str:
    measured = [trial for trial in trials if trial.outcome.utility is not None]
    if not measured:
        reason = trials[0].outcome.reason if trials else "there was no time for a trial"
        return (
            f"no defended model could be trained: {reason}. Raise --budget, or change --defenses."
        )
    best = max(measured, key=lambda trial: trial.outcome.utility or 0.0)
    return (
        f"no defended model reaches an {goal.title} of {goal.text(goal.least)} in {len(trials)} "
        f"trials: the best is {described(best.tables)} with "
        f"{goal.text(best.outcome.utility or 0.0)} ({best.outcome.reason}). Accept less "
        f"{goal.key}, raise --budget, or train longer."
    )


def final_settings(
    settings: Mapping[str, Any],
    exp: Experiment,
    population: str,
    defenses: Sequence[Sequence[Values]],
    cases: Sequence[Case],
    seeds: int,
) -> list[dict[str, Any]]:
    """Return the configs of one population: grids of models and attacks, and of seeds.

    A run on features shows one set of attacked images, drawn with its seed: each seed has its own.
    """
    chosen = ("name", "case", "seed", "data", "defenses", "attack", "grid")
    values = {key: value for key, value in settings.items() if key not in chosen}
    for key in ("prior", "attacker_prior"):
        if all(key in case for case in cases):
            values.pop(key, None)  # a value that no case uses is refused
    data = exp.data if population == EVERYBODY else half(exp, "second")
    values |= {"name": f"{exp.name}, {population}", "data": as_table(data)}
    grid = {"defenses": [[], *(list(tables) for tables in defenses)], "case": list(cases)}
    numbers = [exp.seed + number for number in range(seeds)]
    if exp.surface == "model":
        return [values | {"grid": grid | {"seed": numbers}}]
    return [values | {"seed": number, "grid": grid} for number in numbers]


def measure_final(
    settings: Mapping[str, Sequence[Mapping[str, Any]]],
    chosen: Sequence[Finalist],
    store: Store,
    out: Path,
    goal: Goal,
) -> Final:
    """Run the grids of every population, write their run folders, and summarise them by model."""
    models: dict[str, list[Model]] = {}
    runs: list[Run] = []
    folders: list[Path] = []
    failed: list[str] = []
    vacuous: list[str] = []
    for population, configs in settings.items():
        results = []
        for values in configs:
            results.append(run_all(values, store))
            where = population + (f", seed {values['seed']}" if "seed" in values else "")
            folder = out / "final" / where.replace(",", "").replace(" ", "-")
            folders.append(write_run(results[-1], folder))
            runs.append(read_run(folder))
            failed += [f"{where}: {reason}" for reason in results[-1].failed]
        models[population] = summarised(runs[-len(configs) :], chosen, goal)
        vacuous += [f"{population}: {reason}" for reason in _unsound(results, goal)]
    return Final(models, tuple(runs), tuple(folders), tuple(failed), tuple(vacuous))


def _unsound(results: Sequence[AuditRun], goal: Goal) -> list[str]:
    """Return why no attack on a population can be believed; empty if one can, in all its audits."""
    cases: set[str] = set()
    unproven: dict[str, str] = {}
    for result in results:
        for label, audit in zip(result.labels, result.audits, strict=True):
            cases.add(audit.experiment.case)
            if reason := goal.unproven(audit):
                unproven.setdefault(audit.experiment.case, f"{label}: {reason}")
    return list(unproven.values())[:1] if cases == set(unproven) else []


def summarised(runs: Sequence[Run], chosen: Sequence[Finalist], goal: Goal) -> list[Model]:
    """Return each model of joined runs with its strongest attack; the undefended one is first."""
    rows = {row.label: row for row in seed_rows(runs)}
    known = [(UNDEFENDED, []), *((each.title, each.tables) for each in chosen)]
    models = []
    for title, tables in known:
        own = {
            label.removeprefix(f"{title}, "): row
            for label, row in rows.items()
            if label.startswith(f"{title}, ")
        }
        if own:
            models.append(_model(title, tables, own, goal))
    return models


def _model(title: str, tables: list[Values], rows: Mapping[str, SeedRow], goal: Goal) -> Model:
    attack = max(rows, key=lambda case: goal.strength(rows[case].shares))
    strongest = rows[attack].shares
    widest = max((row.shares[goal.widest.title] for row in rows.values()), key=lambda s: s.value)
    utility, leak = strongest[goal.title], strongest[goal.leak.title]
    return Model(title, tables, utility, leak, widest, attack, rows)


def dominated(models: Sequence[Model]) -> dict[str, str]:
    """Return the defenses that another one beats: at least as useful, leaking no more.

    Each with the one that beats it by the least leak; equal ones do not beat each other.
    """

    def beats(one: Model, other: Model) -> bool:
        gains = one.utility.value - other.utility.value, other.leak.value - one.leak.value
        return min(gains) >= 0 and max(gains) > 0

    beaten = {}
    for model in models:
        better = [other for other in models if beats(other, model)]
        if model.title != UNDEFENDED and better:
            beaten[model.title] = min(better, key=lambda each: each.leak.value).title
    return beaten
