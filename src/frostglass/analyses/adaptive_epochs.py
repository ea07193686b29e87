"""How long an adaptive attacker must learn from protected features."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from frostglass.analyses._audits import (
    differing,
    grouped,
    model_label,
    score_cells,
    scored_curve,
    vacuous_notes,
)
from frostglass.analyses._result import Analysis, Axis, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.analyses.fsim_utility import ImageScore
from frostglass.auditing.experiment import Experiment
from frostglass.core.parameters import parameters

LENGTHS = ("adapt_epochs", "adapt_rounds")


def length_of(experiment: Experiment) -> int | None:
    """Return how long an attack adapts to the protection; None if it cannot adapt."""
    values: dict[str, Any] = asdict(experiment.attack)  # type: ignore[call-overload]
    found = next((values[name] for name in LENGTHS if name in values), None)
    return None if found is None else found * bool(values.get("adapt"))


@analyses.register
@parameters
class AdaptiveEpochs(AnalysisMethod):
    """Similarity of reconstructions against the epochs of an attacker who adapts to a protection.

    The attacker protects public images and goes on training on them (attack.adapt of them, for
    attack.adapt_epochs). The config's grid lists these epochs; attack.adapt = 0 is an attacker who
    does not adapt.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
        Deep Models, NDSS 2024, arXiv 2401.07205, Appendix E and Figures 23 and 24.
    Differs: the paper gives no numbers for its figures, so only a trend can be compared.

    Args:
        score: fsim, ssim, psnr or similarity (of faces, by the embedder).
    """

    score: ImageScore = "fsim"

    title = "adaptive epochs"
    surfaces: ClassVar[frozenset[str]] = frozenset({"features"})

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        if fixed := [each.attack.name for each in chosen if length_of(each) is None]:
            return [f"attack: {fixed[0]} cannot adapt to a protection: use decoder or latent"]
        if not differing(chosen, length_of):
            return ["expected several lengths: set attack.adapt and grid.attack.adapt_epochs"]
        return []

    def run(self, context: Context) -> Analysis:
        rows, curves = [], []
        for name, members in grouped(context.subjects, model_label).items():
            points = []
            for subject in members:
                length = length_of(subject.experiment) or 0
                score = subject.audit.rows.score(self.score)
                points.append((float(length), score))
                rows.append((name, length, *score_cells(score)))
            curves.append(scored_curve(name, points))
        head = ("protection", "epochs", self.score, "low", "high")
        figure = Figure(
            f"{self.score.upper()} against the attacker's adaptive epochs",
            Axis("epochs of adaptation →"),
            Axis(f"{self.score.upper()} →"),
            tuple(curves),
        )
        table = Table("adaptation", head, tuple(rows))
        return Analysis((table,), (figure,), vacuous_notes(context.subjects))
