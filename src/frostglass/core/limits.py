"""Limits on networks that a file describes, so that a damaged file cannot ask for any memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration

from frostglass.core.errors import CheckpointError

# A network may be larger than its file for a moment, when a method replaces some of its layers.
SLACK = 4
LEAST_NUMBERS, LEAST_PARTS = 2**20, 1000
UNREADABLE = 2**28


@contextmanager
def within_file(
    path: Any, shapes: Iterable[Sequence[int]], *, least: int = LEAST_NUMBERS
) -> Iterator[None]:
    """Refuse networks that are much larger than the file of their weights, while they are built.

    A layer is counted when its weights are registered. On the meta device no memory is used until
    then, on others its pages are not written yet.
    """
    sizes = [math.prod(shape) for shape in shapes]
    # A file that cannot be read has no shapes; the code that loads its tensors says so.
    most = max(SLACK * sum(sizes), least if sizes else UNREADABLE)
    parts = SLACK * max(SLACK * len(sizes), LEAST_PARTS)
    left = {"numbers": most, "parts": parts}

    def count(_module: nn.Module, _name: str, part: Any) -> None:
        left["parts"] -= 1
        left["numbers"] -= part.numel() if isinstance(part, Tensor) else 0
        if min(left.values()) < 0:
            raise CheckpointError(
                f"{path} describes a network that is far larger than its {sum(sizes):,} numbers: "
                "the description was changed; write the file again"
            )

    handles = [
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
        registration.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
