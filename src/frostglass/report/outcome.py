"""The answer against thresholds that were fixed before the run: pass, fail or inconclusive."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy.special import betaincinv
from torch import Tensor

from frostglass.metrics._stats import interval
from frostglass.report.entry import Entry
from frostglass.report.facts import FixedThresholds, Measured
from frostglass.report.study import Study, Subject
from frostglass.report.text import Kind, number, span

Outcome = Literal["pass", "fail", "inconclusive"]
WORST: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")
TAIL = 0.025  # on each side of a 95 % interval
WORDS: dict[str, tuple[str, Kind]] = {
    "max_first": ("people recognised by the first guess", "percent"),
    "max_any": ("people recognised by any guess", "percent"),
    "max_recognised": ("reconstructions recognised", "percent"),
    "max_similarity": ("mean similarity of reconstructions", "decimal"),
    "min_accuracy": ("accuracy of the model", "percent"),
    "min_utility": ("utility for the server (MCC)", "decimal"),
}


@dataclass(frozen=True)
class Check:
    """One limit: what was measured with its interval, by which attack, and what follows."""

    name: str
    limit: float
    value: float
    low: float
    high: float
    attack: str
    people: int
    outcome: Outcome

    @property
    def unit(self) -> Kind:
        return WORDS[self.name][1]

    @property
    def title(self) -> str:
        return WORDS[self.name][0]

    @property
    def accepted(self) -> str:
        """The limit in words."""
        word = "at most" if self.name.startswith("max") else "at least"
        return f"{word} {number(self.limit, self.unit)}"

    @property
    def measured(self) -> str:
        return f"{number(self.value, self.unit)} ({span(self, self.unit)})"

    @property
    def people_needed(self) -> int | None:
        """Roughly how many people would settle a share that is below its limit."""
        if self.unit != "percent" or not self.attack or self.value >= self.limit:
            return None
        if self.value == 0:
            return math.ceil(math.log(TAIL) / math.log1p(-self.limit))
        room = (self.limit - self.value) / 1.96
        return math.ceil(self.value * (1 - self.value) / room**2)


@dataclass(frozen=True)
class Answer:
    """What a subject's audits say about its limits; `reasons` say why something is left open."""

    subject: str
    outcome: Outcome
    checks: tuple[Check, ...]
    reasons: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def answers(study: Study, distrusted: Collection[str] = ()) -> list[Answer]:
    """Return the answer for each subject with thresholds; `distrusted` are runs by name."""
    found = [_answer(study, subject, distrusted) for subject in study.subjects]
    return [answer for answer in found if answer is not None]


def _answer(study: Study, subject: Subject, distrusted: Collection[str]) -> Answer | None:
    # Of all runs: those with the same audits share them, and the first would win unnoticed.
    fixed = [run.facts.thresholds for run in study.runs]
    known = [each for each in fixed if each is not None]
    if not known:
        return None
    limits = known[0].limits
    checks = tuple(_check(subject, name, limit) for name, limit in limits.items())
    worst = max((check.outcome for check in checks), key=WORST.index)
    reasons = _doubts(subject, known, distrusted)
    if any(each is None or each.limits != limits for each in fixed):
        reasons.append("the runs of this report fixed different thresholds")
    if subject.vacuous:
        reasons.append("its audits are vacuous, so their numbers prove nothing")
    if reasons:
        return Answer(subject.name, "inconclusive", checks, tuple(reasons))
    missing = _missing(study, subject)
    if worst != "fail" and missing:
        return Answer(subject.name, "inconclusive", checks, tuple(missing))
    telling = {"fail": _failed, "inconclusive": _open}
    reasons = [telling[worst](check) for check in checks if check.outcome == worst != "pass"]
    return Answer(subject.name, worst, checks, tuple(reasons))


