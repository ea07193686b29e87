"""Memory of this process: how much it uses, and what the C library does with freed blocks."""

import ctypes
import os
import sys
from pathlib import Path

# With `keep_freed_memory`, glibc returns larger blocks to the system when they are freed, and keeps
# smaller ones in its heap.
HEAP = 2**27  # bytes
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h


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
