"""What a pack is made of, known before it is made: the name of its folder, and the local files that it is read from.

The code counts that reads and packs the images: the data set's module and what it imports of the project, up to what
can't change an image. So a module that was edited makes another pack; where that holds the same images its digest is
the same, and no run is another's for it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.errors import DataError
from pipeline.core.files import canonical_json, settles_in, sha256_file, sha256_text, write_json
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.data import manifest
from pipeline.data.manifest import Pack, Stamp
from pipeline.data.sources.source import local_path
from pipeline.keys import rank_environment
from pipeline.keys.canonical import order_in
from pipeline.keys.import_closure import Closure, import_closure
from trainers.core import dependencies

OWN = "pipeline.data.datasets."
_PACKING = "pipeline.data.packing"
# decides no image: it moves bytes, says or checks something, or where; the layout of a pack counts by manifest.VERSION
_GIVEN = (
    "pipeline", "pipeline.data", "pipeline.data.base", "pipeline.data.datasets", "pipeline.data.disk",
    "pipeline.data.sources.download", "pipeline.data.sources.transfer", "pipeline.data.sources.wanted",
    "pipeline.data.manifest", "pipeline.data.progress",
    "pipeline.core.errors", "pipeline.core.files", "pipeline.core", "pipeline.core.files", "pipeline.core.redact",
    "pipeline.core.places",  # which names the module that imports all of Paceline
    "trainers", "trainers.core", "trainers.core.config",
)  # fmt: skip
READ = "read.json"
"""In a pack: what the function that made it took in besides, as ``Seen.record`` has it."""
_FINGERPRINTS = ".fingerprints.json"


class Inputs(NamedTuple):
    """What settings say of a pack: ``settings`` that decide its images, ``files`` on this computer that it is read
    from, in the order of the data set's ``module`` (dotted). ``names``: what they are called, where that decides;
    ``own``: modules of the person's own that the data set calls."""

    dataset: str
    module: str
    settings: Mapping[str, Any]
    files: tuple[Path, ...]
    names: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


class Request(NamedTuple):
    """``name`` is ``<data set>-<12 hex>``. ``stamps`` are those that the source files had before they were hashed;
    ``code`` are the digests of what reads and packs, by path, and ``modules`` where it begins."""

    name: str
    stamps: Mapping[Path, Stamp]
    code: Mapping[str, str]
    modules: tuple[str, ...]

    def refuse_changed(self) -> None:
        """Raises DataError where a source file isn't the one that was hashed: what was read of it since is another's.

        Raises OSError where it is gone.
        """
        for path, before in self.stamps.items():
            if manifest.stamp(path) != before:
                raise _changing(path)
        now = _code(self.modules).digests
        if edited := sorted(name for name in {*now, *self.code} if now.get(name) != self.code.get(name)):
            raise DataError(
                f"{', '.join(edited[:3])} was edited while the data was packed", hint="the same command again"
            )


def find(inputs: Inputs, data_dir: Path) -> Pack | None:
    """The pack for this configuration, or None where it is absent, incomplete or altered. No network; files
    are hashed only after their stamps changed."""
    data_dir = data_dir.absolute()
    if not any(data_dir.glob(f"{inputs.dataset}-*")):
        return None  # spares hashing a large source that was never packed
    try:
        return intact(data_dir / request(inputs, data_dir).name)
    except (DataError, OSError):  # the source is gone or unreadable: `fetch` says so
        return None


def request(inputs: Inputs, data_dir: Path) -> Request:
    """Local source files count by their content in the order of the module's list, not by name or folder (unless the
    module says so); an address counts by its text, login aside.

    Raises:
        DataError: a local source is missing, no regular file, or was changed while it was hashed.
        OSError: it can't be read.
        UsageError: the data set's module imports what isn't there.
    """
    known = fingerprints(inputs.files, data_dir)
    wanted = {**inputs.settings, "source": _source(inputs)}
    names = inputs.names or [str(number) for number in range(len(inputs.files))]
    wanted["inputs"] = {name: known[path][1] for name, path in zip(names, inputs.files, strict=True)}
    wanted["version"] = manifest.VERSION
    if order := order_in({"dataset": inputs.settings}):
        wanted["order"] = order
    modules = (inputs.module, _PACKING, *inputs.own)
    code = _code(modules)
    wanted["code"] = dict(code.digests)
    if inputs.own or not inputs.module.startswith(OWN):  # what is installed counts by its version
        wanted["versions"] = dict(code.versions)
    name = f"{inputs.dataset}-{sha256_text(canonical_json(wanted))[:12]}"
    stamps = {path: stamp for path, (stamp, _) in known.items()}
    return Request(name=name, stamps=stamps, code=code.digests, modules=modules)


def intact(folder: Path) -> Pack | None:
    """The pack, unless it is altered or a file that its function read besides is another now. Raises what read does."""
    pack = manifest.read(folder)
    return pack if pack is not None and stale_because(folder, ROOT) is None else None


def stale_because(folder: Path, root: Path) -> str | None:
    """What the function took in besides, when the pack in ``folder`` was made, and isn't as it was; None: nothing."""
    try:
        record = json.loads((folder / READ).read_text(encoding="utf-8"))
        changed = dependencies.changed(record, root)
        return changed or rank_environment.changed_variables(record, record.get("values"), os.environ)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{READ} is damaged"


def _code(modules: tuple[str, ...]) -> Closure:
    return import_closure(ROOT, modules, given=_GIVEN)


def _source(inputs: Inputs) -> str | None:
    source = inputs.settings["source"]
    if source is None:
        return None
    path = local_path(source)
    if path is None:
        return hide(source)
    return "files" if inputs.files else str(path)


def fingerprints(paths: Sequence[Path], data_dir: Path) -> dict[Path, tuple[Stamp, str]]:
    """Stamp and sha256 of each file. It is hashed again only when its stamp has changed; the notes lie in
    ``data_dir`` and may be lost at no harm (two writers at once: the last one's stay)."""
    cache = _read_cache(data_dir / _FINGERPRINTS)
    fresh: dict[str, list[int | str]] = {}
    by_path = {}
    for path in paths:
        now, noted = manifest.stamp(path), cache.get(str(path), [])
        if noted[:-1] == list(now):
            by_path[path] = now, str(noted[-1])
        else:
            by_path[path] = fingerprint(path)
            fresh[str(path)] = [*by_path[path][0], by_path[path][1]]
    if fresh and data_dir.is_dir():
        with suppress(OSError):  # a read-only folder of packs is still good to read from
            write_json(data_dir / _FINGERPRINTS, {**cache, **fresh})
    return by_path


def fingerprint(path: Path) -> tuple[Stamp, str]:
    """The sha256 of a file that nobody wrote to meanwhile, and its stamp. Raises DataError, OSError."""
    before = manifest.stamp(path)
    unsettled_s = settles_in(before.ctime_ns)
    if math.isfinite(unsettled_s):  # what is written from then on leaves another stamp than this one
        time.sleep(unsettled_s)
    sha256 = sha256_file(path)
    if manifest.stamp(path) != before:
        raise _changing(path)
    return before, sha256


def _changing(path: Path) -> DataError:
    return DataError(f"{path} was changed while it was read", hint="the same command, when nothing writes to it")


def _read_cache(path: Path) -> dict[str, list[int | str]]:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    rows = noted.items() if isinstance(noted, dict) else ()
    return {name: row for name, row in rows if isinstance(row, list) and len(row) == len(Stamp._fields) + 1}
