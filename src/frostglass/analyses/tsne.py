"""A map of features, coloured by an attribute."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, Subject, analyses
from frostglass.analyses.lda_layers import groups_of, layer_outputs
from frostglass.auditing.experiment import Experiment
from frostglass.core.errors import DataError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images
from frostglass.metrics.base import outputs
from frostglass.runtime.seeding import seed_for

LARGEST_SEED = 2**32 - 1  # of scikit-learn


def neighbour_agreement(features: Tensor, groups: Tensor, neighbours: int) -> float:
    """Return the mean share of an image's nearest others (in features) that are of its group."""
    if not bool(features.isfinite().all()):
        raise RunError("some features are not finite: they have no neighbours")
    if not neighbours < len(features):
        raise DataError(f"neighbours: expected less than {len(features)} images, got {neighbours}")
    apart = torch.cdist(features.double(), features.double()).fill_diagonal_(torch.inf)
    nearest = apart.topk(neighbours, largest=False).indices
    return (groups[nearest] == groups[:, None]).double().mean().item()


def agreement_of_chance(groups: Tensor) -> float:
    """Return the chance that another random image is of the same group."""
    count = groups.unique(return_counts=True)[1].double()
    return (count * (count - 1)).sum().item() / (len(groups) * (len(groups) - 1))


@analyses.register
@parameters
class Tsne(AnalysisMethod):
    """t-SNE of features of held-out images, coloured by an attribute.

    Features are those that leave the device (target.cut), or else those before the head. Distances
    in a map mean little, so the table has the share of each image's nearest others, among the
    features themselves, that have the attribute where it does, and what chance gives.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented
        Representations, AAAI 2020, arXiv 1911.10143, Figure 4.
    Differs: t-SNE is that of scikit-learn, started from principal components.

    Args:
        attribute: the attribute that colours points; the data must have it.
        images: held-out images; all if there are fewer.
        perplexity: of t-SNE. neighbours: nearest others that are counted.
    """

    attribute: str
    images: Annotated[int, Field(ge=8)] = 300
    perplexity: Annotated[float, Field(gt=1)] = 30.0
    neighbours: Annotated[int, Field(ge=1)] = 10

    title = "t-SNE of features"

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        known = chosen[0].data.attribute_names()
        if self.attribute in known:
            return []
        names = ", ".join(known) or "none"
        return [f"attribute: expected one of the data's ({names}), got {self.attribute!r}"]

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        figures = []
        for subject in context.subjects:
            held = subject.split.test
            count = min(self.images, len(held))
            held = held.at(torch.linspace(0, len(held) - 1, count).long())
            groups = groups_of(held, self.attribute)
            if len(groups.unique()) < 2:
                raise DataError(
                    f"attribute: all {count} held-out images have the same {self.attribute!r}: "
                    "name another attribute"
                )
            features = _features(subject, held)
            agreement = neighbour_agreement(features, groups, self.neighbours)
            size = (count, features.shape[1])
            rows.append((subject.label, *size, agreement, agreement_of_chance(groups)))
            figures.append(self.map(subject, features, groups))
        head = ("model", "images", "features", "neighbours agree", "chance")
        table = Table(f"neighbours with the same {self.attribute}", head, tuple(rows))
        return Analysis((table,), tuple(figures))

    def map(self, subject: Subject, features: Tensor, groups: Tensor) -> Figure:
        from sklearn.manifold import TSNE  # slow to import

        if not self.perplexity < len(features):
            raise DataError(
                f"perplexity: expected less than {len(features)}, the images, got {self.perplexity}"
            )
        seed = seed_for(subject.experiment.seed, "tsne") % LARGEST_SEED
        places = TSNE(perplexity=self.perplexity, init="pca", random_state=seed).fit_transform(
            features.numpy()
        )
        curves = [
            Curve(
                name,
                tuple(map(float, places[groups == value, 0])),
                tuple(map(float, places[groups == value, 1])),
                joined=False,
            )
            for value, name in ((1, self.attribute), (0, f"no {self.attribute}"))
        ]
        title = f"t-SNE of features by {self.attribute}: {subject.label}"
        return Figure(title, Axis("first coordinate"), Axis("second coordinate"), tuple(curves))


def _features(subject: Subject, images: Images) -> Tensor:
    target = subject.target
    if target.cut:
        return layer_outputs(target, images, (target.cut,))[target.cut]
    return outputs(target, images)[1]
