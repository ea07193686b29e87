"""Memory of this process: how much it uses, and what the C library does with freed blocks."""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# With `keep_freed_memory`, glibc returns larger blocks to the system when they are freed, and keeps
# smaller ones in its heap.
HEAP = 2**27  # bytes
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
CHECKED_AFTER = 2**27  # numbers in the parts of a loop
SLACK = 2**26  # bytes by which a loop's memory may grow


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for reuse; does nothing with another C library.

    Every step of a search or a training allocates the same blocks. By default, large ones come
    from the system each time, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # Older versions refuse more than 32 MiB. Setting the trim threshold alone would do harm: it
    # fixes the other one at its small default.
    if mallopt is not None and any(mallopt(MMAP_THRESHOLD, most) for most in (HEAP, 2**25)):
        mallopt(TRIM_THRESHOLD, 2**31 - 1)


def trimming(parts: Iterable[T], numbers: int) -> Iterator[T]:
    """Yield parts of so many numbers each; return unused memory to the system when it grows.

    What a loop keeps of each part lies between large blocks that were freed, and the blocks of the
    next part may not fit there, so that memory can grow with the length of the loop; this slows the
    growth. A return costs as much as the first use of that memory, so it is rare; it is due once in
    a long loop, for what earlier ones left.
    """
    worked, least = 0, 0
    for part in parts:
        yield part
        worked += numbers
        if worked >= CHECKED_AFTER:
            used, worked = own_memory(), 0
            if not least or used > least + SLACK:
                return_freed_memory()
            least = min(least or used, used)


def return_freed_memory() -> None:
    """Give unused pages of glibc's heap back to the system; nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def own_memory() -> int:
    """Return the bytes of memory that this process has, mapped files aside; 0 if not on Linux."""
    try:
        _, pages, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return 0
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return most_resident()
    return pages * os.sysconf("SC_PAGE_SIZE")


def most_resident() -> int:
    """Return the most bytes of memory that this process has had."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # A process inherits the system's own figure, ru_maxrss, from its parent, but not VmHWM.
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
