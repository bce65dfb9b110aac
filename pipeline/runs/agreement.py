"""Whether the parts of a run folder are those that its key and its result were taken of."""

from __future__ import annotations

from pathlib import Path

from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_file
from pipeline.keys.content_key import KEY_VERSION, ContentKey
from pipeline.keys.import_closure import matches
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError, Result
from trainers.contract import run_folder

_ANOTHER_COPY = "another copy of the run folder, its export, or its MLflow run: doit reproduce run=<that>"


def check_parts(folder: RunFolder, key: ContentKey, result: Result | None, root: Path) -> None:
    """Configuration, code and origin against what the key and the result say of them.

    Args:
        result: None of a run that didn't finish.
        root: the project, where what is known of sources lies.

    Raises:
        AlteredError: one of them isn't what was written, or is missing; the text names it.
    """
    if result is not None and result.digest not in ("", key.digest):
        raise folder.altered(run_folder.RESULT, "belongs to another key")
    if why := folder.config_altered(key):
        raise folder.altered(run_folder.CONFIG, why)
    if folder.code.is_dir() and key.parts.get("version") == KEY_VERSION and not _code_agrees(folder, key, root):
        raise _untrue(folder.code, "isn't the code that the key was taken of")
    for name, digest in (result.origin_sha256 if result is not None else {}).items():
        path = folder.path / name
        if not path.exists():
            raise AlteredError(f"{path} is missing: the run had it when it finished", hint=_ANOTHER_COPY)
        if not (path.is_file() and sha256_file(path) == digest):
            raise _untrue(path, "isn't what it was when the run finished")


def _code_agrees(folder: RunFolder, key: ContentKey, root: Path) -> bool:
    try:
        return matches(root, folder.code, key.parts["code"])
    except (OSError, UsageError, KeyError, TypeError, AttributeError, ValueError):
        return False


def _untrue(path: Path, why: str) -> AlteredError:
    """Of history, which no training can write again."""
    return AlteredError(f"{path} was altered: it {why}", hint=_ANOTHER_COPY)
