"""How an attack's rows move: one loop for every attack that follows gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from frostglass.attacks._search.row_rng import RowRng
from frostglass.runtime.batching import BATCH_MULTIPLE, padded_rows

Betas = tuple[float, float]
OptimizerName = Literal["nesterov", "momentum", "adam"]
Objective = Callable[[Tensor, Tensor, RowRng], tuple[Tensor, Tensor]]
CONVINCED = 0.5  # confidence below which no search is called done
CHECK_EVERY = 10  # steps between two looks at who has finished or gone astray


class Counting(Protocol):
    """What counts the pictures shown to it: a view of a target, or of features."""

    queries: int


@dataclass(frozen=True)
class SearchResult:
    """Where the search of N rows ended.

    `state` (N, ...); `score` (N,) by which candidates are kept, None to let the target's margin decide; `steps` (N,) how many each row took;
    `whole` (N,) is False for a row whose search broke off: a loss that was not finite, a start that was never found.
    """

    state: Tensor
    steps: Tensor
    whole: Tensor
    score: Tensor | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """How far and how fast rows go.

    `nesterov` is v ← μv - ηg, z ← z - μv_old + (1 + μ)v; `momentum` is v ← μv + g, z ← z - ηv; `adam` has `betas`. `project(state, start)` says where rows
    may be, `ramp(t)` what the step size is multiplied by after the share t of the steps. A row is done before its
    `steps` are, if `patience` is not 0, once its confidence has stayed within `flat` for that many steps, seen at the next multiple of 10; a row that has not
    convinced the target goes on to the end, because a confidence near 0 is flat too.
    """

    steps: int
    lr: float
    optimizer: OptimizerName = "adam"
    momentum: float = 0.9
    patience: int = 0
    flat: float = 0.01
    project: Callable[[Tensor, Tensor], Tensor] = lambda state, start: state
    betas: Betas = (0.9, 0.999)
    ramp: Callable[[float], float] | None = None

    def rule(self, state: Tensor) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam([state], lr=self.lr, betas=self.betas)
        return torch.optim.SGD(
            [state], lr=self.lr, momentum=self.momentum, nesterov=self.optimizer == "nesterov"
        )


def descend(
    view: Counting,
    start: Tensor,
    labels: Tensor,
    rng: RowRng,
    objective: Objective,
    pace: OptimizerSettings,
    *,
    batch_multiple: int = BATCH_MULTIPLE,
) -> SearchResult:
    """Minimise `objective(state, labels, rng)`, which gives the loss and the target's confidence of each row; rows never influence each other.

    Rows that have finished leave the batch, and so do those whose loss is not finite, with what they had at the last check. Batches are filled
    up to a multiple of `batch_multiple`; filling is not counted as queries.
    """
    found = SearchResult(
        start.clone(), torch.zeros_like(labels), torch.ones_like(labels, dtype=torch.bool)
    )
    rows = torch.arange(len(start), device=start.device)  # those still on their way
    state, rule = _begin(start, pace, padded_rows(len(start), batch_multiple))
    rolled = rng.at(rows.tolist(), batch_multiple)
    still, level = (
        torch.zeros_like(labels),
        start.new_full((len(start),), torch.inf, dtype=torch.float32),
    )
    for step in range(1, pace.steps + 1):
        before, real, full = view.queries, len(rows), len(state)
        loss, sure = objective(state, labels[rows][padded_rows(real, batch_multiple)], rolled)
        view.queries = before + (view.queries - before) * real // full
        (state.grad,) = torch.autograd.grad(loss.sum(), state)
        if pace.ramp:
            rule.param_groups[0]["lr"] = pace.lr * pace.ramp((step - 1) / pace.steps)
        rule.step()
        with torch.no_grad():
            state.copy_(pace.project(state, start[rows][padded_rows(real, batch_multiple)]))
        sure = sure.detach()[:real].float()
        moved = ((sure - level[rows]).abs() > pace.flat) | (sure < CONVINCED)
        level[rows] = torch.where(moved, sure, level[rows])
        still[rows] = torch.where(moved, 0, still[rows] + 1)
        if step % CHECK_EVERY and step < pace.steps:
            continue
        sound = loss.detach()[:real].isfinite() & state.detach()[:real].flatten(1).isfinite().all(1)
        found.state[rows[sound]] = state.detach()[:real][sound]
        found.steps[rows], found.whole[rows] = step, sound
        staying = sound & ((still[rows] < pace.patience) if pace.patience else True)
        if not staying.any():
            break
        if not staying.all():
            kept = staying.nonzero()[:, 0]
            rows = rows[kept]
            state, rule = _shrunk(state, rule, pace, kept[padded_rows(len(kept), batch_multiple)])
            rolled = rng.at(rows.tolist(), batch_multiple)
    return found


def _begin(
    start: Tensor, pace: OptimizerSettings, fill: Tensor
) -> tuple[Tensor, torch.optim.Optimizer]:
    state = start.detach()[fill].clone().requires_grad_()
    return state, pace.rule(state)


def _shrunk(
    state: Tensor, rule: torch.optim.Optimizer, pace: OptimizerSettings, kept: Tensor
) -> tuple[Tensor, torch.optim.Optimizer]:
    """State and optimiser of some rows alone; the optimiser remembers what it knew of them."""
    smaller, fresh = _begin(state, pace, kept)
    fresh.state[smaller] = {
        name: value[kept] if value.ndim else value for name, value in rule.state[state].items()
    }
    return smaller, fresh
