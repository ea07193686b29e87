"""What a server learns from protected features: Crafter's training scenario."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.analyses._audits import model_label
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, Subject, analyses
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.pipeline import expose
from frostglass.auditing.products import FeatureExposure, ImageBatch
from frostglass.auditing.victims import victims_of
from frostglass.core.parameters import parameters
from frostglass.core.types import Images
from frostglass.metrics._utility import utility
from frostglass.models.cut import cut, halves
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for, seeded
from frostglass.training.build import untrained
from frostglass.training.settings import targets_for

CHUNK = 128  # features shown to a server at once where nothing is trained


@analyses.register
@parameters
class ServerTraining(AnalysisMethod):
    """Utility of a server that is trained on released features, beside that of the given one.

    In the training scenario devices release the features of their training images, and a server
    learns from these alone. Here the server's half of the network is trained anew, from random
    weights, on the released features of `images` training images, and answers for the released
    features of the attacked people's held-out images. It may make up for what a protection does to
    every feature alike; the given server, trained on plain features, cannot. What the attacks of
    the config find in released features is their audit: they do not depend on the server.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
        Deep Models, NDSS 2024, arXiv 2401.07205, Appendix G, the training scenario.
    Differs: only settings of its attack are published there (700 latents, 1,000 steps of 0.03);
        how the server is trained is ours.

    Args:
        images: training images whose features are released, spread over all of them.
        epochs: passes over these features. batch: features per step.
        lr: Adam's step size, which falls to 0 as a cosine.
    """

    images: Annotated[int, Field(ge=2)] = 512
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 32
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-3

    title = "a server trained on released features"
    surfaces: ClassVar[frozenset[str]] = frozenset({"features"})

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        if any(each.target.weights for each in chosen):
            return ["target.weights: the server's half is trained anew, so train the target too"]
        return []

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        points: list[tuple[float, float]] = []
        for subject in {model_label(each.experiment): each for each in context.subjects}.values():
            both = self.utilities(subject)
            values = [each[name] for each in both for name in ("mean_mcc", "mean_auc")]
            rows.append((model_label(subject.experiment), *values))
            points.append((values[0], values[2]))
        head = ("protection", "MCC, given", "AUC, given", "MCC, trained", "AUC, trained")
        given, trained = (tuple(point[place] for point in points) for place in (0, 1))
        curve = Curve("servers", given, trained, joined=False)
        figure = Figure(
            "A server trained on released features against one trained on plain ones",
            Axis("MCC of the given server →"),
            Axis("MCC of the trained server →"),
            (curve,),
        )
        return Analysis((Table("servers", head, tuple(rows)),), (figure,))

    def utilities(self, subject: Subject) -> tuple[dict[str, float], dict[str, float]]:
        """Return the utility of the given and of the trained server on released features."""
        exp, split = subject.experiment, subject.split
        exposure = expose(exp, subject.store, split, victims_of(exp, split))
        assert isinstance(exposure, FeatureExposure)  # as `surfaces` says
        target, device = exposure.target, exposure.device
        shown = spread(split.train, self.images)
        released = device.release(ImageBatch.of(shown.floats(), "training")).features
        fresh = untrained(
            exp.audited,
            target.classes,
            target.image_shape,
            exp.training_defenses,
            seed=seed_for(exp.seed, "server"),
        )
        server = cut(fresh.module, target.cut, target.image_shape).rest
        server = server.to(device_of(target.module))
        self.train(server, released, targets_for(target, shown), seed=exp.seed)
        truth, people = targets_for(target, exposure.images), exposure.images.labels
        servers = (halves(target).rest, server)
        logits = [answers(each, exposure.released.features) for each in servers]
        given, trained = (utility(each, truth, people) for each in logits)
        return given, trained

    def train(self, server: nn.Module, features: Tensor, truth: Tensor, *, seed: int) -> None:
        """Train a server in place on features (N, ...) and attributes (N, A).

        Behind the last layer nothing is left to train.
        """
        if not list(server.parameters()):
            return
        optimizer = torch.optim.Adam(server.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        device = device_of(server)
        server.train()
        for epoch in range(self.epochs):
            order = torch.randperm(len(features), generator=generator_for(seed, "server", epoch))
            batches = max(1, min(-(-len(order) // self.batch), len(order) // 2))
            with seeded(seed, "server", epoch, "noise"):  # dropout
                for index in order.tensor_split(batches):
                    logits = server(features[index].to(device))
                    loss = F.binary_cross_entropy_with_logits(logits, truth[index].to(device))
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
            schedule.step()
        server.eval()


def spread(images: Images, count: int) -> Images:
    """Return `count` images at even distances, or all if there are fewer."""
    return images.at(torch.linspace(0, len(images) - 1, min(count, len(images))).long())


def answers(server: nn.Module, features: Tensor) -> Tensor:
    """Return a server's logits (N, A) of features (N, ...)."""
    device = device_of(server)
    with frozen(server), torch.no_grad():
        return torch.cat([server(part.to(device)).cpu() for part in features.split(CHUNK)])
