"""Seeds, threads and the promise to leave the caller's networks as they were."""

import ctypes
import os

HEAP = (
    2**27
)  # bytes; with `keep_freed_memory` the C library takes larger blocks from the system and gives them back at once, smaller ones from a heap it keeps
MMAP_THRESHOLD, TRIM_THRESHOLD = (
    -3,
    -1,
)  # what glibc's mallopt calls M_MMAP_THRESHOLD and M_TRIM_THRESHOLD


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees: every step of a search or a training asks for the same blocks again, and those of some
    size would else come from the system each time, page by page. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # Older versions refuse more than 32 MiB. The second setting alone would do harm: it fixes the first at its small default.
    if mallopt is not None and any(mallopt(MMAP_THRESHOLD, most) for most in (HEAP, 2**25)):
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
