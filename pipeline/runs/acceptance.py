"""Acceptances: a user declares, without a proof, that the result of a finished run holds for another key too.

accepted.json, in the folder of the new key, names the finished run. It holds while that run is intact, and until a
training under the new key replaces it.
"""

from __future__ import annotations

import getpass
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.keys.content_key import KEY_LENGTH, ContentKey, Difference
from pipeline.runs import result as results
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import Result

FILE = "accepted.json"
AS_FILE = "accepted_as.json"
"""In the folder of the finished run: the keys that it was accepted for, for its record in MLflow."""

_KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")
BASE_RESULT_FILE = "accepted_result.json"
"""In an exported run: the result of the finished run, whose folder isn't there."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The content of accepted.json.

    ``run`` is the key of the finished run, ``run_digest`` its full digest, ``digest`` that of the new key. ``who`` is
    user@host. ``proven``: the run was repeated under the new key since, with equal weights.
    """

    digest: str
    run: str
    run_digest: str
    differences: tuple[Difference, ...]
    who: str
    unix_time: float
    proven: bool = False

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.unix_time))
        word = "accepted and proven equal" if self.proven else "accepted, not proven"
        return f"{word}: as {self.run}, by {self.who} on {day}"


def by_this_user(key: ContentKey, base: ContentKey, differences: Sequence[Difference]) -> Acceptance:
    """Return an acceptance by the current user, made now."""
    return Acceptance(
        digest=key.digest,
        run=base.short,
        run_digest=base.digest,
        differences=tuple(differences),
        who=f"{_user()}@{platform.node()}",
        unix_time=round(time.time(), 3),
    )


def write(folder: RunFolder, acceptance: Acceptance) -> None:
    """Write the acceptance into the folders of the new key and of the run. Raises OSError."""
    documents.write_sealed(folder.path / FILE, asdict(acceptance))
    _update_base(folder, acceptance)


def withdraw(folder: RunFolder, acceptance: Acceptance) -> None:
    """Remove the acceptance from both folders. Raises OSError."""
    (folder.path / FILE).unlink(missing_ok=True)
    _update_base(folder, acceptance, withdrawn=True)


def base_of(folder: RunFolder, acceptance: Acceptance) -> RunFolder:
    """Return the finished run that holds for the folder's key."""
    return RunFolder(folder.path.with_name(acceptance.run))


def read(folder: RunFolder) -> Acceptance | None:
    """Read the acceptance; None if there is none. Raises AlteredError."""
    path = folder.path / FILE
    if not path.exists():
        return None
    try:
        raw = documents.read_sealed(path)
        differences = tuple(Difference(**item) for item in raw.pop("differences"))
        acceptance = Acceptance(differences=differences, **raw)
    except documents.DamagedError as error:
        raise folder.altered(FILE, str(error)) from error
    except (TypeError, KeyError) as error:
        raise folder.altered(FILE, f"holds what no acceptance does ({error})") from error
    texts = (acceptance.digest, acceptance.run, acceptance.run_digest, acceptance.who)
    if not all(isinstance(text, str) and text.isprintable() for text in texts) or not _KEY.fullmatch(acceptance.run):
        raise folder.altered(FILE, "names no run")
    if type(acceptance.unix_time) not in (int, float) or not 0 <= acceptance.unix_time < 1 << 33:
        raise folder.altered(FILE, "has no time")
    if acceptance.digest[: len(folder.key)] != folder.key:
        raise folder.altered(FILE, "is that of another run")
    return acceptance


def stale_because(folder: RunFolder, acceptance: Acceptance, digest: str) -> str | None:
    """Return why an acceptance no longer holds, in a few words; None while it holds."""
    if acceptance.digest != digest:
        return f"{FILE} belongs to another key"
    why = base_of(folder, acceptance).stale_because(acceptance.run_digest)
    return None if why is None else f"it was accepted as {acceptance.run}, which holds no longer: {why}"


def result_or_accepted(folder: RunFolder) -> tuple[Result | None, Acceptance | None]:
    """Return the folder's own result, or the accepted run's result while an acceptance holds. Raises AlteredError."""
    own = folder.read_result()
    accepted = read(folder) if own is None else None
    if accepted is None:
        return own, None
    if (folder.path / BASE_RESULT_FILE).exists():
        return _carried(folder, accepted), accepted
    if stale_because(folder, accepted, accepted.digest) is not None:
        return None, None
    return base_of(folder, accepted).read_result(), accepted


def _carried(folder: RunFolder, accepted: Acceptance) -> Result:
    try:
        result = results.read(folder.path / BASE_RESULT_FILE)
    except documents.DamagedError as error:
        raise folder.altered(BASE_RESULT_FILE, str(error)) from error
    if result is None or (result.key, result.digest) != (accepted.run, accepted.run_digest):
        raise folder.altered(BASE_RESULT_FILE, f"is not that of run {accepted.run}")
    return result


def _update_base(folder: RunFolder, acceptance: Acceptance, *, withdrawn: bool = False) -> None:
    base = base_of(folder, acceptance)
    if not base.path.is_dir():
        return
    known: dict[str, Any] = base.read_json(AS_FILE) or {}
    known.pop("sha256", None)
    known.pop(folder.key, None)
    mine = {} if withdrawn else {folder.key: [str(acceptance), *map(str, acceptance.differences)]}
    if known or mine:
        documents.write_sealed(base.path / AS_FILE, {**known, **mine})
    else:
        (base.path / AS_FILE).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return "unknown"


def accepted_for(run_dir: Path) -> dict[str, list[str]]:
    """Return new key → acceptance and differences, for a run that was accepted for other keys."""
    try:
        known = documents.read_sealed(run_dir / AS_FILE)
    except (OSError, documents.DamagedError):
        return {}
    return {key: list(map(str, lines)) for key, lines in known.items() if isinstance(lines, list)}
