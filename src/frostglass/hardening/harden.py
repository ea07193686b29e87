"""The best defense at a utility that the user accepts, with the evidence for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.reader import Reader
from frostglass.auditing.run_folder import described as as_table
from frostglass.core.errors import ConfigError
from frostglass.core.method import Method
from frostglass.data.half import FEWEST
from frostglass.defenses.base import defenses as registered
from frostglass.hardening.budget import SearchBudget
from frostglass.hardening.cases import Case, given_cases
from frostglass.hardening.final import (
    EVERYBODY,
    POPULATIONS,
    Final,
    Finalist,
    final_settings,
    finalists,
    measure_final,
)
from frostglass.hardening.goal import Goal, goal_of
from frostglass.hardening.output import Findings, write_results
from frostglass.hardening.space import Candidate, Tunable, Values, built, candidates, each_once
from frostglass.hardening.study import (
    Outcome,
    Study,
    Trial,
    Watch,
    check_settings,
    open_study,
    optuna_module,
    unwatched,
)
from frostglass.hardening.tuning import Tuner, tuning_experiment
from frostglass.plan.problems import problems
from frostglass.store.keys import fingerprint, plain
from frostglass.store.store import Store
from frostglass.training.settings import Training

SEARCH = "2h"  # of trials, by default
SEEDS = 3


@dataclass(frozen=True)
class Plan:
    """Everything that a hardening is asked for, after all that can be checked was checked."""

    settings: Mapping[str, Any]
    exp: Experiment
    goal: Goal
    candidates: tuple[Candidate, ...]
    budget: SearchBudget
    seeds: int
    attacks: tuple[Case, ...]  # none: the default ones
    left_out: Mapping[str, str] = field(default_factory=dict)  # attacks, pairs, with the reason

    def cases(self, names: Sequence[str]) -> list[Case]:
        """Return the attacks of a final table with these defenses."""
        known = list(self.attacks) or self.goal.cases(self.exp, names)
        return [case for case in known if case["case"] not in self.left_out]

    def study_settings(self) -> dict[str, Any]:
        """Return what the trials depend on, as plain values; budget and seeds may change."""
        (values,) = plain(tuning_experiment(self.exp), "experiment", False).values()
        return {
            **values,
            "files": fingerprint(self.exp.data),
            **self.goal.asked(),
            "defenses": {
                each.title: plain(each.ranges, "ranges", False) | _given(each)
                for each in self.candidates
            },
        }


@dataclass(frozen=True)
class Hardening:
    """What a hardening found: its trials, the finalists (recommended first), the final table."""

    folder: Path
    recommended: Finalist
    finalists: tuple[Finalist, ...]
    trials: tuple[Trial, ...]
    final: Final
    facts: Mapping[str, Any]


def plan_hardening(
    settings: Mapping[str, Any],
    goal: Goal,
    *,
    defenses: Sequence[str] | None = None,
    budget: str = SEARCH,
    seeds: int = SEEDS,
    attacks: Sequence[Mapping[str, Any]] | None = None,
) -> Plan:
    """Check everything that can be checked without computing; raise the problems found."""
    optuna_module()
    if seeds < 1:
        raise ConfigError(f"seeds: expected at least 1, got {seeds}")
    bases = _bases(settings)
    settings = {key: value for key, value in settings.items() if key != "defenses"}
    exp = _one(settings, goal)
    people = exp.data.counts()[0]
    if people < FEWEST:
        raise ConfigError(
            f"data: strengths are tuned on one half of the people and measured on the other, which "
            f"needs at least {FEWEST}; got {people}"
        )
    secret = (len(exp.data.secret_people()) + exp.split.secret) // 2
    tunable = Tunable(goal.surface, people // 2, secret)
    names = (
        defenses
        or [base["name"] for base in bases]
        or [name for name in goal.preferred(exp) if tunable.ranges(name)]
    )
    chosen = candidates(names, tunable, bases)
    for each in chosen:  # refuses what a defense lacks, such as a prior
        Experiment.parse({**settings, "defenses": each.tables(each.first())})
    plan = Plan(
        settings,
        exp,
        goal,
        tuple(chosen),
        SearchBudget.parse(budget),
        seeds,
        tuple(given_cases(attacks, goal.prior)) if attacks is not None else (),
    )
    plan = replace(plan, left_out=_impossible(plan))
    if problems(_planned(plan)):
        plan = _without_misfits(plan)
    if lines := problems(_planned(plan)):
        raise ConfigError(lines)
    return plan


def harden(
    settings: Mapping[str, Any],
    store: Store,
    out: Path | str,
    *,
    accuracy: float | None = None,
    utility: float | None = None,
    measure: str = "mcc",
    defenses: Sequence[str] | None = None,
    budget: str = SEARCH,
    seeds: int = SEEDS,
    attacks: Sequence[Mapping[str, Any]] | None = None,
    redact: bool = False,
    watch: Watch = unwatched,
) -> Hardening:
    """Tune defenses to the least verified leak at a utility, and measure the best on others.

    `settings` are those of an ordinary audit without a grid; its defenses, if any, are those to
    tune, with the parameters that are not tuned, unless `defenses` names others. Of a model give
    the least
    `accuracy` that you accept; of features the least `utility` of the server's answers, `measure`
    being "mcc" or "auc". `out` gets the recommended model, the frontier, tables and the report; a
    stopped call resumes from it and from the store. `attacks` are the cases of the final table: a
    name, an attack, perhaps a prior. `watch` is called when a trial starts and when it is finished.
    """
    plan = plan_hardening(
        settings,
        goal_of(accuracy, utility, measure),
        defenses=defenses,
        budget=budget,
        seeds=seeds,
        attacks=attacks,
    )
    return run_plan(plan, store, Path(out), redact=redact, watch=watch)


def run_plan(
    plan: Plan,
    store: Store,
    out: Path,
    *,
    redact: bool = False,
    watch: Watch = unwatched,
) -> Hardening:
    """Tune, measure the finalists on other people, and write everything below `out`."""
    check_settings(out, plan.study_settings())
    goal = plan.goal
    reached = goal.utility(plan.exp, store)
    if goal.least > reached:
        raise ConfigError(
            f"{goal.key}: the undefended model reaches {goal.text(reached)}, asked for "
            f"{goal.text(goal.least)}: accept less, or train it longer (target.epochs)"
        )
    tuner = Tuner(plan.exp, store, goal)
    baseline = tuner.undefended()
    settings = plan.study_settings()
    with open_study(out, plan.candidates, settings, goal=goal, seed=tuner.exp.seed) as study:
        study.run(tuner, plan.budget, watch)
        return _conclude(plan, study, store, out, baseline, redact=redact)


def _conclude(
    plan: Plan, study: Study, store: Store, out: Path, baseline: Outcome, *, redact: bool
) -> Hardening:
    trials = study.trials()
    chosen = finalists(trials, plan.exp, store, plan.goal)
    names = dict.fromkeys(name for each in chosen for name in each.trial.candidate.names)
    cases = plan.cases(list(names))
    settings = {
        population: final_settings(
            plan.settings, plan.exp, population, [e.tables for e in chosen], cases, plan.seeds
        )
        for population in POPULATIONS
    }
    final = measure_final(settings, chosen, store, out, plan.goal)
    recommended = replace(plan.exp, defenses=built(chosen[0].tables))
    findings = Findings(
        name=plan.exp.name,
        goal=plan.goal,
        seeds=plan.seeds,
        chosen=chosen,
        trials=trials,
        final=final,
        baseline=baseline,
        left_out=plan.left_out,
        deliver=lambda folder: plan.goal.deliver(recommended, store, folder),
    )
    facts = write_results(out, findings, redact=redact)
    return Hardening(out, chosen[0], tuple(chosen), tuple(trials), final, facts)


def _given(candidate: Candidate) -> dict[str, Any]:
    """Return what the config says of a candidate's defenses, if it says more than their names."""
    given = [base for base in candidate.bases if len(base) > 1]
    return {"given": given} if given else {}


