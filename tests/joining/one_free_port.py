"""A port of this host that nobody listens on."""

import socket


def free_port():
    """Return one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
