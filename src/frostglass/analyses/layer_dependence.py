"""How much each layer depends on the image and on the label, with BiDO and without."""

from typing import ClassVar

from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.core.parameters import parameters
from frostglass.defenses.training._dependence import MeasureName
from frostglass.defenses.training.bido import Bido


@analyses.register
@parameters
class LayerDependence(AnalysisMethod):
    """Dependence of each tapped layer on images and labels: d(X, Z) and d(Z, Y) of every model.

    BiDO lowers the first and raises the second. The same numbers of a defended model are in its
    `facts`; here stand all models of the config beside one another, the undefended one too,
    measured on the same training images. Only targets are trained; nothing is attacked.

    Paper: Peng et al., Bilateral Dependency Optimization: Defending Against Model-inversion
        Attacks, KDD 2022, arXiv 2206.05483, whose two terms these are.

    Args:
        measure: the dependence d, as in bido.
    """

    measure: MeasureName = "hsic_nocco"

    title = "dependence of layers"
    surfaces: ClassVar = frozenset({"model"})

    def run(self, context: Context) -> Analysis:
        method, rows = Bido(measure=self.measure), list[tuple[Cell, ...]]()
        curves = []
        for subject in context.subjects:
            values = method.dependence(subject.target, subject.split.train, seed=context.seed)
            rows += [(subject.label, name, *pair.values()) for name, pair in values.items()]
            depths = tuple(map(float, range(1, len(values) + 1)))
            seen = tuple(pair["d_x"] for pair in values.values())
            curves.append(Curve(subject.label, depths, seen))
        figure = Figure(
            "Dependence of layers on the image",
            Axis("layer, from the image on →"),
            Axis("d(X, Z)"),
            tuple(curves),
        )
        head = ("model", "layer", "d(X, Z)", "d(Z, Y)")
        return Analysis((Table("dependence of layers", head, tuple(rows)),), (figure,))
