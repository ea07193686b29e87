"""Serve a study, on this machine alone unless told otherwise."""

import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path

from frostglass.core.errors import ConfigError
from frostglass.study.folder import read_study

LOCALHOST = "127.0.0.1"
KEEP_ALIVE = 20  # seconds that an idle connection stays open: the time to look at a trial
WAITING = 2048  # connections that the system may hold back for the server


def serve_study(
    path: Path,
    host: str = LOCALHOST,
    port: int = 8000,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the study in a folder until the process is interrupted.

    `ready` is called with the address once it is bound. Nothing is logged about requests: their
    paths hold tokens, and they come from addresses of people.
    """
    try:
        import uvicorn

        from frostglass.study.app import study_app
    except ImportError as error:
        raise ConfigError(
            f"serving a study needs starlette and uvicorn, which cannot be imported ({error}): "
            "pip install 'frostglass[study]'"
        ) from error
    application = study_app(read_study(Path(path)))
    with _bound(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listener.getsockname()[1]}")
        config = uvicorn.Config(
            application,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=5,
        )
        uvicorn.Server(config).run(sockets=[listener])


def is_local(host: str) -> bool:
    """Does a host lead to this machine alone?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=WAITING)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error}): choose another --port or --host"
        ) from error
