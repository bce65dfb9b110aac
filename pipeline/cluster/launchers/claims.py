"""What a run claims on its hosts, and a place in the queue for one. docs/clusters.md says what for."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import Any

from pipeline.cluster.launchers.answers import parse
from pipeline.cluster.launchers.payload import message, new_token
from pipeline.cluster.launchers.settings import POLICIES
from pipeline.core import process, threads
from pipeline.core.specs import Cluster, Host
from trainers.contract import run_folder

_AUTO, REFUSE, WAIT, SHARE = POLICIES
WHEN_BUSY = "cluster.when_busy=wait takes its turn, cluster.when_busy=share starts beside it; or other hosts"
_BEAT_S = 1.0


def policy(cluster: Cluster) -> str:
    """refuse, wait or share; GPUs are somebody's alone unless the configuration says otherwise."""
    if cluster.when_busy != _AUTO:
        return cluster.when_busy
    return REFUSE if cluster.device == "cuda" else SHARE


def resources(host: Host, device: str) -> list[str]:
    """What ranks of that host compute on: ``gpu:0``, …, or ``cpu``."""
    if device != "cuda":
        return ["cpu"]
    chosen = {**host.placement, **host.env}.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(host.nproc_per_node)] if chosen is None else chosen.split(",")
    return [f"gpu:{name.strip()}" for name in names[: host.nproc_per_node] if name.strip()]


@cache
def group() -> str:
    """Of this process: its runs don't refuse each other, as a sweep arranges its trials itself."""
    return secrets.token_hex(8)


def claim(cluster: Cluster, host: Host, attempts: str, what: str) -> dict[str, Any]:
    """What the agent is told (``stake`` in agent/claims.py)."""
    return {
        "resources": resources(host, cluster.device),
        "attempts": attempts,
        "group": group(),
        "what": what,
        "alone": policy(cluster) != SHARE,
    }


def title(run_dir: Path, run_key: str) -> str:
    """How a run is called where others read it."""
    model = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
        model = f" ({config['model']['name']})"
    return f"run {run_key}{model}"


class Place:
    """A live agent that waits in the queue of one host, and keeps its place until ``leave``."""

    def __init__(self, argv: list[str], wish: Mapping[str, Any]) -> None:
        self._token, self._over = new_token(), threading.Event()
        self.ahead: list[str] | None = None  # who goes before it, in words; None: not told yet
        self.lost = ""  # why nothing more is heard
        self.refused = ""  # what the agent says against it: the same would come again
        self._child = process.stream(argv)
        self._opening = message({"do": "hold", "claim": dict(wish)}, self._token)
        threads.start(self._read, self._child, name="place", on_error=self._failed)
        threads.start(self._beat, name="beats of a place", on_error=self._failed)

    def _failed(self, why: str) -> None:
        self.lost = self.lost or why

    def _write(self, data: bytes) -> None:
        if self._child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # its end shows where it is read
                self._child.stdin.write(data)
                self._child.stdin.flush()

    def _beat(self) -> None:
        self._write(self._opening)  # here: more than a pipe holds, and a host may read none of it
        while not self._over.wait(_BEAT_S):
            self._write(b"beat\n")

    def _read(self, child: Popen[bytes]) -> None:
        for line in child.stdout or ():
            answer = parse(line, self._token)
            if answer is not None and "error" in answer:
                self.lost = self.refused = str(answer["error"])
            elif answer is not None:
                self.ahead = [str(text) for text in answer.get("ahead", [])]
        self.lost = self.lost or "the connection ended"

    def leave(self) -> None:
        self._over.set()
        self._child.kill()  # also one that is stopped
        for pipe in (self._child.stdin, self._child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child.wait()