def _bases(settings: Mapping[str, Any]) -> list[Values]:
    """Read the defenses of a config as tables; unlike those of an audit they act one by one."""
    reader = Reader(settings)
    methods = reader.methods("defenses", registered, [])
    if reader.problems:
        raise ConfigError(reader.problems)
    each_once([method.name for method in methods])
    return [
        as_table(given) if isinstance(given, Method) else dict(given)
        for given in settings.get("defenses", [])
    ]


def _one(settings: Mapping[str, Any], goal: Goal) -> Experiment:
    """Read the one experiment of a config, and refuse what a hardening sets itself."""
    if "grid" in settings:
        raise ConfigError(
            "grid: hardening takes a config of one experiment: remove [grid], and name what to "
            "tune in `defenses = [...]` or with --defenses"
        )
    ((_, exp),) = experiments(settings)
    goal.check(exp)
    if exp.target.weights:
        raise ConfigError(
            "target.weights: hardening trains models, and these weights are loaded without "
            "training: remove target.weights"
        )
    for number, each in enumerate(exp.evaluators):
        if isinstance(each, Training) and each.weights:
            raise ConfigError(
                f"evaluators[{number}].weights: hardening needs classifiers of half of the people, "
                "which it trains: remove the weights"
            )
    if exp.judging.positive_control is not True:
        raise ConfigError("judging.positive_control: hardening needs it: remove the setting")
    return exp


def _impossible(plan: Plan) -> dict[str, str]:
    """Return the attacks that the user did not ask for and the prior does not allow."""
    if plan.attacks:
        return {}
    names = [name for each in plan.candidates for name in each.names]
    reasons = {}
    for case in plan.cases(names)[1:]:  # the first is the config's own
        (settings,) = final_settings(plan.settings, plan.exp, EVERYBODY, [], [case], 1)
        if lines := problems(experiments(settings)):
            reasons[case["case"]] = lines[0]
    return reasons


def _without_misfits(plan: Plan) -> Plan:
    """Leave out the pairs that do not fit this network; either defense alone may."""
    tuning, reasons = tuning_experiment(plan.exp), {}
    for each in plan.candidates:
        exp = replace(tuning, defenses=built(each.tables(each.first())))
        if len(each.names) > 1 and (lines := problems([(each.title, exp)])):
            reasons[each.title] = lines[0]
    kept = tuple(each for each in plan.candidates if each.title not in reasons)
    return replace(plan, candidates=kept, left_out={**plan.left_out, **reasons})


def _planned(plan: Plan) -> list[tuple[str, Experiment]]:
    """Return the experiments that are known before the search: enough to find what cannot work."""
    tuning = tuning_experiment(plan.exp)
    planned = [
        (each.title, replace(tuning, defenses=built(each.tables(each.first()))))
        for each in plan.candidates
    ]
    names = list(dict.fromkeys(name for each in plan.candidates for name in each.names))
    for population in POPULATIONS:
        (settings,) = final_settings(plan.settings, plan.exp, population, [], plan.cases(names), 1)
        planned += experiments(settings)
    return planned
