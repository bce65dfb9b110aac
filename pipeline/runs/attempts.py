"""The attempts of a run: their ids, and which of them a run folder counts as its own.

attempts.json is written before an attempt starts and travels to the hosts with it. A checkpoint of an attempt that it
doesn't name was left by processes of a folder that stood here before, and is not taken up
(trainers/distributed/attempt.py), unless it was meant to outlive that folder: the one of a mirror.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.core.files import sha256_text, write_json
from trainers.contract import run_folder


def prefix(run_key: str, run_dir: Path) -> str:
    """How the ids of all attempts of one run folder begin, whatever folder stood at its path before.

    Two clones may train the same key on the same hosts: what is ended for one of them is not the other's.
    """
    return f"{run_key}-{sha256_text(str(run_dir))[:6]}-"


def new_id(run_key: str, run_dir: Path, attempt: int, nonce: str) -> str:
    """A run id that no other start has; ``nonce`` sets the starts of one attempt apart."""
    return f"{prefix(run_key, run_dir)}{attempt}-{nonce}"


def prefix_of(run_id: str) -> str:
    """The ``prefix`` that a run id was made with."""
    return run_id.rsplit("-", 2)[0] + "-"


def number(run_id: str) -> int:
    """Which attempt a run id is of."""
    return int(run_id.rsplit("-", 2)[1])


def known(run_dir: Path) -> list[str]:
    """The run ids of all starts so far, the newest last; none where the file is missing or damaged."""
    try:
        value = json.loads((run_dir / run_folder.ATTEMPT_IDS).read_text(encoding="utf-8"))["attempts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def register(run_dir: Path, run_id: str) -> None:
    """Make ``run_id`` the newest attempt: ranks of another one end when they see it. Raises OSError."""
    write_json(run_dir / run_folder.ATTEMPT_IDS, {"attempts": [*known(run_dir), run_id]})


def adopt(run_dir: Path, run_id: str) -> None:
    """Count what ``run_id`` has written as this folder's own: an attempt of the run in a folder that was lost. Raises
    OSError."""
    if run_id not in known(run_dir):
        write_json(run_dir / run_folder.ATTEMPT_IDS, {"attempts": [run_id, *known(run_dir)]})
