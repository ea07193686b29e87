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
from frostglass.hardening.space import Values, built, described
from frostglass.hardening.study import Trial
from frostglass.hardening.tuning import half, held_out, trained
from frostglass.report.load import Run, read_run
from frostglass.report.seeds import SeedRow, Share, seed_rows
from frostglass.store.store import Store

OTHER_HALF, EVERYBODY = "second half", "everybody"
POPULATIONS = (OTHER_HALF, EVERYBODY)
MOST_FINALISTS = 4  # each costs a model and all attacks for every population and seed
MOST_TRIES = 3  # settings of one candidate whose model of everybody is trained
FIRST, ANY = "verified, first", "verified, any"


@dataclass(frozen=True)
class Finalist:
    """The settings of a candidate that leaked least in tuning and keep the accuracy.

    `accuracy` is that of the model of everybody with the first seed, which is the one to ship.
    """

    trial: Trial
    accuracy: float

    @property
    def title(self) -> str:
        return self.trial.candidate.title

    @property
    def tables(self) -> list[Values]:
        return self.trial.tables


@dataclass(frozen=True)
class Model:
    """A model in the final table: accuracy, and what its strongest attacks reach."""

    title: str
    settings: list[Values]
    accuracy: Share
    leak: Share
    any: Share
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


def finalists(
    trials: Sequence[Trial], exp: Experiment, store: Store, accuracy: float
) -> list[Finalist]:
    """Return the settings to compare, the least leak in tuning first.

    Of each candidate the first settings whose model of everybody reaches the accuracy. Only tuning
    and accuracy decide, so that the evaluators of the final table select nothing.
    """
    attacked = [trial for trial in trials if trial.outcome.leak is not None]
    if not attacked:
        raise RunError(_nothing(trials, accuracy))
    ranked = sorted(attacked, key=_rank)
    found: list[Finalist] = []
    tried: list[Finalist] = []
    for title in dict.fromkeys(trial.candidate.title for trial in ranked):
        if len(found) == MOST_FINALISTS:
            break
        for trial in [each for each in ranked if each.candidate.title == title][:MOST_TRIES]:
            tried.append(_finalist(trial, exp, store))
            if tried[-1].accuracy >= accuracy:
                found.append(tried[-1])
                break
    if not found:
        best = max(tried, key=lambda each: each.accuracy)
        raise RunError(
            f"no defended model of everybody reaches an accuracy of {accuracy:.1%}: the best is "
            f"{described(best.tables)} with {best.accuracy:.1%}. Accept less accuracy, raise "
            "--budget, or train longer."
        )
    return sorted(found, key=lambda each: _rank(each.trial))


def _rank(trial: Trial) -> tuple[float, float]:
    outcome = trial.outcome
    return outcome.leak or 0.0, -(outcome.accuracy or 0.0)


def _finalist(trial: Trial, exp: Experiment, store: Store) -> Finalist:
    defended = replace(exp, defenses=built(trial.tables))
    return Finalist(trial, held_out(trained(defended, store)))


def _nothing(trials: Sequence[Trial], accuracy: float) -> str:
    measured = [trial for trial in trials if trial.outcome.accuracy is not None]
    if not measured:
        reason = trials[0].outcome.reason if trials else "there was no time for a trial"
        return (
            f"no defended model could be trained: {reason}. Raise --budget, or change --defenses."
        )
    best = max(measured, key=lambda trial: trial.outcome.accuracy or 0.0)
    return (
        f"no defended model reaches an accuracy of {accuracy:.1%} in {len(trials)} trials: the "
        f"best is {described(best.tables)} with {best.outcome.accuracy:.1%} "
        f"({best.outcome.reason}). Accept less accuracy, raise --budget, or train longer."
    )


def final_settings(
    settings: Mapping[str, Any],
    exp: Experiment,
    population: str,
    defenses: Sequence[Sequence[Values]],
    cases: Sequence[Case],
    seeds: int,
) -> dict[str, Any]:
    """Return the config of one population's grid: models, attacks and seeds."""
    chosen = ("name", "case", "seed", "data", "defenses", "attack", "grid")
    values = {key: value for key, value in settings.items() if key not in chosen}
    if all("prior" in case for case in cases):
        values.pop("prior", None)  # a value that no case uses is refused
    data = exp.data if population == EVERYBODY else half(exp, "second")
    grid = {
        "defenses": [[], *(list(tables) for tables in defenses)],
        "case": list(cases),
        "seed": [exp.seed + number for number in range(seeds)],
    }
    return values | {"name": f"{exp.name}, {population}", "data": as_table(data), "grid": grid}


def measure_final(
    settings: Mapping[str, Mapping[str, Any]], chosen: Sequence[Finalist], store: Store, out: Path
) -> Final:
    """Run the grid of every population, write its run folder, and summarise it by model."""
    models, runs, folders = {}, [], []
    failed: list[str] = []
    vacuous: list[str] = []
    for population, values in settings.items():
        result = run_all(values, store)
        folders.append(write_run(result, out / "final" / population.replace(" ", "-")))
        runs.append(read_run(folders[-1]))
        models[population] = summarised(runs[-1], chosen)
        failed += [f"{population}: {reason}" for reason in result.failed]
        vacuous += [f"{population}: {reason}" for reason in _unsound(result)]
    return Final(models, tuple(runs), tuple(folders), tuple(failed), tuple(vacuous))


def _unsound(result: AuditRun) -> list[str]:
    """Return why no attack of a run can be believed; empty if one can, in all its audits."""
    cases: dict[str, list[str]] = {}
    for audit in result.audits:
        cases.setdefault(audit.experiment.case, []).append(audit.controls.vacuous)
    return [] if any(not any(reasons) for reasons in cases.values()) else result.vacuous[:1]


def summarised(run: Run, chosen: Sequence[Finalist]) -> list[Model]:
    """Return each model of a run with its strongest attack; the undefended one comes first."""
    rows = {row.label: row for row in seed_rows([run])}
    known = [(UNDEFENDED, []), *((each.title, each.tables) for each in chosen)]
    models = []
    for title, tables in known:
        own = {
            label.removeprefix(f"{title}, "): row
            for label, row in rows.items()
            if label.startswith(f"{title}, ")
        }
        if own:
            models.append(_model(title, tables, own))
    return models


def _model(title: str, tables: list[Values], rows: Mapping[str, SeedRow]) -> Model:
    attack = max(rows, key=lambda case: rows[case].shares[FIRST].value)
    strongest = rows[attack].shares
    widest = max((row.shares[ANY] for row in rows.values()), key=lambda share: share.value)
    return Model(title, tables, strongest["accuracy"], strongest[FIRST], widest, attack, rows)


def dominated(models: Sequence[Model]) -> dict[str, str]:
    """Return the defenses that another one beats: at least as accurate, leaking no more.

    Each with the one that beats it by the least leak; equal ones do not beat each other.
    """

    def beats(one: Model, other: Model) -> bool:
        gains = one.accuracy.value - other.accuracy.value, other.leak.value - one.leak.value
        return min(gains) >= 0 and max(gains) > 0

    beaten = {}
    for model in models:
        better = [other for other in models if beats(other, model)]
        if model.title != UNDEFENDED and better:
            beaten[model.title] = min(better, key=lambda each: each.leak.value).title
    return beaten
