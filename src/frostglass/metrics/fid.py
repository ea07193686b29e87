"""How far reconstructions are from private images as sets: the Fréchet inception distance."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from frostglass.core.parameters import parameters
from frostglass.core.pixels import ByteImages
from frostglass.core.types import Images, Target
from frostglass.metrics._frechet import frechet_distance
from frostglass.metrics._stats import jackknife
from frostglass.metrics.base import Evidence, Metric, Score, finite, metrics, outputs
from frostglass.networks.measuring import read_inception


@metrics.register
@parameters
class Fid(Metric):
    """How far are the reconstructions, as a set, from the private images of the same people?

    FID = ‖m₁ - m₂‖² + Tr(C₁ + C₂ - 2(C₁C₂)^½), with mean and covariance of the features of all
    reconstructions (1) and of all private training images of the attacked people (2). It is one
    value, `fid`, and has no rows. Its interval is over people, by a jackknife that leaves out
    people with both kinds of images. `fid_real` is the same value of the people's held-out private
    images: what real photos reach. FID tells whether images look real and varied, not who they
    show: images of the wrong people score well.

    With fewer images than features the covariances are singular and the value is too large, the
    more so the fewer images there are: compare it only with values of equally many images and of
    the same network.

    Use: to compare with papers that report FID; needs many images.
    Paper: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017,
    arXiv 1706.08500. Evaluator features: Peng et al., BiDO, KDD 2022, arXiv 2206.05483.

    Differs: Images are taken as they are, and not min–max stretched per image as in the code of
    KED-MI, LOMMA and PLG-MI. All reconstructions count, where LOMMA and PLG-MI take only those that
    the evaluator names correctly.

    Args:
        inception: a file with the weights of Inception-v3, of FID's own network or torchvision's;
            without it, features are the first evaluator's, as in BiDO.
        normalised: divide each feature by its length first, as VMI does.
    """

    title: ClassVar[str] = "FID"

    inception: str | None = None
    normalised: bool = False

    def files(self) -> list[Path]:
        return [Path(self.inception)] if self.inception else []

    def check_files(self) -> None:
        if self.inception:
            read_inception(self.inception)

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        return {}

    def summaries(self, evidence: Evidence) -> dict[str, Score]:
        people, test = evidence.reconstructions.labels, evidence.split.test
        network = read_inception(self.inception) if self.inception else evidence.first_evaluator
        held_out = test.at(torch.isin(test.labels, people).nonzero().flatten())
        ours = self._features(network, evidence.images), evidence.labels
        private = self._features(network, evidence.private), evidence.private.labels
        real = self._features(network, held_out), held_out.labels
        return {
            "fid": _over_people("fid", people, ours, private),
            "fid_real": _over_people("fid_real", people, real, private),
        }

    def _features(self, network: Target, images: ByteImages | Images) -> Tensor:
        features = finite(outputs(network, images)[1], "images")
        return F.normalize(features, dim=1) if self.normalised else features


Labelled = tuple[Tensor, Tensor]  # features (N, F), and whose they are (N,)


def _over_people(name: str, people: Tensor, first: Labelled, second: Labelled) -> Score:
    """Return the Fréchet distance of two sets, with its interval over people."""

    def distance(kept: Tensor) -> float:
        sets = (features[torch.isin(labels, people[kept])] for features, labels in (first, second))
        return frechet_distance(*sets)

    value = distance(torch.arange(len(people)))
    low, high = jackknife(distance, value, len(people))
    return Score(name, value, max(0.0, low), high, ())
