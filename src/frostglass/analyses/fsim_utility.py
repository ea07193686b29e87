"""Similarity of reconstructions against utility, of protected features."""

from typing import ClassVar, Literal

from frostglass.analyses._audits import (
    grouped,
    model_label,
    score_cells,
    scored_curve,
    vacuous_notes,
)
from frostglass.analyses._result import Analysis, Axis, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.auditing.experiment import Experiment
from frostglass.core.parameters import parameters

ImageScore = Literal["fsim", "ssim", "psnr", "similarity"]


def strength_free(experiment: Experiment) -> str:
    """Name what is attacked and how, without strengths: their points make one curve."""
    names = " + ".join(each.title or each.name for each in experiment.defenses) or "undefended"
    return f"{names}, {experiment.case}" if experiment.case else names


@analyses.register
@parameters
class FsimUtility(AnalysisMethod):
    """FSIM of reconstructions against the server's utility, over strengths of each protection.

    A point is one protection under one attack; points of one protection and one attack are joined.
    Right and low is better: the server keeps its answers, and reconstructions are unlike the image.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
        Deep Models, NDSS 2024, arXiv 2401.07205, Figures 19 to 22.
    Differs: FSIM here is FSIMc of colour images at the data's size.

    Args:
        score: fsim, ssim, psnr or similarity (of faces, by the embedder).
        utility: mean auc or mcc over attributes.
    """

    score: ImageScore = "fsim"
    utility: Literal["auc", "mcc"] = "auc"

    title = "similarity against utility"
    surfaces: ClassVar[frozenset[str]] = frozenset({"features"})

    def run(self, context: Context) -> Analysis:
        rows, curves = [], []
        for name, members in grouped(context.subjects, strength_free).items():
            points = []
            for subject in members:
                audit = subject.audit
                utility = audit.facts["utility"][f"mean_{self.utility}"]
                score = audit.rows.score(self.score)
                points.append((utility, score))
                attack = subject.experiment.case or subject.experiment.attack.name
                label = model_label(subject.experiment)
                rows.append((label, attack, utility, *score_cells(score)))
            curves.append(scored_curve(name, points))
        head = ("protection", "attack", self.utility, self.score, "low", "high")
        figure = Figure(
            f"{self.score.upper()} of reconstructions against utility",
            Axis(f"mean {self.utility.upper()} of the server →"),
            Axis(f"{self.score.upper()} →"),
            tuple(curves),
        )
        table = Table("similarity and utility", head, tuple(rows))
        return Analysis((table,), (figure,), vacuous_notes(context.subjects))
