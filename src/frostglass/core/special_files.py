"""Pipes, sockets and devices among files: opening one may wait forever, reading may never end."""

import stat
from pathlib import Path

from frostglass.core.errors import DataError

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def refuse_special(path: Path) -> None:
    """Refuse a path, or what it links to, that is a pipe, a socket or a device."""
    try:
        kind = KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return  # missing: reading it says so
    if kind:
        raise DataError(f"{path} is {kind} and not a file: remove it, or give the file itself")
