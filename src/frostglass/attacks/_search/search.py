"""The optimisation loop of every attack that follows gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from frostglass.attacks._search.row_rng import RowRng
from frostglass.runtime.batching import BATCH_MULTIPLE, padded_rows, search_multiple

Betas = tuple[float, float]
OptimizerName = Literal["nesterov", "momentum", "adam"]
Objective = Callable[[Tensor, Tensor, RowRng], tuple[Tensor, Tensor]]
CONVINCED = 0.5  # below this confidence no search counts as converged
CHECK_EVERY = 10  # steps between two checks for converged and non-finite rows


class Counting(Protocol):
    """A view of a target or of features, which counts the images shown to it."""

    queries: int


@dataclass(frozen=True)
class SearchResult:
    """The result of searching N rows.

    `state` (N, ...) is where each row ended after `steps` (N,) steps. `finished` (N,) is False for
    a row whose loss was not finite or that had no start. `score` (N,) ranks candidates; None ranks
    them by the target's margin. If D images are read from a row, all three may be (N, D). `trace`
    (N, steps, 3) has loss, gradient norm and confidence before each step, if they were recorded;
    NaN after a row stopped.
    """

    state: Tensor
    steps: Tensor
    finished: Tensor
    score: Tensor | None = None
    trace: Tensor | None = None

    def traces(self, reads: int) -> list[Tensor]:
        """Return the trace of each of `reads` images of a row, (N, D, steps, 3), if recorded.

        A trace is of each row, or of each read image already.
        """
        trace = self.trace
        if trace is None:
            return []
        return [(trace[:, None].expand(-1, reads, -1, -1) if trace.ndim == 3 else trace).float()]


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimiser, constraints and stopping rule of a search.

    `nesterov` is v ← μv - ηg, z ← z - μv_old + (1 + μ)v; `momentum` is v ← μv + g, z ← z - ηv;
    `adam` has `betas`. `project(state, start)` constrains rows after each step. `ramp(step,
    steps)` scales the size of a step, numbered from 1. With `patience`, a row stops early once its
    confidence has stayed within `flat` for that many steps, checked every 10 steps. A row below
    a confidence of 0.5 never stops early, because a confidence near 0 is flat too. With `trace`,
    every step is recorded.
    """

    steps: int
    lr: float
    optimizer: OptimizerName = "adam"
    momentum: float = 0.9
    patience: int = 0
    flat: float = 0.01
    project: Callable[[Tensor, Tensor], Tensor] = lambda state, start: state
    betas: Betas = (0.9, 0.999)
    ramp: Callable[[int, int], float] = lambda step, steps: 1.0
    trace: bool = False

    def build(self, state: Tensor) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam([state], lr=self.lr, betas=self.betas)
        nesterov = self.optimizer == "nesterov"
        return torch.optim.SGD([state], lr=self.lr, momentum=self.momentum, nesterov=nesterov)


