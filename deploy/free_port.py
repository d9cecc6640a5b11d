"""A port of this machine for a process that is yet to be started."""

from __future__ import annotations

import socket


def free_port(host: str, port: int, option: str = "--port") -> int:
    """The port, if it is free, or for 0 any that is: it has to be known early, and kept when the router restarts.

    Asked before anything is started: workers must not register with another router that happens to be there.
    """
    try:
        with socket.create_server((host, port)) as server:
            free: int = server.getsockname()[1]
            return free
    except OSError as error:
        why, _, _ = (error.strerror or str(error)).partition(" (while")  # what follows is the address again
        raise OSError(f"cannot listen at {host}:{port}: {why}; choose another {option}, or 0 for any") from error
