"""How well each layer separates people."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.analyses._layers import weighted_layers
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.metrics._lda import lda_chance, lda_score
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture

CHUNK = 64


def layer_outputs(target: Target, images: Images, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the flat outputs (N, F) of layers of a target."""
    device, parts = device_of(target.module), {name: list[Tensor]() for name in names}
    with frozen(target.module), torch.no_grad(), capture(target.module, names) as seen:
        for index in torch.arange(len(images)).split(CHUNK):
            target.module(target.fit(images.floats(index).to(device)))
            for name in names:
                parts[name].append(seen[name].flatten(1).cpu())
    return {name: torch.cat(values) for name, values in parts.items()}


def groups_of(images: Images, by: str) -> Tensor:
    """Return the group of each image: its person, or whether it has an attribute."""
    if by == "person":
        return images.labels
    if images.attributes is None or by not in images.attribute_names:
        known = ", ".join(images.attribute_names) or "none"
        raise DataError(f"by: expected person or an attribute of the data ({known}), got {by!r}")
    return images.attributes[:, images.attribute_names.index(by)].long()


@analyses.register
@parameters
class LdaLayers(AnalysisMethod):
    """LDA score of each layer: how far it separates people, compared with how each person varies.

    tr(Sb) / tr(Sw) of the outputs of each convolution and linear layer on held-out images. Random
    groups score (G - 1) / (N - G), the column chance, for G groups of N images. Only targets are
    trained; nothing is attacked.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented
        Representations, AAAI 2020, arXiv 1911.10143, Table 3.
    Differs: the paper prints Sw/Sb for its last layer; here it is always Sb/Sw.

    Args:
        images: held-out images; all if there are fewer.
        by: what separates: person, or the name of an attribute.
    """

    images: Annotated[int, Field(ge=3)] = 512
    by: str = "person"

    title = "LDA score of layers"

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        curves = []
        for subject in context.subjects:
            held = subject.split.test
            count = min(self.images, len(held))
            held = held.at(torch.linspace(0, len(held) - 1, count).long())
            groups = groups_of(held, self.by)
            names = tuple(weighted_layers(subject.target))
            chance, scores = lda_chance(groups), []
            for name in names:  # one at a time: early layers are large
                values = layer_outputs(subject.target, held, (name,))[name]
                scores.append(lda_score(values, groups))
                rows.append((subject.label, name, values.shape[1], scores[-1], chance))
            curves.append(Curve(subject.label, tuple(range(1, len(names) + 1)), tuple(scores)))
        head = ("model", "layer", "features", "LDA score", "chance")
        figure = Figure(
            f"LDA score of layers, by {self.by}",
            Axis("layer, from the image on →"),
            Axis("LDA score", log=True),
            tuple(curves),
        )
        return Analysis((Table("LDA score of layers", head, tuple(rows)),), (figure,))
