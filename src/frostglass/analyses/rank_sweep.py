"""Accuracy and leakage against the rank of a low-rank head."""

from collections.abc import Sequence

from frostglass.analyses._audits import (
    LeakageAnalysis,
    score_cells,
    scored_curve,
    vacuous_notes,
)
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import Context, Subject, analyses
from frostglass.analyses.head_ranks import head_parts
from frostglass.auditing.experiment import Experiment
from frostglass.core.parameters import parameters
from frostglass.defenses.training.calor import Calor


def head_rank(experiment: Experiment) -> int:
    """Return the rank of CALoR's head; 0 without one."""
    return max((each.rank for each in experiment.defenses if isinstance(each, Calor)), default=0)


@analyses.register
@parameters
class RankSweep(LeakageAnalysis):
    """Accuracy and share recognised against the rank of CALoR's head.

    The config's grid lists the ranks, such as configs/facescrub/ir152-ranks.toml does. An
    undefended model stands at its full rank: the smaller of features and classes.

    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814,
        Tables 4 and 18: a low rank costs accuracy and leaks less.
    """

    title = "rank sweep"

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        if len({head_rank(experiment) for experiment in chosen} - {0}) > 1:
            return []
        return ["expected several ranks of calor in grid.defenses, got fewer than two"]

    def run(self, context: Context) -> Analysis:
        points = sorted(((_rank(subject), subject) for subject in context.subjects), key=_first)
        scores = [(float(rank), self.score_of(subject)) for rank, subject in points]
        accuracies = tuple(subject.target.info["accuracy"]["test"] for _, subject in points)
        rows: list[tuple[Cell, ...]] = [
            (subject.label, rank, accuracy, *score_cells(score))
            for (rank, subject), accuracy, (_, score) in zip(
                points, accuracies, scores, strict=True
            )
        ]
        head = ("model", "rank", "accuracy", self.score, "low", "high")
        figure = Figure(
            "Accuracy and leakage against rank",
            Axis("rank of the head", log=True),
            Axis("share →", percent=True),
            (
                Curve("accuracy", tuple(x for x, _ in scores), accuracies),
                scored_curve(self.score, scores),
            ),
        )
        table = Table("ranks", head, tuple(rows))
        return Analysis((table,), (figure,), vacuous_notes(context.subjects))


def _first(point: tuple[int, Subject]) -> int:
    return point[0]


def _rank(subject: Subject) -> int:
    if rank := head_rank(subject.experiment):
        return rank
    *_, matrix = head_parts(subject.target).values()
    return min(matrix.shape)
