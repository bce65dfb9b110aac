"""Which node this is, and which part of the plan is its own."""

from __future__ import annotations

import os
import socket

from .wire import Json


def server_address(request: Json) -> tuple[str, int]:
    """Address and port on which ssh reached this node; 127.0.0.1 and 0 without ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if request.get("local") or len(parts) != 4:
        return "127.0.0.1", 0
    return parts[2].partition("%")[0], int(parts[3])


def identity(request: Json) -> str:
    """Equal for two names of one node: host name, ssh server's address and port, user id. A batch job knows its own."""
    if "identity" in request:
        return str(request["identity"])
    address, port = server_address(request)
    return f"{socket.gethostname()} {address}:{port} uid {os.getuid()}"


def own_node(request: Json) -> Json:
    me = identity(request)
    for node in request["nodes"]:
        if node["identity"] == me:
            return dict(node)
    raise SystemExit(f"this node is {me!r}, which the plan does not name")
