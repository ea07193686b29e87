"""The batches of an epoch: read and augmented in the background, ahead of the network."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor

from frostglass.core.types import Images
from frostglass.data._augment import Changes

T = TypeVar("T")
AHEAD = 2  # batches that are prepared while the network trains on another
CACHED = 2**18  # numbers that are augmented together: small enough for a CPU's cache


def prepared(
    images: Images, index: Tensor, changes: Sequence[Changes], layout: torch.memory_format
) -> Tensor:
    """Return the images at `index`, each changed by a row of all `changes`, in a memory layout.

    A few images at a time: the temporary tensors of a whole batch are allocated anew each time, and
    the first use of their pages takes longer than the augmentation itself.
    """
    step = max(1, CACHED // math.prod(images.shape))
    if 0 < len(index) <= step:
        return _changed(images.floats(index), changes).contiguous(memory_format=layout)
    shape, device = (len(index), *images.shape), "meta" if images.pixels.is_meta else "cpu"
    batch = torch.empty(shape, memory_format=layout, device=device)
    for first in range(0, len(index), step):  # none in a process that has no part of a batch
        part = slice(first, first + step)
        batch[part] = _changed(images.floats(index[part]), [each.rows(part) for each in changes])
    return batch


def _changed(images: Tensor, changes: Sequence[Changes]) -> Tensor:
    for change in changes:
        images = change.apply(images)
    return images


def computed_ahead(
    tasks: Iterable[Callable[[], T]], *, thread: bool = True
) -> Generator[T, None, None]:
    """Yield the results of tasks in order, computed up to `AHEAD` before they are asked for.

    One other thread does them in order, so random draws of the tasks do not depend on timing.
    Without `thread` they are as far ahead in this one, for dry runs.
    """
    with ExitStack() as stack:
        submit: Callable[[Callable[[], T]], Future[T]] = _at_once
        if thread:
            pool = stack.enter_context(ThreadPoolExecutor(1, "batches"))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            submit = pool.submit
        waiting = deque[Future[T]]()
        for task in tasks:
            waiting.append(submit(task))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _at_once(task: Callable[[], T]) -> Future[T]:
    future = Future[T]()
    future.set_result(task())
    return future
