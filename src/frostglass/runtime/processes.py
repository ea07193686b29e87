"""Processes by name, so that what a dead one left can be told from what a living one uses."""

import hashlib
import os
import re
import socket
from pathlib import Path


def machine_name() -> str:
    """Return this machine's name and a hash of its boot and process namespace.

    Two machines or containers may share a name, and their process numbers mean different processes.
    """
    name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    numbers = f"{boot.read_text()}{space.stat().st_ino}" if boot.exists() and space.exists() else ""
    return f"{name}-{hashlib.sha256(numbers.encode()).hexdigest()[:8]}"


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine is running."""
    try:
        os.kill(pid, 0)
    except OSError as error:  # no permission for another user's process
        return not isinstance(error, ProcessLookupError)
    return True


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
