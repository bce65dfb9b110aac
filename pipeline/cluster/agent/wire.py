"""The agent's answers to the controller, and the small files that its processes share."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable

TYPE_CHECKING = False  # importing it from typing would take a command four milliseconds
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Json = dict[str, Any]
else:
    Json = dict

SAYS = "paceline: "
BUSY = "is busy: "
"""Begins the message about devices that others hold."""
HERE, THERE = "; here: ", "; there: "
"""Between what an agent found and the command that mends it: typed to doit, or on that host."""
LARGE_LOST = "small packets pass, large ones are lost"
UNRESOLVED = "can't resolve it: "
"""Answers of one host about its way to another one."""
REMOVED = "the run's folder %s was removed while the run was going on; the same command goes on with what is left"
token = ""
"""The token of the request, in front of each answer: random, so no other output is taken for an answer."""


def say(**fields: Any) -> None:
    """Print one answer line for the controller. Raises OSError: the connection is closed.

    It begins with a newline in the same write, because earlier output may lack one.
    """
    sys.stdout.write(f"\n@paceline {token} {json.dumps(fields)}\n")
    sys.stdout.flush()


def refuse(why: str) -> NoReturn:
    """End this agent with a line that the controller finds in the job's output."""
    sys.stderr.write(f"{SAYS}{why}\n")
    raise SystemExit(why)


def write_json(path: str, value: Any) -> None:
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def read_json(path: str) -> Any:
    """Return the value; None while the file doesn't exist (the agent's files appear complete or not at all)."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def in_thread(target: Callable[..., Any], *args: Any, on_error: Callable[[str], Any]) -> None:
    """Run ``target`` in a daemon thread; an exception is printed and passed as text to ``on_error``."""

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            on_error(f"{type(error).__name__}: {error}")

    threading.Thread(target=run, daemon=True).start()


def touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        os.utime(path)
