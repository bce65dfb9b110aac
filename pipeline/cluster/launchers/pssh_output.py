"""The files and the report that pssh leaves. Pure but for reading them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pipeline.cluster.launchers.replies import ENDLESS, Output
from pipeline.core.specs import Host

MOST_BYTES = 32 << 20
"""No answer is so long, and nothing that a login prints before one."""
_SHOWN_BYTES = 4096


def pssh_name(host: Host) -> str:
    """One line of pssh's host file. pssh splits at the last colon, so an IPv6 address needs its port."""
    if ":" in host.name and host.port is None:
        return f"{host.label}:22"
    return host.label


def written(folder: Path, name: str) -> Output:
    """What one host has written so far.

    Args:
        name: of the host in pssh's host file, and so of its two files.
    """
    out, err = folder / "out" / name, folder / "err" / name
    return Output(
        stdout=_beginning(out) if out.exists() else b"",
        stderr=err.read_text(encoding="utf-8", errors="replace") if err.exists() else "",
    )


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_BYTES)


def endless(output: Output) -> Output | None:
    """The end of what was read, with a note; None: what was written has an end so far."""
    if len(output.stdout) < MOST_BYTES:
        return None
    note = f"{ENDLESS} ({MOST_BYTES >> 20} MiB so far)"
    return replace(output, stdout=output.stdout[-_SHOWN_BYTES:], code=None, note=note)


def fills_the_disk(folder: Path) -> bool:
    """Whether a host of those that write into ``folder`` has written more than is ever read."""
    with suppress(OSError):  # there is nothing yet
        return any(path.stat().st_size > 2 * MOST_BYTES for path in folder.iterdir())
    return False


def output_of(folder: Path, name: str, report: str, timeout_s: float) -> Output:
    """What one host has written, and how it ended, as pssh's report says.

    Args:
        name: of the host in pssh's host file, and so of its two files.
        timeout_s: the limit that pssh was given.
    """
    ended = _ends(report).get(name)
    how = ended or ""
    code, number = re.search(r"error code (\d+)", how), re.search(r"signal (\d+)", how)
    output = written(folder, name)
    if (more := endless(output)) is not None:
        return more
    late = late_note(timeout_s) if "Timed out" in how else ""
    return replace(
        output,
        code=None if late or ended is None else int(code[1]) if code else -int(number[1]) if number else 0,
        note="pssh has not asked it" if ended is None else late,
    )


@lru_cache(maxsize=1)
def _ends(report: str) -> dict[str, str]:
    """Each host's name → what the report says of its end. Read once for all hosts: it has a line of each."""
    lines = re.finditer(r"\[(?:SUCCESS|FAILURE)\] (\S+)(?: (.*))?$", report, re.MULTILINE)
    return {line[1]: line[2] or "" for line in lines}


def late_note(timeout_s: float) -> str:
    return f"it hadn't answered after {timeout_s:g} s"
