"""The command `frostglass`: what happens before and after a command, whatever it is.

Nothing slow is imported here, so that an interrupt is handled from the first moment.
"""

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from frostglass.runtime.environment import set_kernel_defaults

STOPPED = "frostglass: stopped; run the same command again to resume"
INTERRUPTED = 130  # the exit code of a process that an interrupt ended


def guarded(command: Callable[[], Any]) -> int:
    """Turn the package's errors into one line and an exit code; a bug keeps its traceback."""
    from frostglass.core.errors import ConfigError, FrostglassError

    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # notice a closed pipe here, not while Python shuts down
    except FrostglassError as error:
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        lines = [" ".join(problem.splitlines()) for problem in problems]
        lines = [f"{len(lines)} problems", *lines] if len(lines) > 1 else lines
        print("frostglass: " + "\n  ".join(lines), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The code of a process killed by a closed pipe, never 0: the verdict may be missing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def main() -> None:
    """Run the `frostglass` command."""
    # A shell ignores interrupts in its background jobs: then this must too.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop_at_once)
    set_kernel_defaults(os.environ)  # before torch is imported: MKL reads it once
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # formulas print on any terminal
    if not sys.flags.safe_path:
        sys.path.append("")  # a user's own module:function may be in the current folder
    from frostglass.cli.app import app

    app()


def _stop_at_once(*_: Any) -> NoReturn:
    """End the process without an exception, which compiled modules lose while they are imported."""
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def raise_on_interrupt() -> None:
    """Let an interrupt raise from now on: there is work whose files and leases must be tidied."""
    if signal.getsignal(signal.SIGINT) is _stop_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