def descend(
    view: Counting,
    start: Tensor,
    labels: Tensor,
    rng: RowRng,
    objective: Objective,
    settings: OptimizerSettings,
    *,
    batch_multiple: int = BATCH_MULTIPLE,
    alike: dict[int, bool] | None = None,
) -> SearchResult:
    """Minimise `objective(state, labels, rng)`, the loss and the confidence of independent rows.

    `labels` (N,) are whatever the objective has to know of each row. Rows that converged, or whose
    loss is not finite, stop with their state at the last check. Neither they nor padding are
    counted as queries.

    No row may change how kernels round another one: batches have a multiple of `batch_multiple`
    rows, and smaller ones replace them as rows stop. If `alike` is given, the first has exactly N
    rows where a trial shows that kernels round alike for N; it remembers the trials of one attack.
    """
    batch_multiple = multiple = search_multiple(batch_multiple)
    alike = {len(start): False} if alike is None else alike
    if len(start) % multiple and len(start) not in alike and not start.is_meta:  # a dry run
        alike[len(start)] = _rounds_alike(view, start, labels, rng, objective, multiple)
    multiple = 1 if alike.get(len(start)) else multiple
    trace = start.new_full((len(start), settings.steps, 3), torch.nan) if settings.trace else None
    finished = torch.ones_like(labels, dtype=torch.bool)
    result = SearchResult(start.clone(), torch.zeros_like(labels), finished, trace=trace)
    rows = torch.arange(len(start), device=start.device)  # those in the batch
    searched, count = torch.ones_like(finished), len(rows)  # those that have not stopped
    state, optimizer = _begin(start, settings, padded_rows(len(start), multiple))
    row_rng = rng.at(rows.tolist(), multiple)
    still = torch.zeros_like(labels)  # steps for which the confidence has been flat
    level = start.new_full((len(start),), torch.inf, dtype=torch.float32)
    for step in range(1, settings.steps + 1):
        before, real = view.queries, len(rows)
        padded = rows[padded_rows(real, multiple)]
        loss, confidence = objective(state, labels[padded], row_rng)
        view.queries = before + (view.queries - before) * count // len(state)
        (state.grad,) = torch.autograd.grad(loss.sum(), state)
        optimizer.param_groups[0]["lr"] = settings.lr * settings.ramp(step, settings.steps)
        optimizer.step()
        with torch.no_grad():
            state.copy_(settings.project(state, start[padded]))
        confidence = confidence.detach()[:real].float()
        if trace is not None:
            values = _recorded(loss, state.grad, confidence)
            trace[rows[searched], step - 1] = values[searched]
        moved = ((confidence - level[rows]).abs() > settings.flat) | (confidence < CONVINCED)
        level[rows] = torch.where(moved, confidence, level[rows])
        still[rows] = torch.where(moved, 0, still[rows] + 1)
        if step % CHECK_EVERY and step < settings.steps:
            continue
        current = state.detach()[:real]
        finite = loss.detach()[:real].isfinite() & current.flatten(1).isfinite().all(1)
        sound = finite & searched
        result.state[rows[sound]] = current[sound]
        result.steps[rows[searched]], result.finished[rows[searched]] = step, finite[searched]
        searched = sound & ((still[rows] < settings.patience) if settings.patience else True)
        if not (count := int(searched.sum())):
            break
        if len(padded_rows(count, batch_multiple)) < len(state):
            kept, multiple = searched.nonzero()[:, 0], batch_multiple
            rows, searched = rows[kept], searched[kept]
            state, optimizer = _select(
                state, optimizer, settings, kept[padded_rows(len(kept), multiple)]
            )
            row_rng = rng.at(rows.tolist(), multiple)
    return result


def _recorded(loss: Tensor, gradient: Tensor, confidence: Tensor) -> Tensor:
    """Return loss, gradient norm and confidence of each row, (N, 3); padding is left out."""
    values = (loss.detach(), gradient.flatten(1).norm(dim=1), confidence)
    return torch.stack([value[: len(confidence)] for value in values], 1).to(gradient)


def _rounds_alike(
    view: Counting,
    start: Tensor,
    labels: Tensor,
    rng: RowRng,
    objective: Objective,
    batch_multiple: int,
) -> bool:
    """Whether loss and gradient of each row have the same bits in a batch of these rows alone."""

    def tried(multiple: int) -> tuple[Tensor, Tensor]:
        rows = padded_rows(len(start), multiple).to(start.device)
        state = start.detach()[rows].requires_grad_()
        numbers = rng.copied().at(list(range(len(start))), multiple)
        loss, _ = objective(state, labels[rows], numbers)
        (gradient,) = torch.autograd.grad(loss.sum(), state)
        return loss.detach()[: len(start)], gradient[: len(start)]

    before = view.queries
    pairs = zip(tried(1), tried(batch_multiple), strict=True)
    result = all(bool((exact == padded).all()) for exact, padded in pairs)
    view.queries = before
    return result


def _begin(
    start: Tensor, settings: OptimizerSettings, rows: Tensor
) -> tuple[Tensor, torch.optim.Optimizer]:
    state = start.detach()[rows].clone().requires_grad_()
    return state, settings.build(state)


def _select(
    state: Tensor, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, rows: Tensor
) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return state and optimiser of some rows, with the optimiser's memory of them."""
    smaller, fresh = _begin(state, settings, rows)
    fresh.state[smaller] = {
        name: value[rows] if value.ndim else value for name, value in optimizer.state[state].items()
    }
    return smaller, fresh
