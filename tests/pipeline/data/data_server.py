"""A real HTTP server on 127.0.0.1 whose misbehaviour is scripted."""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass, field

from tests.waiting import HANG_S


@dataclass
class Script:
    """What the server holds and how the next answers go wrong (each list is used up from its front)."""

    files: dict[str, bytes] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)  # answered instead of the file
    cut_after: list[int] = field(default_factory=list)  # bytes sent before the connection is closed
    encoding: str | None = None  # what the body is said to be encoded in
    claimed: str | None = None  # instead of the true Content-Length
    seen: list[str] = field(default_factory=list)  # paths
    stall: threading.Event | None = None  # set: waited for in the middle of a body
    stalled: threading.Event = field(default_factory=threading.Event)


class Handler(http.server.BaseHTTPRequestHandler):
    script: Script

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        script = self.script
        script.seen.append(self.path)
        if script.statuses:
            self.send_error(script.statuses.pop(0))
            return
        content = script.files.get(self.path.partition("?")[0].lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        self._send(content)

    def _send(self, body: bytes) -> None:
        script = self.script
        self.send_response(200)
        if script.encoding:
            self.send_header("Content-Encoding", script.encoding)
        self.send_header("Content-Length", script.claimed or str(len(body)))
        self.end_headers()
        if script.cut_after:
            body = body[: script.cut_after.pop(0)]
        half = len(body) // 2
        self.wfile.write(body[:half])
        if script.stall is not None:
            self.wfile.flush()
            script.stalled.set()
            script.stall.wait(HANG_S)
        self.wfile.write(body[half:])


class Server:
    """Context manager; ``url`` ends in a slash."""

    def __init__(self) -> None:
        self.script = Script()
        handler = type("Bound", (Handler,), {"script": self.script})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.script.stall is not None:
            self.script.stall.set()
        self._server.shutdown()
        self._server.server_close()
