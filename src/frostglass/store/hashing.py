"""Hashes of files, kept in memory until a file changes: grids check the same files often."""

import hashlib
import time
from functools import lru_cache
from pathlib import Path

RECENT = 2_000_000_000  # nanoseconds


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file; one whose inode, size and time are known is not read again."""
    status = path.stat()
    # A file may change twice within a tick of its clock, so a recent one is read again.
    if time.time_ns() - status.st_mtime_ns < RECENT:
        return _read(path)
    return _known(path, status.st_size, status.st_mtime_ns, status.st_ino)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=1024)
def _known(path: Path, size: int, changed: int, inode: int) -> str:
    return _read(path)
