"""Leakage against accuracy while a network is trained."""

from collections.abc import Sequence

from frostglass.analyses._audits import (
    LeakageAnalysis,
    differing,
    grouped,
    model_label,
    score_cells,
    scored_curve,
    vacuous_notes,
)
from frostglass.analyses._result import Analysis, Axis, Figure, Table
from frostglass.analyses.base import Context, analyses
from frostglass.auditing.experiment import Experiment
from frostglass.core.parameters import parameters
from frostglass.defenses.training.transfer import Transfer


@analyses.register
@parameters
class Checkpoints(LeakageAnalysis):
    """Share recognised against accuracy, at checkpoints of each training.

    The config's grid lists the checkpoints as target.epochs. With target.schedule = "constant" and
    target.keep = "last", a training of few epochs is the beginning of one of many, weight for
    weight, so each audit is that of a checkpoint, and the store shares it with other runs. The
    defense transfer needs its own number of epochs, for one beginning of all checkpoints.

    Paper: Ho et al., Model Inversion Robustness: Can Transfer Learning Help? (TL-DMI), CVPR 2024,
        arXiv 2405.05588, Figure 3: at equal accuracy a model trained by transfer leaks less.
    Differs: the paper attacks with KED-MI and counts top-1; here the config's attack is used.
    """

    title = "leakage over training"

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        problems = []
        if not differing(chosen, lambda experiment: experiment.target.epochs):
            problems.append("expected several checkpoints: set grid.target.epochs=[2,4,8]")
        for name, wanted in (("schedule", "constant"), ("keep", "last")):
            values = {getattr(experiment.target, name) for experiment in chosen} - {wanted}
            problems += [
                f"target.{name}: expected {wanted!r}, so that few epochs are the beginning of "
                f"many, got {value!r}"
                for value in sorted(values)
            ]
        used = [each for experiment in chosen for each in experiment.defenses]
        pretrained = [each for each in used if isinstance(each, Transfer)]
        if any(each.pretrain == "public" and each.epochs is None for each in pretrained):
            problems.append(
                "transfer: expected epochs, because its training on public people is otherwise as "
                "long as the target's, and checkpoints have different beginnings: set it"
            )
        return problems

    def run(self, context: Context) -> Analysis:
        rows, curves = [], []
        for name, members in grouped(context.subjects, model_label).items():
            members = sorted(members, key=lambda subject: subject.experiment.target.epochs)
            points = []
            for subject in members:
                accuracy = subject.target.info["accuracy"]["test"]
                score = self.score_of(subject)
                points.append((accuracy, score))
                epochs = subject.experiment.target.epochs
                rows.append((name, epochs, accuracy, *score_cells(score)))
            curves.append(scored_curve(name, points, by_x=False))
        head = ("model", "epochs", "accuracy", self.score, "low", "high")
        figure = Figure(
            "Leakage against accuracy over training",
            Axis("accuracy on held-out images →", percent=True),
            self.axis,
            tuple(curves),
        )
        table = Table("checkpoints", head, tuple(rows))
        return Analysis((table,), (figure,), vacuous_notes(context.subjects))
