"""Fisher information of each layer: for the task, and for inversion."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.analyses._descent import LossName, Search, people_labels
from frostglass.analyses._layers import differentiable, squared_gradients, weighted_layers
from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, Subject, analyses
from frostglass.auditing.experiment import Experiment
from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.networks.perceptual import perceptual_distance
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

TASK = "classification"
FEWEST = 3  # images of a public person: to train, to select and to test
Distance = Callable[[Tensor, Tensor], Tensor]  # images and images to a distance of each, (N,)


def task_information(
    target: Target, images: Tensor, labels: Tensor, layers: dict[str, nn.Module]
) -> Tensor:
    """Return the mean squared gradient of ln p(y|x) in each layer, for each image, (N, L)."""
    rows = []
    with differentiable(target, layers) as weights:
        for image, label in zip(images, labels, strict=True):
            logits = target.module(target.fit(image[None]))
            rows.append(squared_gradients(F.cross_entropy(logits, label[None]), weights))
    return torch.stack(rows)


def inversion_information(
    search: Search,
    latents: Tensor,
    truth: Tensor,
    distances: Mapping[str, Distance],
    layers: dict[str, nn.Module],
    step: float,
) -> dict[str, Tensor]:
    """Return the mean squared gradient of the distance to the true images, by distance, (N, L).

    One gradient step on the attack's loss makes the reconstruction G(z - step · ∂L/∂z) depend on
    the weights, and with it its distance to the true image.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in distances}
    with frozen(*search.prior.modules), differentiable(search.target, layers) as weights:
        for latent, label, image in zip(latents, search.labels, truth, strict=True):
            point, own = latent[None].clone().requires_grad_(True), label[None]
            loss = search.losses(search.images(point, own), own).sum()
            (slope,) = torch.autograd.grad(loss, point, create_graph=True)
            moved = search.images(point - step * slope, own)
            for name, distance in distances.items():
                away = distance(search.target.fit(moved), search.target.fit(image[None])).sum()
                rows[name].append(squared_gradients(away, weights))
    return {name: torch.stack(values) for name, values in rows.items()}


def shares(information: Tensor) -> Tensor:
    """Return each layer's share of the mean information (N, L), (L,)."""
    mean = information.mean(0)
    if not bool(mean.isfinite().all()) or not bool(mean.sum() > 0):
        raise RunError(
            "the Fisher information is zero or not finite in every layer: the loss is saturated; "
            "use another loss, or fewer steps"
        )
    return mean / mean.sum()


def mean_depth(share: Tensor) -> float:
    """Return the mean place of the information: 0 is the first layer, 1 the last."""
    if len(share) == 1:
        return 0.0
    return (share * torch.linspace(0, 1, len(share), dtype=share.dtype)).sum().item()


