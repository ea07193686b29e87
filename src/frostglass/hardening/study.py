"""A resumable search for the strengths of defenses: an Optuna study for each candidate.

After a kill at any moment the same command continues with the trial that an unbroken search would
have made. Three things make it so: SQLite writes a change whole or not at all; a sampler is made
anew for each trial, seeded by the candidate and the number of its finished trials; and a trial
that a kill left unfinished is discarded and asked for again.
"""

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostglass.core.errors import ConfigError, StoreError
from frostglass.hardening.budget import SearchBudget
from frostglass.hardening.goal import Goal
from frostglass.hardening.space import Candidate, Values
from frostglass.runtime.seeding import seed_for
from frostglass.store.files import read_json, write_json

if TYPE_CHECKING:
    import optuna

DATABASE, SETTINGS, LOCK = "study.db", "study.json", ".study.lock"
RECORD = "record"  # the attribute of an Optuna trial that holds ours
TIE = 1e-5  # weight of the similarity beside the leak
RANDOM_TRIALS = 4  # of each candidate, besides its defaults, before Optuna models the leak
MOST_TRIALS = 100  # of each candidate: repeated parameters cost no time, and would never end
MOST_ATTEMPTS = 10  # to find parameters that were not tried


@dataclass(frozen=True)
class Outcome:
    """What one trial measured: utility, and the leak with its interval.

    `similarity`, if it is measured, decides between equal leaks. A trial without a leak was not
    attacked, or its audit proves nothing; `reason` says why.
    """

    utility: float | None = None
    leak: float | None = None
    low: float | None = None
    high: float | None = None
    similarity: float | None = None
    reason: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any], key: str) -> "Outcome":
        """Read what `plain` returned."""
        rest = dict(values)
        return cls(rest.pop(key), **rest)

    def plain(self, key: str) -> dict[str, Any]:
        """Return plain values, the utility under its own name."""
        rest = asdict(self)
        utility, similarity = rest.pop("utility"), rest.pop("similarity")
        return {key: utility, **rest, **({} if similarity is None else {"similarity": similarity})}

    @property
    def rank(self) -> tuple[float, float, float]:
        """The order of attacked trials, the best first: least leak, then what decides ties."""
        return self.leak or 0.0, self.similarity or 0.0, -(self.utility or 0.0)

    @property
    def objective(self) -> float:
        """What Optuna minimises: the leak; a similarity moves it by less than one image does."""
        return (self.leak or 0.0) + TIE * (self.similarity or 0.0)


@dataclass(frozen=True)
class Trial:
    """A finished trial: its candidate, its number among the candidate's, and its outcome."""

    candidate: Candidate
    number: int
    values: Values
    seconds: float
    outcome: Outcome

    @property
    def tables(self) -> list[Values]:
        return self.candidate.tables(self.values)


Evaluate = Callable[[Candidate, Values], Outcome]
# Called with the number of a trial, counted from 1, when it starts (None) and when it is finished.
Watch = Callable[[int, Trial | None], None]


def unwatched(number: int, trial: Trial | None) -> None:
    """Do nothing."""


