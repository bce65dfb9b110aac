"""What a person named, and where it goes on the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder or a single file: ``source`` here (absolute), ``place`` on the hosts (absolute, or below ``~/``)."""

    name: str
    source: Path
    place: str

    @property
    def is_file(self) -> bool:
        return not self.source.is_dir()


def folders(words: Sequence[str], *, to: str | None, workdir: str, root: Path) -> list[Folder]:
    """Each of ``words`` goes to ``to``/NAME, or to ``workdir``/folders/NAME.

    Args:
        root: the folder that relative words begin at.

    Raises:
        UsageError: what is named isn't there or has no name, two have the same one, or ``to`` isn't absolute.
    """
    if to is not None and (not to.startswith("/") or ".." in to.split("/")):
        raise UsageError(f"to={to} must be an absolute folder on the hosts, such as to=/data/shared")
    if to is not None and not words:
        raise UsageError("to= says where files and folders go, and none is named", hint="doit sync cluster=… to=… PATH")
    base = (to if to is not None else f"{workdir}/folders").rstrip("/")
    found = [_folder(word, base, root) for word in words]
    for folder in found:
        same = [other.source for other in found if other.name == folder.name]
        if len(set(same)) > 1:
            both = " and ".join(map(str, same[:2]))
            raise UsageError(f"{both} would both go to {folder.place}; sync them one by one, with another to= each")
    return list(dict.fromkeys(found))


def _folder(word: str, base: str, root: Path) -> Folder:
    path = Path(root, word)
    try:
        source = path.resolve(strict=True)
    except OSError as error:
        raise UsageError(f"{path} can't be brought to the hosts: {error.strerror}") from error
    name = source.name if path.name in ("", "..") else path.name
    if not name or not (source.is_dir() or source.is_file()):
        raise UsageError(f"{path} can't be brought to the hosts: {'it is the whole disk' if not name else 'no file'}")
    return Folder(name=name, source=source, place=f"{base}/{name}")
