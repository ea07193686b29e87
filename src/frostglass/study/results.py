"""What people answered: every table of a study."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frostglass.study.agreement import Agreement, agreement
from frostglass.study.answers import Answer, Answers, State, readable
from frostglass.study.correlation import MetricRow, metric_rows
from frostglass.study.counted import (
    Judgement,
    Participation,
    counted,
    judgements,
    participation,
)
from frostglass.study.folder import ANSWERS, Design, read_study
from frostglass.study.tables import (
    Chosen,
    Compared,
    Identified,
    chosen,
    compared,
    identified,
)


@dataclass(frozen=True)
class StudyResults:
    """Tables of a study; those of a protocol without answers are empty.

    Intervals are at 95 %. Agreement is Krippendorff's alpha, of each protocol with answers.
    """

    name: str
    study: str
    participation: Participation
    chosen: list[Chosen]
    compared: list[Compared]
    identified: list[Identified]
    agreement: dict[str, Agreement]
    metrics: list[MetricRow]

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return asdict(self)


def study_results(path: Path, answers: Path | None = None) -> StudyResults:
    """Evaluate the answers to a study, also while it is served.

    `answers` is the file of answers, if it is not the one in the study's folder. That of another
    study is refused.
    """
    folder = read_study(Path(path))
    database = Answers(Path(answers or folder.path / ANSWERS), folder.id, read_only=True)
    try:
        with readable(database.path):
            given, states = database.all(), database.states()
    finally:
        database.close()
    return _evaluated(folder.design, folder.id, given, states)


def _evaluated(
    design: Design, study: str, given: list[Answer], states: list[State]
) -> StudyResults:
    made = judgements(design, given)
    pairs, searches = counted(made, "pairwise"), counted(made, "identification")
    agreements = {"pairwise": _agreement(pairs), "identification": _agreement(searches)}
    return StudyResults(
        name=design.name,
        study=study,
        participation=participation(design, states, given),
        chosen=chosen(design, pairs),
        compared=compared(design, pairs),
        identified=identified(design, searches),
        agreement={name: each for name, each in agreements.items() if each.answers},
        metrics=metric_rows(design, pairs, searches) if pairs or searches else [],
    )


def _agreement(made: list[Judgement]) -> Agreement:
    """Return the agreement on the options of each item.

    Options are numbered in a random order of the item's own, so that answers by chance agree as
    often as alpha expects, and unanimous answers do not look like the only answer there is.
    """
    ratings: dict[int, list[int]] = {}
    for each in made:
        ratings.setdefault(each.number, []).append(each.choice)
    return agreement(ratings)
