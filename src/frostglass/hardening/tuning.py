"""Trials on models of the first half of the people, with evaluators and seeds of their own."""

from dataclasses import replace
from typing import Any

from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import audit, expose
from frostglass.auditing.results import Audit
from frostglass.auditing.run_folder import described as as_table
from frostglass.auditing.steps import SPLIT
from frostglass.core.errors import RunError
from frostglass.core.types import Target
from frostglass.data._impostors import HELD_OUT
from frostglass.data._splits import MIN_IMAGES
from frostglass.data.half import Half
from frostglass.evaluators.embedder import FEWEST, PUBLIC, Embedder
from frostglass.hardening.space import Candidate, Values, built
from frostglass.hardening.study import Outcome
from frostglass.metrics.base import Score
from frostglass.plan.problems import problems
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store
from frostglass.training.settings import Training

SEED_DISTANCE = 1_000_000  # between the seeds of tuning and those of the final table


def half(exp: Experiment, which: str) -> Half:
    """Return half of the people of an experiment's data."""
    return Half(of=as_table(exp.data), which=which)  # type: ignore[arg-type]


def tuning_experiment(exp: Experiment) -> Experiment:
    """Return the experiment of a trial, without its defenses.

    It shares no trained network with the final table: another seed, other people, and no embedder
    that is read from a file, because the final table is decided by it. One that is trained on the
    public people takes its place, if there are enough of them.
    """
    return replace(
        exp,
        name=f"{exp.name}, tuning",
        seed=exp.seed + SEED_DISTANCE,
        data=half(exp, "first"),
        evaluators=_own_evaluators(exp),
    )


def _own_evaluators(exp: Experiment) -> tuple[Training | Embedder, ...]:
    classifiers = [each for each in exp.evaluators if isinstance(each, Training)]
    embedders = [each for each in exp.evaluators if isinstance(each, Embedder)]
    trained = [each for each in classifiers if not each.weights]
    people = [count for number, count in enumerate(exp.data.public_people()) if number % HELD_OUT]
    if not embedders or sum(count >= MIN_IMAGES for count in people) < FEWEST:
        return tuple(trained)
    return (*trained, Embedder(source=PUBLIC, training=embedders[0].training))


def trained(exp: Experiment, store: Store) -> Target:
    """Return the target of an experiment, trained now or earlier, without attacking it."""
    split = store.step(
        SPLIT, exp.data, fractions=exp.split, files=fingerprint(exp.data), seed=exp.seed
    )
    return expose(exp, store, split, None).target


def held_out(target: Target) -> float:
    """Return a target's accuracy on held-out images."""
    accuracy: dict[str, Any] = target.info["accuracy"]
    return float(accuracy["test"])


class Tuner:
    """Evaluates defenses by an ordinary audit; models that miss the accuracy are not attacked."""

    def __init__(self, exp: Experiment, store: Store, accuracy: float):
        self.exp, self.store, self.accuracy = tuning_experiment(exp), store, accuracy

    def undefended(self) -> Audit:
        """Attack the undefended model; raise if the attack does not break it."""
        result = audit(self.exp, self.store)
        if result.controls.vacuous:
            raise RunError(f"nothing can be tuned: {result.controls.vacuous}")
        return result

    def __call__(self, candidate: Candidate, values: Values) -> Outcome:
        exp = replace(self.exp, defenses=built(candidate.tables(values)))
        if lines := problems([(candidate.title, exp)]):
            return Outcome(reason="; ".join(lines))
        accuracy = None
        try:
            accuracy = held_out(trained(exp, self.store))
            if accuracy < self.accuracy:
                return Outcome(accuracy, reason="misses the accuracy")
            result = audit(exp, self.store)
        except RunError as error:
            return Outcome(accuracy, reason=f"failed: {error}")
        if result.controls.vacuous:
            return Outcome(accuracy, reason=f"vacuous: {result.controls.vacuous}")
        score = first_guess(result)
        return Outcome(accuracy, score.value, score.low, score.high)


def first_guess(result: Audit) -> Score:
    """Return the share of people whose first reconstruction the deciding evaluator accepts."""
    name = result.controls.deciding
    return Score.of(name, result.rows.columns[name][:, 0])