def optuna_module() -> Any:
    """Import Optuna, and keep its messages off the terminal."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"hardening needs optuna, which cannot be imported ({error}): "
            "pip install 'frostglass[harden]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Study:
    """The trials of all candidates, kept in a folder; use it inside `open_study`."""

    def __init__(self, folder: Path, candidates: Sequence[Candidate], *, goal: Goal, seed: int):
        self._optuna = optuna_module()
        self.goal, self.seed = goal, seed
        if not (folder / DATABASE).exists():
            self._begin(folder, candidates)
        self._studies = self._opened(self._storage(folder / DATABASE), candidates)
        for study in self._studies.values():
            self._discard_unfinished(study)

    def _begin(self, folder: Path, candidates: Sequence[Candidate]) -> None:
        """Make the database aside and move it when it is whole.

        Killed while it is made, it would have tables without the rules that keep names unique.
        """
        beside = folder / f"{DATABASE}.new"
        beside.unlink(missing_ok=True)
        storage = self._storage(beside)
        self._opened(storage, candidates)
        storage.remove_session()
        storage.engine.dispose()
        beside.replace(folder / DATABASE)

    def _opened(
        self, storage: Any, candidates: Sequence[Candidate]
    ) -> "dict[Candidate, optuna.Study]":
        """Return the study of each candidate in a database."""
        return {
            candidate: self._optuna.create_study(
                storage=storage,
                study_name=candidate.title,
                direction="minimize",
                load_if_exists=True,
            )
            for candidate in candidates
        }

    def _storage(self, path: Path) -> Any:
        from sqlalchemy import URL
        from sqlalchemy.exc import SQLAlchemyError

        place = URL.create("sqlite", database=str(path)).render_as_string()
        try:
            return self._optuna.storages.RDBStorage(place)
        except (SQLAlchemyError, RuntimeError) as error:  # damaged, or of another Optuna
            reason = " ".join(str(error).split())[:160]
            raise StoreError(
                f"the study in {path} cannot be read ({reason}): delete the file to begin it anew"
            ) from error

    def trials(self) -> list[Trial]:
        """Return all finished trials, in the order in which they were made."""
        finished = [
            Trial(candidate, number, record["values"], record["seconds"], outcome)
            for candidate, study in self._studies.items()
            for number, trial in enumerate(self._in_state(study, "COMPLETE", "PRUNED"))
            for record in (trial.user_attrs[RECORD],)
            for outcome in (Outcome.read(record["outcome"], self.goal.key),)
        ]
        return sorted(finished, key=lambda trial: trial.number)  # stable: candidates in turn

    def run(self, evaluate: Evaluate, budget: SearchBudget, watch: Watch = unwatched) -> None:
        """Make trials, of each candidate in turn, until the budget is spent."""
        while True:
            done = self.trials()
            if budget.spent(sum(trial.seconds for trial in done), len(done)):
                return
            left = {}
            for candidate in self._studies:
                tried = [trial.values for trial in done if trial.candidate is candidate]
                distinct = len({tuple(sorted(values.items())) for values in tried})
                if len(tried) < MOST_TRIALS and distinct < candidate.settings:
                    left[candidate] = len(tried)
            if not left:
                return
            candidate = min(left, key=lambda each: left[each])
            watch(len(done) + 1, None)
            watch(len(done) + 1, self._trial(candidate, left[candidate], evaluate))

    def _trial(self, candidate: Candidate, number: int, evaluate: Evaluate) -> Trial:
        study = self._studies[candidate]
        if number == 0 and not self._in_state(study, "WAITING"):
            study.enqueue_trial(candidate.first())
        asked, values = self._suggestion(candidate, number)
        started = time.monotonic()
        outcome = evaluate(candidate, values)
        trial = Trial(candidate, number, values, time.monotonic() - started, outcome)
        plain = outcome.plain(self.goal.key)
        asked.set_user_attr(RECORD, {"values": values, "seconds": trial.seconds, "outcome": plain})
        asked.set_constraint(self.goal.key, self._violation(outcome))
        if outcome.leak is None:
            study.tell(asked, state=self._optuna.trial.TrialState.PRUNED)
        else:
            study.tell(asked, outcome.objective)
        return trial

    def _suggestion(self, candidate: Candidate, number: int) -> tuple[Any, Values]:
        """Ask for values that were not tried yet, where the sampler finds some.

        Of a few whole numbers it likes to repeat one, and a repetition teaches nothing.
        """
        study = self._studies[candidate]
        known = [trial.values for trial in self.trials() if trial.candidate is candidate]
        for attempt in range(MOST_ATTEMPTS):
            study.sampler = self._sampler(candidate, number, attempt)
            asked = study.ask()
            values = candidate.suggested(asked)
            if values not in known or attempt + 1 == MOST_ATTEMPTS:
                break
            study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
        return asked, values

    def _sampler(self, candidate: Candidate, number: int, attempt: int) -> Any:
        again = [attempt] if attempt else []
        return self._optuna.samplers.TPESampler(
            n_startup_trials=1 + RANDOM_TRIALS,
            seed=seed_for(self.seed, "harden", candidate.title, number, *again) % 2**32,
            constant_liar=False,
        )

    def _violation(self, outcome: Outcome) -> float:
        """Return how much utility is missing; above 0, Optuna keeps away from the parameters."""
        missing = self.goal.least - (outcome.utility or 0.0)
        # Useful enough, but nothing is known of its leak.
        return 1.0 if outcome.leak is None and missing <= 0 else missing

    def _in_state(self, study: "optuna.Study", *names: str) -> list[Any]:
        states = [self._optuna.trial.TrialState[name] for name in names]
        return study.get_trials(deepcopy=False, states=states)

    def _discard_unfinished(self, study: "optuna.Study") -> None:
        for trial in self._in_state(study, "RUNNING"):
            study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)


@contextmanager
def open_study(
    folder: Path,
    candidates: Sequence[Candidate],
    settings: Mapping[str, Any],
    *,
    goal: Goal,
    seed: int,
) -> Iterator[Study]:
    """Open the study of a folder, or begin one; refuse other settings and a second process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another process is working on the study in {folder}: wait for it, or give "
                "another --out"
            ) from None
        check_settings(folder, settings)
        if not (folder / SETTINGS).exists():
            write_json(folder / SETTINGS, settings)
        yield Study(folder, candidates, goal=goal, seed=seed)


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to resume a study with other settings: its trials would not be comparable."""
    path = folder / SETTINGS
    if not path.exists():
        return
    before, now = read_json(path), json.loads(json.dumps(settings))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"the study in {folder} was begun with other settings ({', '.join(changed)}): give "
            "these again, or another --out"
        )
