"""Curves over the audits of a grid: which belong together, and what is read from each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from frostglass.analyses._result import Axis, Cell, Curve
from frostglass.analyses.base import AnalysisMethod, Subject
from frostglass.auditing.expand import UNDEFENDED
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.results import Audit
from frostglass.core.method import Method
from frostglass.core.parameters import parameters
from frostglass.metrics.base import Score, outputs

LEAST = -30.0  # of ln p: less is all the same
ScoreName = Literal["recognised", "top1"]
TITLES: dict[str, str] = {
    "recognised": "share recognised →",
    "top1": "share that the first classifier ranks first →",
}


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ln p(y|x) of logits (N, C) and labels (N,), at least -30."""
    chosen = logits.double().log_softmax(1).gather(1, labels[:, None])[:, 0]
    return chosen.clamp(min=LEAST)


@parameters
class LeakageAnalysis(AnalysisMethod):
    """Base of analyses that count the reconstructions of each model.

    Args:
        score: recognised by the deciding evaluator, or top1 of the first classifier.
    """

    score: ScoreName = "recognised"

    surfaces: ClassVar[frozenset[str]] = frozenset({"model"})

    @property
    def axis(self) -> Axis:
        return Axis(TITLES[self.score], percent=True)

    def column(self, audit: Audit) -> str:
        """Return the name of the scores that decide whether a reconstruction succeeds."""
        return audit.verified if self.score == "recognised" else "top1_1"

    def score_of(self, subject: Subject) -> Score:
        """Return the share of reconstructions that succeed, over people."""
        return subject.audit.rows.score(self.column(subject.audit))

    def reconstructions(self, subject: Subject) -> tuple[Tensor, Tensor]:
        """Return ln p(y|x) of every reconstruction, (N,), and whether it succeeded."""
        audit = subject.audit
        images = audit.reconstructions.images
        labels = audit.reconstructions.labels.cpu().repeat_interleave(images.shape[1])
        logits, _ = outputs(audit.target, images.flatten(0, 1))
        success = audit.rows.columns[self.column(audit)].flatten() > 0.5
        return log_likelihood(logits, labels), success


def method_label(method: Method, without: Sequence[str] = ()) -> str:
    """Name a method with the parameters that differ from their defaults, but for some."""
    values = [
        f"{field.name}={getattr(method, field.name)}"
        for field in fields(method)  # type: ignore[arg-type]
        if field.name not in without and _changed(method, field)
    ]
    name = method.title or method.name
    return f"{name} ({', '.join(values)})" if values else name


def _changed(method: Method, field: Any) -> bool:
    default = type(method).__pydantic_fields__[field.name]  # type: ignore[attr-defined]
    value = getattr(method, field.name)
    return default.is_required() or value != default.get_default(call_default_factory=True)


def model_label(experiment: Experiment, without: Sequence[str] = ()) -> str:
    """Name what is attacked by its defenses."""
    return " + ".join(method_label(each, without) for each in experiment.defenses) or UNDEFENDED


def grouped(
    subjects: Iterable[Subject], key: Callable[[Experiment], str]
) -> dict[str, list[Subject]]:
    """Group subjects by name, in the order of the grid."""
    groups: dict[str, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(key(subject.experiment), []).append(subject)
    return groups


def scored_curve(
    name: str, points: Sequence[tuple[float, Score]], *, by_x: bool = True, joined: bool = True
) -> Curve:
    """Return a curve of scores with their intervals, in the order of x or as given."""
    points = sorted(points, key=lambda point: point[0]) if by_x else points
    return Curve(
        name,
        tuple(x for x, _ in points),
        tuple(score.value for _, score in points),
        tuple(score.low for _, score in points),
        tuple(score.high for _, score in points),
        joined,
    )


def score_cells(score: Score) -> tuple[Cell, ...]:
    return score.value, score.low, score.high


def differing(chosen: Sequence[Experiment], value: Callable[[Experiment], Any]) -> bool:
    """Whether experiments differ in a value."""
    return len({repr(value(experiment)) for experiment in chosen}) > 1


def vacuous_notes(subjects: Iterable[Subject]) -> tuple[str, ...]:
    """Say which audits prove nothing, and why: what an analysis shows of them proves nothing."""
    return tuple(
        f"VACUOUS: {subject.label}: {reason}"
        for subject in subjects
        if (reason := subject.audit.controls.vacuous)
    )
