"""What a person's own ssh configuration says of shared connections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_READ = re.compile(r"^debug1: Reading configuration data (.+?)\r?$", re.MULTILINE)
_MENTIONED = re.compile(r"controlpath|include.*[%$]", re.IGNORECASE)  # an include that depends on the host
_SET = re.compile(r"^controlpath (?!none$)", re.MULTILINE)

Told = Callable[[str, Sequence[str]], tuple[str, str]]
"""Host label, further options of ``ssh -G`` → its output and its errors."""


def shares_already(labels: Sequence[str], told: Told, *, at_once: int) -> bool:
    """Whether the configuration shares connections to one of these hosts.

    ``ssh -G`` takes ten milliseconds of a core for a host. So one host is asked which files ssh reads: they are the
    same for all hosts, since it reads those of other hosts' blocks, too. Only where one of them mentions it are all of
    them asked.
    """
    files = _READ.findall(told(labels[0], ["-v"])[1])
    if files and not any(map(_MENTIONED.search, _texts(files))):
        return False
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return any(pool.map(lambda label: _SET.search(told(label, [])[0]), labels))


def _texts(files: Sequence[str]) -> Iterator[str]:
    for name in files:
        try:
            yield Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:  # ssh cuts long names, and may read what this process can't
            yield "controlpath"
