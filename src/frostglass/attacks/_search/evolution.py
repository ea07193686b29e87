"""Evolution strategies that minimise many functions at once, from their values alone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import CHECK_EVERY

GROWTH, DECAY = 2.0, 0.84  # of the step size after a better and after a worse point
# From points (M, d) and the numbers of their rows (M,) to values (M,), the lower the better.
Values = Callable[[Tensor, Tensor], Tensor]
# From rows (n,), their least values and the points evaluated so far to whether each row stops.
Settled = Callable[[Tensor, Tensor, int], Tensor]


class Strategy(ABC):
    """The state of a strategy for each of N rows; `best` (N, d) has the values `least` (N,)."""

    def __init__(self, start: Tensor, sigma: float):
        self.best = start.clone()
        self.least = start.new_full((len(start),), torch.inf, dtype=torch.double)
        self.sigma = start.new_full((len(start), 1), sigma)

    @property
    @abstractmethod
    def population(self) -> int:
        """Number of points that a row asks for at once."""

    @abstractmethod
    def ask(self, noise: Tensor) -> Tensor:
        """Return points to evaluate from standard normal noise, both (N, population, d)."""

    @abstractmethod
    def tell(self, points: Tensor, values: Tensor) -> None:
        """Learn the values (N, population) of points, which may differ from those asked for."""

    def begin(self, values: Tensor) -> None:
        """Learn the values (N,) of the start."""
        self.least = values

    def at(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.ndim:
                setattr(self, name, value[rows])

    def _remember(self, points: Tensor, values: Tensor) -> None:
        """Keep the best point of each row; of equal values the later one."""
        least, place = values.min(1)
        better = least <= self.least
        rows = torch.arange(len(points), device=points.device)
        self.best = torch.where(better[:, None], points[rows, place], self.best)
        self.least = torch.where(better, least, self.least)


class OnePlusOne(Strategy):
    """The (1+1) strategy with the one-fifth rule: x' = x + σ ε replaces x unless it is worse.

    σ doubles after a better point, also after the start, and is multiplied by 0.84 after a worse
    one. That is what Nevergrad's NGOpt chooses for more than about 22 coordinates and 1,000 values:
    `MetaModelOnePlusOne`, whose model of the function would need more values than that.
    """

    population = 1

    def begin(self, values: Tensor) -> None:
        super().begin(values)
        self.sigma = GROWTH * self.sigma

    def ask(self, noise: Tensor) -> Tensor:
        return self.best[:, None] + self.sigma[:, None] * noise

    def tell(self, points: Tensor, values: Tensor) -> None:
        better, worse = values < self.least[:, None], values > self.least[:, None]
        factor = torch.where(better, GROWTH, torch.where(worse, DECAY, 1.0))
        self.sigma = self.sigma * factor.to(self.sigma)
        self._remember(points, values)


class SeparableCma(Strategy):
    """CMA-ES with a diagonal covariance, which adapts in about as many values as coordinates.

    Paper: Ros, Hansen, A Simple Modification in CMA-ES Achieving Linear Time and Space Complexity,
    PPSN 2008; constants as in Hansen, The CMA Evolution Strategy: A Tutorial, arXiv 1604.00772.
    """

    def __init__(self, start: Tensor, sigma: float):
        super().__init__(start, sigma)
        self.mean = start.clone()
        self.variance = torch.ones_like(start)
        self.sigma_path = torch.zeros_like(start)
        self.variance_path = torch.zeros_like(start)
        self.generation = 0
        size = self.size = start.shape[1]
        parents = self.population // 2
        ranks = torch.arange(1, parents + 1, dtype=torch.double)
        weights = math.log((self.population + 1) / 2) - ranks.log()
        self.weights = tuple((weights / weights.sum()).tolist())
        mass = self.mass = 1 / sum(weight**2 for weight in self.weights)
        self.c_sigma = (mass + 2) / (size + mass + 5)
        self.damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (size + 1)) - 1) + self.c_sigma
        self.c_path = (4 + mass / size) / (size + 4 + 2 * mass / size)
        faster = (size + 2) / 3  # a diagonal has fewer values to learn
        rank_one = faster * 2 / ((size + 1.3) ** 2 + mass)
        rank_many = faster * 2 * (mass - 2 + 1 / mass) / ((size + 2) ** 2 + mass)
        self.c_one = min(1.0, rank_one)
        self.c_many = min(1 - self.c_one, rank_many)
        self.length = math.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))  # E‖ε‖

    @property
    def population(self) -> int:
        return 4 + int(3 * math.log(self.best.shape[1]))

    def ask(self, noise: Tensor) -> Tensor:
        spread = self.sigma * self.variance.sqrt()
        return self.mean[:, None] + spread[:, None] * noise

    def tell(self, points: Tensor, values: Tensor) -> None:
        self._remember(points, values)
        self.generation += 1
        order = values.argsort(dim=1, stable=True)[:, : len(self.weights), None]
        parents = points.gather(1, order.expand(-1, -1, self.size))
        steps = (parents - self.mean[:, None]) / self.sigma[:, None]
        weights = steps.new_tensor(self.weights)[:, None]
        step = (weights * steps).sum(1)
        self.mean = self.mean + self.sigma * step
        c, mass = self.c_sigma, self.mass
        scaled = step / self.variance.sqrt()
        self.sigma_path = (1 - c) * self.sigma_path + math.sqrt(c * (2 - c) * mass) * scaled
        length = self.sigma_path.norm(dim=1, keepdim=True) / self.length
        usual = math.sqrt(1 - (1 - c) ** (2 * self.generation)) * (1.4 + 2 / (self.size + 1))
        c = self.c_path
        pushed = torch.where(length < usual, math.sqrt(c * (2 - c) * mass) * step, 0.0)
        self.variance_path = (1 - c) * self.variance_path + pushed
        lost = torch.where(length < usual, 0.0, c * (2 - c))  # what a stalled path leaves out
        kept = 1 - self.c_one - self.c_many + self.c_one * lost
        one = self.c_one * self.variance_path.square()
        many = self.c_many * (weights * steps.square()).sum(1)
        self.variance = kept * self.variance + one + many
        self.sigma = self.sigma * ((length - 1) * (self.c_sigma / self.damping)).exp()


@dataclass
class Evolved:
    """The best point (N, d) of each row, its value, and how many points were evaluated."""

    points: Tensor
    values: Tensor
    evaluations: Tensor = field(default_factory=lambda: torch.empty(0))


def evolve(
    strategy: Strategy,
    values: Values,
    rng: RowRng,
    *,
    evaluations: int,
    clamp: Callable[[Tensor], Tensor] = lambda points: points,
    settled: Settled | None = None,
) -> Evolved:
    """Minimise `values` for each row independently, with at most `evaluations` (at least 1) each.

    The first is that of the start. Points are clamped before they are evaluated. `settled(rows,
    least, spent)` tells which of the rows that still search stop; it is asked after each
    generation, and rows leave every ten evaluations. A value that is not finite is the worst.
    """
    start = clamp(strategy.best)
    rows = torch.arange(len(start), device=start.device)
    strategy.best = start

    def look(points: Tensor, rows: Tensor) -> Tensor:
        found = values(points, rows).double()
        return torch.where(found.isfinite(), found, torch.inf)

    strategy.begin(look(start, rows))
    result = Evolved(start.clone(), strategy.least.clone(), torch.ones_like(rows))
    spent, checked, size = 1, 1, strategy.population
    done = torch.zeros_like(rows, dtype=torch.bool)
    while len(rows) and spent + size <= evaluations:
        noise = rng.at(rows.tolist(), 1).normal(size, start.shape[1]).to(start)
        points = clamp(strategy.ask(noise))
        found = look(points.flatten(0, 1), rows.repeat_interleave(size))
        strategy.tell(points, found.unflatten(0, (-1, size)))
        spent += size
        if settled is not None:
            done = settled(rows, strategy.least, spent)
        if spent - checked < CHECK_EVERY and spent + size <= evaluations:
            continue
        checked = spent
        result.points[rows], result.values[rows] = strategy.best, strategy.least
        result.evaluations[rows] = spent
        if settled is not None:
            kept = (~done).nonzero()[:, 0]
            strategy.at(kept)
            rows = rows[kept]
    return result
