"""The name of a data pack: a digest of the settings, the source's content, and the code that reads and packs it.

So a pack under its name is up to date. Only what a function of yours (``dataset=own``) reads in addition isn't in the
name: it is recorded in the pack (``READ``) and compared here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core import masking
from pipeline.core.errors import DataError
from pipeline.core.files import Stamp, canonical_json, changing, fingerprints, sha256_text, stamp
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.data import datasets
from pipeline.data.base import ImageFilesConfig
from pipeline.data.sources.source import local_path
from pipeline.keys import rank_environment
from pipeline.keys.content_key import orders_of_config
from pipeline.keys.import_closure import Closure, import_closure
from trainers.contract.data_pack import VERSION
from trainers.core.config import OWN, DatasetConfig
from trainers.observation.input_changes import first_change

if TYPE_CHECKING:
    from trainers.observation.input_record import InputRecord

_PACKING = "pipeline.data.packing"
_IMAGES = "pipeline.data.images"
# Applied by the ranks during training; all other settings count in the pack's name.
_TRAINING_ONLY = (
    *("crop_padding", "crop_border", "flip", "alternate_flip", "cutout", "normalise"),
    *("augmentation", "augmentation_args", "random_resized_crop"),
)
# Modules that can't change an image: they move bytes, report or check. The pack layout counts by VERSION.
_IGNORED = (
    "pipeline", "pipeline.data", "pipeline.data.base", "pipeline.data.datasets",
    "pipeline.data.sources.download", "pipeline.data.sources.transfer",
    "pipeline.data.manifest", "pipeline.data.progress",
    "pipeline.core.errors", "pipeline.core.files", "pipeline.core", "pipeline.core.redact",
    "pipeline.core.processes.threads", "pipeline.core.tables",
    # has only paths; but a string in it names pipeline.cli.project, which would count as an import of all of Paceline
    "pipeline.core.places",
    "trainers.contract", "trainers.contract.data_pack", "trainers.contract.run_folder",
    "trainers", "trainers.core", "trainers.core.config",
)  # fmt: skip


class Request(NamedTuple):
    """A request for a pack, a data set in the form that ranks read: its name, and what the name was computed from."""

    name: str  # <data set>-<12 hex digits>
    stamps: Mapping[Path, Stamp]  # of the source files, from before they were hashed
    code: Mapping[str, str]  # path → digest of the code that reads and packs
    modules: tuple[str, ...]  # from which that code is imported

    def refuse_changed(self) -> None:
        """Raise DataError if a source file or the code changed since it was hashed, OSError if a file is gone."""
        for path, before in self.stamps.items():
            if stamp(path) != before:
                raise changing(path)
        now = _code(self.modules).digests
        if edited := sorted(name for name in {*now, *self.code} if now.get(name) != self.code.get(name)):
            raise DataError(
                f"{', '.join(edited[:3])} was edited while the data was packed", hint="the same command again"
            )


def request(dataset: DatasetConfig, data_dir: Path) -> Request:
    """Compute the request for a pack.

    Local source files count by their content, and by their names if the data set's module returns names; an address by
    its text, without the login. Raises DataError: a local source is missing, or changed while it was hashed; OSError;
    UsageError: an unknown data set, or its module has an unresolvable import.
    """
    settings = {name: value for name, value in asdict(dataset).items() if name not in _TRAINING_ONLY}
    local = datasets.module(dataset.name).local_inputs(dataset)
    path_by_name = local if isinstance(local, dict) else {str(number): path for number, path in enumerate(local)}
    fingerprint_by_path = fingerprints([*path_by_name.values()], data_dir)
    modules = _modules(dataset)
    code = _code(modules)
    decides_pack: dict[str, Any] = {
        **settings,
        "source": _source_in_name(dataset, has_files=bool(path_by_name)),
        "inputs": {name: fingerprint_by_path[path].sha256 for name, path in path_by_name.items()},
        "version": VERSION,
        "code": dict(code.digests),
    }
    # canonical JSON sorts names, but a function of yours may depend on the order inside a mapping that it is given
    if order := orders_of_config({"dataset": settings}):
        decides_pack["order"] = order
    # ``code`` lacks installed packages: the data set of another package is in one, and a function of yours may compute
    # images with any. Paceline's own readers are in ``code``, and an upgrade of a package that decodes files for them
    # keeps the pack: a run's key has the digest of its content.
    if dataset.name == OWN or not modules[0].startswith(f"{datasets.__name__}."):
        decides_pack["versions"] = dict(code.versions)
    return Request(
        name=f"{dataset.name}-{sha256_text(canonical_json(decides_pack))[:12]}",
        stamps={path: fingerprint.stamp for path, fingerprint in fingerprint_by_path.items()},
        code=code.digests,
        modules=modules,
    )


def _modules(dataset: DatasetConfig) -> tuple[str, ...]:
    """Return the modules whose code makes the pack. The first is the data set's, which another package may provide."""
    decoding = (_IMAGES,) if isinstance(dataset, ImageFilesConfig) else ()
    user_module = (getattr(dataset, "target", "").partition(":")[0],) if dataset.name == OWN else ()
    return (datasets.DATASETS.target(dataset.name), _PACKING, *decoding, *user_module)


def _code(modules: tuple[str, ...]) -> Closure:
    return import_closure(ROOT, modules, ignored=_IGNORED)


def _source_in_name(dataset: DatasetConfig, *, has_files: bool) -> str | None:
    """Return what of ``dataset.source`` counts in the name: not the path of local files, whose content counts."""
    if dataset.source is None:
        return None
    path = local_path(dataset.source)
    if path is None:
        return hide(dataset.source)
    return "files" if has_files else str(path)


READ = "read.json"
"""File in a pack that records what a user-defined function read besides its source, as ``stored_record`` returns it."""


def stored_record(inputs: InputRecord, given_variables: Collection[str] = ()) -> dict[str, Any]:
    """Return the record of what a program read, to be stored and compared later (``reads_changed``).

    Names that may be secret are left out. ``values`` is added: variable that the program's own code read → digest of
    its value; None for ``given_variables``, which the caller has set and covers by a key.
    """
    record = masking.without_secret_names({**inputs})
    digests = rank_environment.variable_digests(os.environ, given_variables)
    return {**record, "values": {name: digests.get(name, "") for name in record["own_variables"]}}


def reads_changed(record: Mapping[str, Any], root: Path, keyed_versions: Collection[str] = ()) -> str | None:
    """Explain what has changed since a ``stored_record`` was made; None: nothing.

    ``keyed_versions``: distributions that are left out, because the caller's key already contains their versions.
    """
    changed = first_change(record, root, keyed_versions)
    return changed or rank_environment.changed_variables(record, record.get("values"), os.environ)


def stale_because(folder: Path, root: Path) -> str | None:
    """Explain which input, recorded in the pack, has changed since it was built; None if none has."""
    try:
        return reads_changed(json.loads((folder / READ).read_text(encoding="utf-8")), root)
    except FileNotFoundError:  # only packs of dataset=own have the file
        return None
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{READ} is damaged"
