"""The NCCL collectives that a rank has reached, from torch's flight recorder (trainers/distributed/connecting.py)."""

from __future__ import annotations

import contextlib
import os
import pickle
import time

from trainers.contract.beats import FLIGHT_DUMP, FLIGHT_PIPE, Collectives

from ..wire import Json

DUMP_S = 6.0
"""Until a dump is complete: torch reads the pipe once a second, and took 4 to 5 s for 30 collectives."""

_MOST_FRAMES = 12
_POLL_S = 0.2
_DAMAGED = (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)


class _Plain(pickle.Unpickler):
    """Unpickles numbers, texts, lists and dictionaries alone: nothing in a rank's file is imported or called."""

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def request_dump(folder: str, rank: int) -> str | None:
    """Ask the rank with files in ``folder`` for a dump; return its path. None: it has no flight recorder."""
    pipe, dump = (os.path.join(folder, name) for name in (f"{FLIGHT_PIPE}{rank}.pipe", f"{FLIGHT_DUMP}{rank}"))
    with contextlib.suppress(OSError):
        os.unlink(dump)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.write(descriptor, b"1\n")
    os.close(descriptor)
    return dump


def read_dump(dump: str, until: float) -> tuple[Collectives, ...]:
    """Return the collectives of each process group: started, ended, the first unfinished one and its place in the code.

    Empty if no complete dump exists by ``until`` (of ``time.monotonic``).
    """
    while True:
        with contextlib.suppress(OSError, *_DAMAGED), open(dump, "rb") as file:
            return _collectives_of(_Plain(file).load())
        if time.monotonic() >= until:
            return ()
        time.sleep(_POLL_S)


def _collectives_of(dump: Json) -> tuple[Collectives, ...]:
    rows = []
    for group, status in dump["pg_status"].items():
        given, ended = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
        if given <= 0:
            continue
        waits = [
            entry
            for entry in dump["entries"]
            if str(entry["process_group"][0]) == str(group)
            and entry["collective_seq_id"] == ended + 1
            and not entry["is_p2p"]
        ]
        which = _next_collective(waits[-1]) if waits else {}
        rows.append(Collectives(group=str(group), given=given, ended=max(ended, 0), **which))
    return tuple(rows)


def _next_collective(entry: Json) -> dict[str, str]:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = " and ".join("×".join(map(str, size)) or "1" for size in entry["input_sizes"])
    kinds = " and ".join(sorted({str(kind) for kind in entry["input_dtypes"]}))
    frames = [frame for frame in entry.get("frames", [])[:_MOST_FRAMES] if "/torch/" not in frame["filename"]]
    at = f"{frames[0]['filename']}:{frames[0]['line']} in {frames[0]['name']}" if frames else ""
    return {"next": f"{name} of {sizes} {kinds}", "at": at}
