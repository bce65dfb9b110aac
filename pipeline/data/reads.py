"""What a program read besides its key, so that its result is made anew when that changes.

The programs are a user's own data sets and steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipeline.core import masking
from pipeline.keys import rank_environment
from trainers.observation.input_record import first_change, record_inputs
from trainers.observation.notes import Notes

READ = "read.json"
"""File in a pack that records what a user-defined function read in addition, in the format of ``record_inputs``."""


def record_reads(
    notes: Notes, root: Path, keyed: Collection[str], bytewise: Collection[str], own: Collection[str] = ()
) -> dict[str, Any]:
    """Return what a program read besides its key, for ``reads_changed``; ``own`` are variables that it was given.

    The other arguments are those of ``record_inputs``.
    """
    record = masking.without_secret_names({**record_inputs(notes, root, keyed, bytewise)})
    digests = rank_environment.variable_digests(os.environ, own)
    return {**record, "values": {name: digests.get(name, "") for name in record["own_variables"]}}


def reads_changed(record: Mapping[str, Any], root: Path, versions: Collection[str] = ()) -> str | None:
    """Explain which file or variable of ``record_reads`` has changed since; None if none has.

    ``versions``: the distributions whose versions the key holds.
    """
    changed = first_change(record, root, versions)
    return changed or rank_environment.changed_variables(record, record.get("values"), os.environ)


def stale_because(folder: Path, root: Path) -> str | None:
    """Explain which additional input of the pack's function has changed since; None if none has."""
    try:
        return reads_changed(json.loads((folder / READ).read_text(encoding="utf-8")), root)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{READ} is damaged"
