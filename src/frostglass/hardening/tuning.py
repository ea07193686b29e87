"""Trials on models of the first half of the people, with evaluators and seeds of their own."""

from dataclasses import replace
from functools import partial

from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import audit
from frostglass.auditing.results import Audit
from frostglass.auditing.run_folder import described as as_table
from frostglass.core.errors import RunError
from frostglass.data._impostors import HELD_OUT
from frostglass.data._splits import MIN_IMAGES
from frostglass.data.half import Half
from frostglass.evaluators.embedder import FEWEST, PUBLIC, Embedder
from frostglass.hardening.goal import Goal
from frostglass.hardening.space import Candidate, Values, built
from frostglass.hardening.study import Outcome
from frostglass.plan.problems import problems
from frostglass.store.store import Store
from frostglass.training.settings import Training
from frostglass.workers.schedule import only_result

SEED_DISTANCE = 1_000_000  # between the seeds of tuning and those of the final table


def half(exp: Experiment, which: str) -> Half:
    """Return half of the people of an experiment's data."""
    return Half(of=as_table(exp.data), which=which)  # type: ignore[arg-type]


def tuning_experiment(exp: Experiment) -> Experiment:
    """Return the experiment of a trial, without its defenses.

    It shares no trained network with the final table: another seed, other people, and no embedder
    that is read from a file, because the final table is decided by it. One that is trained on the
    public people takes its place, if there are enough of them. Audits of features also compare
    images by `exp.embedder`, which is trained again for the same reason.
    """
    embedder = exp.embedder
    if exp.surface == "features":
        embedder = replace(embedder, weights=None, classes=())
    return replace(
        exp,
        name=f"{exp.name}, tuning",
        seed=exp.seed + SEED_DISTANCE,
        data=half(exp, "first"),
        evaluators=_own_evaluators(exp),
        embedder=embedder,
    )


def _own_evaluators(exp: Experiment) -> tuple[Training | Embedder, ...]:
    classifiers = [each for each in exp.evaluators if isinstance(each, Training)]
    embedders = [each for each in exp.evaluators if isinstance(each, Embedder)]
    trained = [each for each in classifiers if not each.weights]
    people = [count for number, count in enumerate(exp.data.public_people()) if number % HELD_OUT]
    if not embedders or sum(count >= MIN_IMAGES for count in people) < FEWEST:
        return tuple(trained)
    return (*trained, Embedder(source=PUBLIC, training=embedders[0].training))


class Tuner:
    """Evaluates defenses by an ordinary audit; models that miss the utility are not attacked."""

    def __init__(self, exp: Experiment, store: Store, goal: Goal):
        self.exp, self.store, self.goal = tuning_experiment(exp), store, goal

    def undefended(self) -> Outcome:
        """Attack the undefended model; raise if the attack does not break it."""
        result = only_result(partial(audit, self.exp), self.store)
        if reason := self.goal.unproven(result):
            raise RunError(f"nothing can be tuned: {reason}")
        return _measured(result, self._utility(self.exp), self.goal)

    def __call__(self, candidate: Candidate, values: Values) -> Outcome:
        exp, goal = replace(self.exp, defenses=built(candidate.tables(values))), self.goal
        if lines := problems([(candidate.title, exp)]):
            return Outcome(reason="; ".join(lines))
        utility = None
        try:
            utility = self._utility(exp)
            if utility < goal.least:
                return Outcome(utility, reason=f"misses the {goal.key}")
            result = only_result(partial(audit, exp), self.store)
        except RunError as error:
            return Outcome(utility, reason=f"failed: {error}")
        if reason := goal.unproven(result):
            return Outcome(utility, reason=f"vacuous: {reason}")
        return _measured(result, utility, goal)

    def _utility(self, exp: Experiment) -> float:
        return only_result(partial(self.goal.utility, exp), self.store)


def _measured(result: Audit, utility: float, goal: Goal) -> Outcome:
    """Return what an audit says about the leak, beside a utility."""
    score = goal.leaked(result)
    return Outcome(utility, score.value, score.low, score.high, goal.similarity(result))