def _doubts(
    subject: Subject, fixed: Sequence[FixedThresholds], distrusted: Collection[str]
) -> list[str]:
    """Say why neither a pass nor a fail would mean anything."""
    reasons = []
    if not all(each.before_results for each in fixed):
        times = sorted({each.recorded for each in fixed if each.recorded})
        when = f", on {times[0]}" if times else ""
        reasons.append(f"the thresholds were not recorded before the results{when}")
    if names := sorted({e.run.facts.name for e in subject.entries} & set(distrusted)):
        reasons.append(f"{names[0]} could not be verified against its store")
    return reasons


def _missing(study: Study, subject: Subject) -> list[str]:
    """Say what keeps audits that found little from being a pass."""
    reasons = []
    if study.partial:
        reasons.append("the run is unfinished: audits are missing, and one of them may find more")
    stopped = max(len(entry.facts.partial) for entry in subject.entries)
    if stopped:
        reasons.append(f"a search stopped early for {number(stopped, 'count')} people")
    return reasons


def _failed(check: Check) -> str:
    by = f", by {check.attack}" if check.attack else ""
    return f"{check.title}: {check.measured}{by}, where {check.accepted} is accepted"


def _open(check: Check) -> str:
    text = f"the interval of {check.title} ({span(check, check.unit)}) contains the limit"
    needed = check.people_needed
    return f"{text}; about {number(needed, 'count')} people would settle it" if needed else text


def _check(subject: Subject, name: str, limit: float) -> Check:
    if name == "min_accuracy":
        return _utility(name, limit, *accuracy_interval(subject))
    if name == "min_utility":
        mcc = subject.utility
        return _utility(name, limit, mcc.mean_mcc, mcc.mean_mcc_low, mcc.mean_mcc_high)
    sound = [entry for entry in subject.entries if not entry.vacuous] or subject.entries
    checks = [_leak(entry, name, limit) for entry in sound]
    return max(checks, key=lambda check: (WORST.index(check.outcome), check.value))


def _leak(entry: Entry, name: str, limit: float) -> Check:
    values = leaks(entry, name)
    low, high = interval(values)
    outcome: Outcome = "fail" if low > limit else "pass" if high <= limit else "inconclusive"
    mean = values.mean().item()
    return Check(name, limit, mean, low, high, entry.method, len(values), outcome)


def leaks(entry: Entry, name: str) -> Tensor:
    """Return one value for each person, as a limit of the leak counts it."""
    if name == "max_similarity":
        return entry.by_person.double()
    values = entry.run.rows[entry.number].columns[entry.verified].double()
    ways = {"max_first": values[:, 0], "max_any": values.amax(1), "max_recognised": values.mean(1)}
    return ways[name]


def _utility(name: str, limit: float, value: float, low: float, high: float) -> Check:
    outcome: Outcome = "fail" if high < limit else "pass" if low >= limit else "inconclusive"
    return Check(name, limit, value, low, high, "", 0, outcome)


def accuracy_interval(subject: Subject) -> tuple[float, float, float]:
    """Return the accuracy of a model with its exact binomial interval over held-out images.

    Without their number, or for a given model, which may know these images, the value alone.
    """
    value = subject.accuracy
    parts = subject.strongest.run.facts.data.get("manifest", {}).get("parts", {})
    images = parts.get("test", {}).get("images") if isinstance(parts, dict) else None
    if not isinstance(images, int) or images < 1 or subject.kind == "given":
        return value, value, value
    return value, *binomial(round(value * images), images)


def binomial(hits: int, total: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share (Clopper and Pearson)."""
    low = float(betaincinv(hits, total - hits + 1, TAIL)) if hits else 0.0
    high = float(betaincinv(hits + 1, total - hits, 1 - TAIL)) if hits < total else 1.0
    return low, high


def over_people(values: Tensor) -> Measured:
    """Return the mean over people with its interval."""
    low, high = interval(values)
    return Measured(value=values.mean().item(), low=low, high=high)
