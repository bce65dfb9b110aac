"""Acceptances (`doit accept`): a user declares, without a proof, that the result of a finished run, called the *base*,
counts for another key too, typically after an edit that can't change results.

accepted.json in the new key's folder names the base. It is valid while the base is intact, until the key is trained."""

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
"""The file in the folder of the base that lists the keys it was accepted for; its record in MLflow shows them."""
BASE_RESULT_FILE = "accepted_result.json"
"""The file of an exported run with the result of the base, because the folder of the base isn't exported."""
_KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The content of accepted.json.

    ``run`` is the key of the base, ``run_digest`` the base's full digest, ``digest`` the full digest of the new key.
    ``who`` is user@host. ``proven``: a repetition under the new key had equal weights."""

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
    """Write the acceptance into the folders of the new key and of the base. Raises OSError."""
    documents.write_sealed(folder.path / FILE, asdict(acceptance))
    _update_base(folder, acceptance)


def withdraw(folder: RunFolder, acceptance: Acceptance) -> None:
    """Remove the acceptance from both folders. Raises OSError."""
    (folder.path / FILE).unlink(missing_ok=True)
    _update_base(folder, acceptance, withdrawn=True)


def base_of(folder: RunFolder, acceptance: Acceptance) -> RunFolder:
    """Return the folder of the base."""
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
        raise folder.altered_error(FILE, str(error)) from error
    except (TypeError, KeyError) as error:
        raise folder.altered_error(FILE, f"holds what no acceptance does ({error})") from error
    # the seal only shows that the file is whole: another program may have written it
    texts = (acceptance.digest, acceptance.run, acceptance.run_digest, acceptance.who)
    if not all(isinstance(text, str) and text.isprintable() for text in texts) or not _KEY.fullmatch(acceptance.run):
        raise folder.altered_error(FILE, "names no run")
    if type(acceptance.unix_time) not in (int, float) or not 0 <= acceptance.unix_time < 1 << 33:  # 33 bits: year 2242
        raise folder.altered_error(FILE, "has no time")
    if acceptance.digest[: len(folder.key)] != folder.key:
        raise folder.altered_error(FILE, "is that of another run")
    return acceptance


def stale_because(folder: RunFolder, acceptance: Acceptance, digest: str) -> str | None:
    """Return why an acceptance is no longer valid, in a few words; None while it is."""
    if acceptance.digest != digest:
        return f"{FILE} belongs to another key"
    why = base_of(folder, acceptance).stale_because(acceptance.run_digest)
    return None if why is None else f"it was accepted as {acceptance.run}, which holds no longer: {why}"


def result_or_accepted(folder: RunFolder) -> tuple[Result | None, Acceptance | None]:
    """Return the folder's own result, or the base's and the acceptance while that is valid. Raises AlteredError."""
    own_result = folder.read_result()
    accepted = read(folder) if own_result is None else None
    if accepted is None:
        return own_result, None
    if (folder.path / BASE_RESULT_FILE).exists():
        return _exported_base_result(folder, accepted), accepted
    if stale_because(folder, accepted, accepted.digest) is not None:
        return None, None
    return base_of(folder, accepted).read_result(), accepted


def _exported_base_result(folder: RunFolder, accepted: Acceptance) -> Result:
    try:
        result = results.read(folder.path / BASE_RESULT_FILE)
    except documents.DamagedError as error:
        raise folder.altered_error(BASE_RESULT_FILE, str(error)) from error
    if result is None or (result.key, result.digest) != (accepted.run, accepted.run_digest):
        raise folder.altered_error(BASE_RESULT_FILE, f"is not that of run {accepted.run}")
    return result


def _update_base(folder: RunFolder, acceptance: Acceptance, *, withdrawn: bool = False) -> None:
    """Add the acceptance to the list in the base's folder, or remove it there."""
    base = base_of(folder, acceptance)
    if not base.path.is_dir():
        return
    lines_by_key: dict[str, Any] = base.read_json(AS_FILE) or {}
    lines_by_key.pop("sha256", None)  # the seal, which is made anew
    lines_by_key.pop(folder.key, None)
    if not withdrawn:
        lines_by_key[folder.key] = [str(acceptance), *map(str, acceptance.differences)]
    if lines_by_key:
        documents.write_sealed(base.path / AS_FILE, lines_by_key)
    else:
        (base.path / AS_FILE).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return "unknown"


def accepted_for(run_dir: Path) -> dict[str, list[str]]:
    """Return the keys that a run was accepted for: new key → lines about the acceptance and the differences."""
    try:
        lines_by_key = documents.read_sealed(run_dir / AS_FILE)
    except (OSError, documents.DamagedError):
        return {}
    return {key: list(map(str, lines)) for key, lines in lines_by_key.items() if isinstance(lines, list)}
