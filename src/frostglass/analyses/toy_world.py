"""CALoR's toy world: a classifier of points in the plane, inverted by gradient ascent."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.analyses._result import Analysis, Axis, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.core.parameters import parameters
from frostglass.metrics._stats import interval
from frostglass.runtime.seeding import generator_for, seeded

# Title, whether the head has a low rank, whether it has tanh, distance in the paper's Appendix A.
WORLDS = (
    ("plain", False, False, 1.67),
    ("tanh", False, True, 1.76),
    ("low rank", True, False, 3.39),
    ("low rank and tanh", True, True, 19.33),
)
MARKS = 25  # points of a drawn path
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "none": lambda values: values,
}


@analyses.register
@parameters
class ToyWorld(AnalysisMethod):
    """Four classifiers of points in the plane, each inverted: what low rank and tanh do.

    Points of each class are normal around a centre; the centres lie on a circle. A network of three
    layers learns the class. The attack starts at a random point and climbs the log probability of
    one class. The table has the distance from where it ends to the nearest training point of that
    class, for four heads: plain, tanh, low rank, low rank with tanh. No config is used.

    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814,
        Figure 7 and Appendix A: distances 1.67, 1.76, 3.39 and 19.33, of one attack each.
    Differs: the paper gives the network (hidden width 20, ReLU) and the 2,500 steps. Number and
        place of the classes, optimiser, step size and start are ours: three classes, because a head
        of rank 2 with tanh does not learn more of them on a circle. Distances are means over
        `networks` trained from different weights, all classes and `starts` attacks on each.

    Args:
        classes: number of classes. points: training points of each.
        radius: of the circle of centres. spread: standard deviation within a class.
        hidden: width of the two hidden layers. rank: of the low-rank heads.
        epochs, lr: of the training, by Adam on all points at once.
        steps, step: number and size of the attack's steps, by gradient ascent.
        networks: trained for each head. starts: attacks on each class of each.
        start: standard deviation of the attack's starting points.
        seed: of everything random.
    """

    classes: Annotated[int, Field(ge=2)] = 3
    points: Annotated[int, Field(ge=1)] = 50
    radius: Annotated[float, Field(gt=0)] = 5.0
    spread: Annotated[float, Field(gt=0)] = 0.5
    hidden: Annotated[int, Field(ge=1)] = 20
    rank: Annotated[int, Field(ge=1)] = 2
    epochs: Annotated[int, Field(ge=1)] = 500
    lr: Annotated[float, Field(gt=0)] = 0.01
    steps: Annotated[int, Field(ge=1)] = 2500
    step: Annotated[float, Field(gt=0)] = 0.1
    networks: Annotated[int, Field(ge=2)] = 10
    starts: Annotated[int, Field(ge=1)] = 4
    start: Annotated[float, Field(gt=0)] = 1.0
    seed: int = 0

    title = "toy world"
    surfaces = frozenset()

    def run(self, context: Context) -> Analysis:
        data, labels = self.data()
        rows, figures = [], []
        for title, low_rank, tanh, published in WORLDS:
            network = self.trained(data, labels, low_rank=low_rank, tanh=tanh)
            with torch.no_grad():
                right = network(data.expand(self.networks, -1, -1)).argmax(2) == labels
            path, wanted = self.attack(network)
            away = torch.stack([nearest_of_class(e, wanted, data, labels) for e in path[-1]])
            low, high = interval(away.mean(1))
            confidence = _log_confidence(network, path[-1], wanted).exp().mean().item()
            accuracy = right.double().mean().item()
            rows.append((title, accuracy, confidence, away.mean().item(), low, high, published))
            figures.append(self.panel(title, data, path[:, 0]))
        head = ("head", "accuracy", "confidence", "distance", "low", "high", "published distance")
        name = "distance from the end of the attack to the nearest point of the class"
        return Analysis((Table(name, head, tuple(rows)),), tuple(figures))

    def data(self) -> tuple[Tensor, Tensor]:
        """Draw the training points, (N, 2), and their classes, (N,)."""
        angles = torch.arange(self.classes) * (2 * torch.pi / self.classes)
        centres = self.radius * torch.stack([angles.cos(), angles.sin()], 1)
        labels = torch.arange(self.classes).repeat_interleave(self.points)
        rng = generator_for(self.seed, "toy", "points")
        return centres[labels] + self.spread * torch.randn(len(labels), 2, generator=rng), labels

    def trained(self, data: Tensor, labels: Tensor, *, low_rank: bool, tanh: bool) -> "Networks":
        """Train the classifiers with one of the four heads."""
        # A low-rank head has its tanh after the compression; else tanh replaces the last ReLU.
        widths = [2, self.hidden, self.hidden, *[self.rank] * low_rank, self.classes]
        between = ["relu", "relu", *["none"] * low_rank]
        if tanh:
            between[-1] = "tanh"
        network = Networks(self.networks, widths, between, seed=self.seed)
        optimizer = torch.optim.Adam(network.parameters(), self.lr)
        every, answers = data.expand(self.networks, -1, -1), labels.expand(self.networks, -1)
        for _ in range(self.epochs):
            optimizer.zero_grad()
            logits = network(every).flatten(0, 1)
            # Summed over networks, so that each learns as it would alone.
            loss = F.cross_entropy(logits, answers.flatten(), reduction="sum") / len(data)
            loss.backward()
            optimizer.step()
        return network.requires_grad_(False)

    def attack(self, network: "Networks") -> tuple[Tensor, Tensor]:
        """Climb each class's probability; return paths (T, networks, N, 2) and classes (N,)."""
        wanted = torch.arange(self.classes).repeat_interleave(self.starts)
        rng = generator_for(self.seed, "toy", "starts")
        # The same starts for every class and network.
        begin = self.start * torch.randn(self.starts, 2, generator=rng)
        points = begin.repeat(self.networks, self.classes, 1)
        path, kept = [points], max(1, self.steps // MARKS)
        for number in range(1, self.steps + 1):
            points.requires_grad_(True)
            (slope,) = torch.autograd.grad(_log_confidence(network, points, wanted).sum(), points)
            points = (points + self.step * slope).detach()
            if number % kept == 0 or number == self.steps:
                path.append(points)
        return torch.stack(path).detach(), wanted

    def panel(self, title: str, data: Tensor, path: Tensor) -> Figure:
        """Draw the training points and the first attack on each class, of paths (T, N, 2)."""
        curves = [Curve("training points", *_columns(data[::5]), joined=False)]
        curves += [
            Curve(f"attack on class {number + 1}", *_columns(path[:, number * self.starts]))
            for number in range(self.classes)
        ]
        return Figure(f"Toy world: {title}", Axis("x"), Axis("y"), tuple(curves))


class Networks(nn.Module):
    """Independent networks of one shape, computed together: points (S, N, 2) to (S, N, classes).

    `between` names the activation after each layer but the last.
    """

    def __init__(self, count: int, widths: Sequence[int], between: Sequence[str], *, seed: int):
        super().__init__()
        self.between = [*between, "none"]
        with seeded(seed, "toy", "networks"):
            layers = [[nn.Linear(i, o) for _ in range(count)] for i, o in pairwise(widths)]
        self.weights = nn.ParameterList(
            [torch.stack([one.weight.detach().T for one in layer]) for layer in layers]
        )
        self.biases = nn.ParameterList(
            [torch.stack([one.bias.detach()[None] for one in layer]) for layer in layers]
        )

    def forward(self, points: Tensor) -> Tensor:
        for weight, bias, kind in zip(self.weights, self.biases, self.between, strict=True):
            points = ACTIVATIONS[kind](torch.baddbmm(bias, points, weight))
        return points


def nearest_of_class(ends: Tensor, wanted: Tensor, data: Tensor, labels: Tensor) -> Tensor:
    """Return the distance from each end (N, 2) to the nearest point of its class."""
    apart = (ends[:, None] - data).norm(dim=2)
    return apart.masked_fill(wanted[:, None] != labels, torch.inf).amin(1).double()


def _log_confidence(network: Networks, points: Tensor, wanted: Tensor) -> Tensor:
    place = wanted[:, None].expand(len(points), -1, -1)
    return network(points).log_softmax(2).gather(2, place)[..., 0]


def _columns(points: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(points[:, 0].tolist()), tuple(points[:, 1].tolist())
