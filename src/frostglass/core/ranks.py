"""Several processes that train one network together, each on its part of every batch.

Gradients follow one rule: all ranks compute the same loss from the rows of all ranks, the backward
pass of `gathered` and `total` is the exact adjoint, and `average` takes the mean of the gradients
of the weights. The result is the gradient of one process with the whole batch, for any loss.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError

PATIENCE = timedelta(days=1)  # a rank that dies closes its connections, so others need not guess
GRACE = 20.0  # seconds in which a process may end by itself


def default_devices() -> int:
    """Return FROSTGLASS_DEVICES if it is set, else 1."""
    text = os.environ.get("FROSTGLASS_DEVICES") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"FROSTGLASS_DEVICES must be a number of at least 1, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` that train together; alone by default."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes results."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """Return this process's device: a GPU of its own, or the CPU."""
        return torch.device("cuda", self.rank) if self._own_gpu(device) else device

    def part(self, count: int) -> slice:
        """Return which of `count` rows are this process's."""
        first, rest = divmod(count, self.size)
        begin = self.rank * first + min(self.rank, rest)
        return slice(begin, begin + first + (self.rank < rest))

    def gathered(self, rows: Tensor, count: int) -> Tensor:
        """Return the `count` rows of all processes, differentiably."""
        return rows if self.size == 1 else _Gather.apply(rows, self, count)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes, differentiably."""
        return tensor if self.size == 1 else _Total.apply(tensor)

    def average(self, weights: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of weights by their mean over all processes."""
        if self.size == 1:
            return
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        parts = (flat / self.size).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view(gradient.shape))

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value of plain values and CPU tensors."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def _own_gpu(self, device: torch.device) -> bool:
        return self.size > 1 and device.type == "cuda"


ALONE = Ranks()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, count: int) -> Tensor:
        ctx.part = ranks.part(count)
        whole = rows.new_zeros(count, *rows.shape[1:])
        whole[ctx.part] = rows
        dist.all_reduce(whole)  # of zeros elsewhere, because parts of unequal size are not gathered
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient[ctx.part], None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Total.apply(gradient)


@contextmanager
def joint_batch_norm(ranks: Ranks, *modules: nn.Module) -> Iterator[None]:
    """Let batch norms in training mode use the statistics of the rows of all processes.

    torch's SyncBatchNorm is for GPUs alone; this is for all devices, so that what is tested holds
    everywhere.
    """
    if ranks.size == 1:
        yield
        return
    layers = [
        layer
        for module in modules
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    try:
        for layer in layers:
            layer.forward = _JointNorm(layer, ranks)  # type: ignore[assignment]
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


@dataclass(frozen=True)
class _JointNorm:
    """The forward pass of a batch norm over the rows of all processes."""

    layer: nn.modules.batchnorm._BatchNorm
    ranks: Ranks

    def __call__(self, rows: Tensor) -> Tensor:
        layer = self.layer
        if not layer.training:
            return type(layer).forward(layer, rows)
        layer._check_input_dim(rows)
        over, shape = [0, *range(2, rows.ndim)], [1, -1, *[1] * (rows.ndim - 2)]
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        ones = wide.new_full((), rows.numel() / rows.shape[1])
        count = self.ranks.total(ones)
        mean = self.ranks.total(wide.sum(over)) / count
        centred = wide - mean.view(shape)
        variance = self.ranks.total(centred.square().sum(over)) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        out = centred * (variance + layer.eps).rsqrt().view(shape)
        if layer.affine:
            out = out * layer.weight.view(shape) + layer.bias.view(shape)
        return out.to(rows.dtype)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics."""
        layer = self.layer
        if not layer.track_running_stats or layer.running_mean is None:
            return
        assert layer.num_batches_tracked is not None
        assert layer.running_var is not None
        with torch.no_grad():
            layer.num_batches_tracked += 1
            share = layer.momentum
            if share is None:  # batch norm then keeps the mean over all batches
                share = 1.0 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
            layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)


class _Meeting(NamedTuple):
    """What the processes that train together have in common."""

    size: int
    kind: str  # of their devices
    file: Path
    threads: int
    dtype: torch.dtype  # of new tensors, by default


@contextmanager
def together(
    size: int, device: torch.device, work: Callable[..., object], *args: Any
) -> Iterator[Ranks]:
    """Train with `size` processes inside the block: this one is the first of them.

    The others call `work(ranks, *args)`, with tensors in memory that all processes share: they must
    not be written to. If one fails, so does the block, with its reason.
    """
    if size == 1:
        yield Ranks()
        return
    _check_devices(size, device)
    context = torch.multiprocessing.get_context("spawn")
    folder, threads = Path(tempfile.mkdtemp(prefix="frostglass-ranks-")), torch.get_num_threads()
    shares = max(1, threads // size), torch.get_default_dtype()
    meeting = _Meeting(size, device.type, folder / "meeting", *shares)
    begun, reasons = context.Semaphore(0), context.SimpleQueue()
    others = [
        context.Process(target=_run, args=(rank, meeting, begun, reasons, work, args), daemon=True)
        for rank in range(1, size)
    ]
    grace = 0.0
    try:
        for process in others:
            process.start()
        _await_all(others, begun)
        yield _join(0, meeting)
        grace = GRACE
    except RuntimeError as error:  # of a connection that another process closed by its end
        for process in others:
            process.join(GRACE)
        if not reasons.empty():
            raise RunError(f"one of {size} training processes failed: {reasons.get()}") from error
        if any(process.exitcode for process in others):
            raise RunError(
                f"one of {size} training processes ended with exit code {_exit_code(others)}: run "
                "the same command again, which resumes, or use fewer devices"
            ) from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        for process in others:
            if process.pid is not None:
                process.join(grace)
                process.kill()
                process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _await_all(others: Sequence[Any], begun: Any) -> None:
    """Wait until all processes run: those that meet would wait for a missing one."""
    for _ in others:
        while not begun.acquire(timeout=1.0):
            if any(process.exitcode for process in others):
                raise RunError(
                    f"one of {len(others) + 1} training processes did not start (exit code "
                    f"{_exit_code(others)}): define your own classes in a module, guard a script "
                    'by `if __name__ == "__main__":`, or use 1 device'
                )


def _exit_code(processes: Sequence[Any]) -> int:
    return next(process.exitcode for process in processes if process.exitcode)


def _check_devices(size: int, device: torch.device) -> None:
    if dist.is_initialized():
        raise ConfigError("devices: this process is already part of a process group: use 1 device")
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"devices: {size} GPUs were asked for, this machine has {torch.cuda.device_count()}: "
            "lower the number"
        )


def _join(rank: int, meeting: _Meeting) -> Ranks:
    """Make this process one of several that train together."""
    torch.set_num_threads(meeting.threads)
    torch.set_default_dtype(meeting.dtype)
    if meeting.kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if meeting.kind == "cuda" else "gloo",
        init_method=meeting.file.as_uri(),
        rank=rank,
        world_size=meeting.size,
        timeout=PATIENCE,
    )
    return Ranks(rank, meeting.size)


def _run(
    rank: int,
    meeting: _Meeting,
    begun: Any,
    reasons: Any,
    work: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    """Do the work of one rank; say why it fails."""
    begun.release()
    try:
        work(_join(rank, meeting), *args)
    except BaseException as error:
        lines = str(error).strip().splitlines()
        reasons.put(f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the first process reports it
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