@analyses.register
@parameters
class Fisher(AnalysisMethod):
    """Fisher information of each layer: which layers the task needs, and which an inversion needs.

    For the task: the mean over held-out images of the squared gradient of ln p(y|x), averaged over
    the weights of a layer. For inversion: the same of the distance between a reconstruction and an
    image of the person, where the reconstruction depends on the weights through one gradient step
    of the attack, after each of several numbers of steps. Figures show each layer's share.

    Paper: Ho et al., Model Inversion Robustness: Can Transfer Learning Help? (TL-DMI), CVPR 2024,
        arXiv 2405.05588, Figures 1, 4 and 5: the first layers matter for inversion, the last for
        the task.
    Differs: the search is Adam in the latents of the config's prior, whatever the config's attack.
        How the distance depends on the weights is our reading: through one step of size `step`.
        Convolutions and linear layers count, norms do not. The scale of a layer before a batch
        norm is arbitrary and its information grows with the inverse square of it; the ratio of
        the two shares does not depend on that scale, so it is drawn too.

    Args:
        images: held-out images for the task; all if there are fewer.
        people: attacked people, from the first on.
        steps: numbers of search steps at which inversion is analysed.
        loss, lr: of the search. step: size of the step that is differentiated.
        distances: between reconstruction and image: l2 (mean square), l1 (mean absolute value),
            perceptual (layers of the config's perceptual network).
    """

    images: Annotated[int, Field(ge=1)] = 128
    people: Annotated[int, Field(ge=1)] = 10
    steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 20, 60)
    loss: LossName = "ce"
    lr: Annotated[float, Field(gt=0)] = 0.05
    step: Annotated[float, Field(gt=0)] = 0.05
    distances: Annotated[tuple[str, ...], Field(min_length=1)] = ("l2", "l1", "perceptual")

    title = "Fisher information"
    surfaces: ClassVar[frozenset[str]] = frozenset({"model"})

    def __post_init__(self) -> None:
        known = ("l2", "l1", "perceptual")
        if odd := [name for name in self.distances if name not in known]:
            raise ValueError(f"distances: expected some of {', '.join(known)}, got {odd[0]!r}")

    def problems(self, chosen: Sequence[Experiment]) -> list[str]:
        problems = [
            f"people: expected at most {count}, the private people of the data, got {self.people}"
            for count in sorted({experiment.data.counts()[0] for experiment in chosen})
            if self.people > count
        ]
        enough = all(
            sum(images >= FEWEST for images in experiment.data.public_people()) > 1
            for experiment in chosen
        )
        if "perceptual" in self.distances and not enough:
            problems.append(
                f"the perceptual network learns public people with {FEWEST} or more images each, "
                "got fewer than 2: give more, or leave perceptual out of analysis.distances"
            )
        return problems

    def run(self, context: Context) -> Analysis:
        rows: list[tuple[Cell, ...]] = []
        depths: list[tuple[Cell, ...]] = []
        figures: list[Figure] = []
        for subject in context.subjects:
            layers = weighted_layers(subject.target)
            curves: dict[tuple[str, int], Tensor] = {}
            held = subject.split.test
            device = device_of(subject.target.module)
            index = torch.linspace(0, len(held) - 1, min(self.images, len(held))).long()
            task = task_information(
                subject.target, held.floats(index).to(device), held.labels[index].to(device), layers
            )
            curves[TASK, 0] = task
            curves |= self.inversion(subject, layers)
            for (name, step), values in curves.items():
                share = shares(values)
                depths.append((subject.label, name, step, mean_depth(share)))
                rows += [
                    (subject.label, name, step, layer, value.item(), part.item())
                    for layer, value, part in zip(layers, values.mean(0), share, strict=True)
                ]
            figures += _figures(subject.label, curves, max(self.steps))
        head = ("model", "task", "step")
        return Analysis(
            (
                Table("mean depth of the information (0 first layer, 1 last)",
                      (*head, "mean depth"), tuple(depths)),
                Table("Fisher information of each layer",
                      (*head, "layer", "information", "share"), tuple(rows)),
            ),
            tuple(figures),
        )  # fmt: skip

    def inversion(
        self, subject: Subject, layers: dict[str, nn.Module]
    ) -> dict[tuple[str, int], Tensor]:
        """Return the information for inversion, by distance and number of search steps."""
        target, split = subject.target, subject.split
        labels = people_labels(target, self.people, len(split.classes))
        search = Search(target, subject.prior, labels, self.loss, self.lr)
        truth = split.test.first_of_each()[: self.people].to(labels.device)
        known: dict[str, Distance] = {
            "l2": lambda a, b: (a - b).square().flatten(1).mean(1),
            "l1": lambda a, b: (a - b).abs().flatten(1).mean(1),
        }
        if "perceptual" in self.distances:
            network = subject.perceptual
            known["perceptual"] = lambda a, b: perceptual_distance(network, a, b)
        chosen = {name: known[name] for name in self.distances}
        found: dict[tuple[str, int], Tensor] = {}
        helpers = [subject.perceptual.module] if "perceptual" in chosen else []
        with frozen(*helpers):
            start = search.start(subject.experiment.seed)
            for number, latents in search.visit(start, self.steps):
                by_name = inversion_information(search, latents, truth, chosen, layers, self.step)
                found |= {(name, number): values for name, values in by_name.items()}
        return found


def _figures(label: str, curves: Mapping[tuple[str, int], Tensor], last: int) -> list[Figure]:
    """Draw the task beside every distance at the last step, their ratio, and the search's steps."""
    first = next(name for name, _ in curves if name != TASK)
    task = shares(curves[TASK, 0])
    across = Axis("layer, from the image on →")
    upward = Axis("share of the information →", percent=True)

    def curve(name: str, values: Tensor) -> Curve:
        return Curve(name, tuple(range(1, len(values) + 1)), tuple(values.tolist()))

    ends = {name: shares(values) for (name, step), values in curves.items() if step == last}
    ends.pop(TASK, None)
    by_task = [curve(TASK, task), *(curve(f"inversion, {n}", share) for n, share in ends.items())]
    over_steps = [
        curve(f"after {step} steps", shares(values))
        for (name, step), values in curves.items()
        if name == first
    ]
    figures = [
        Figure(f"Fisher information: {label}", across, upward, tuple(by_task)),
        Figure(
            f"Fisher information over the attack ({first}): {label}",
            across, upward, tuple(over_steps),
        ),
    ]  # fmt: skip
    ratios = {name: share / task for name, share in ends.items() if bool((task > 0).all())}
    positive = [curve(name, ratio) for name, ratio in ratios.items() if bool((ratio > 0).all())]
    if positive:
        title = f"Inversion relative to classification: {label}"
        upward = Axis("share for inversion / share for classification", log=True)
        figures.append(Figure(title, across, upward, tuple(positive)))
    return figures
