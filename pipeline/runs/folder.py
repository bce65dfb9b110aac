"""The folder of one run, runs/KEY: the paths and contents of its files, and whether the run is finished and intact.

Nearly every command reads a run through ``RunFolder``. A *target* is a file that a finished run must have; result.json,
which is written last, holds a fingerprint (sha256, size and times) of each."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import documents
from pipeline.core import program as programs
from pipeline.core.documents import DamagedError
from pipeline.core.errors import PacelineError, TrainingError, UsageError
from pipeline.core.files import sha256_file
from pipeline.core.program import CLASSIFIER, Program
from pipeline.core.redact import hide
from pipeline.core.specs import State
from pipeline.core.tables import first_of
from pipeline.keys import content_key as keys
from pipeline.keys.content_key import KEY_VERSION, ORDER, ContentKey, canonical_config, differences
from pipeline.keys.import_closure import matches
from pipeline.runs import recorded_hardware
from pipeline.runs import result as results
from pipeline.runs.contents import is_newer, overrides_in, ranks_of, short_name, swept_overrides, unkeyed, what_runs
from pipeline.runs.result import AlteredError, Result, Stamps, why_altered
from trainers.contract import run_folder

TRAINED = CLASSIFIER.trained
"""The files that a training of the built-in classifier writes."""
EVALUATED = CLASSIFIER.evaluated
"""The files that the classifier's evaluation writes."""
DESCRIBED = (run_folder.KEY, run_folder.CONFIG, run_folder.CONFIG_YAML, run_folder.SUMMARY)
"""The files that describe the run and its results: rewritten without a training if they were altered."""
SWEEPS = "sweeps.json"
"""The file in which `doit sweep` lists the sweeps that the run is a trial of, with the overrides that each chose."""
ORIGIN = (run_folder.PROVENANCE, run_folder.CHANGES, run_folder.PLAN)
"""The files about the origin and the launch of the run, which can't be rewritten. They only decide whether the run can
be exported and reproduced."""
_WRITTEN_FOLDERS = (
    ".", "attempts", "attempts/*", "evaluation", "work", "work/*", "work/*/above", "work/*/above/above",
)  # fmt: skip
_MOST_FIELDS, _MOST_FIELD_CHARACTERS = 3, 100  # of an altered configuration, in a message


class RunFolder(NamedTuple):
    """Paths of one run. The folder's name is the run key."""

    path: Path

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def code(self) -> Path:
        return self.path / run_folder.CODE

    @property
    def journal(self) -> Path:
        return self.path / run_folder.JOURNAL

    @property
    def summary(self) -> Path:
        return self.path / run_folder.SUMMARY

    @property
    def result(self) -> Path:
        return self.path / run_folder.RESULT

    @property
    def program(self) -> Program:
        """The program that the run starts."""
        return programs.of_run(self.path)

    @property
    def lock(self) -> Path:
        return self.path.parent / f".{self.key}.lock"

    def refuse_newer(self) -> None:
        """Refuse a folder that a newer Paceline wrote, which this one can't read or write. Raises UsageError."""
        key_parts = self.read_json(run_folder.KEY) or {}
        if is_newer(key_parts):
            raise UsageError(
                f"run {self.key} was written by a newer Paceline: key.json has version {key_parts['version']}, "
                f"this one knows up to {KEY_VERSION}",
                hint="update this checkout, or paths.runs=<another folder>",
            )

    def config_altered(self, key: ContentKey) -> str:
        """Return how config.json differs from the configuration of the key, as words that follow "it"; '' if equal."""
        config, in_key = self.read_json(run_folder.CONFIG), key.parts.get("config")
        if config is None:
            return "can't be read"
        try:
            in_file = canonical_config(config)
        except (TypeError, AttributeError, ValueError):  # config.json has types that no configuration has
            return "holds what no configuration does"
        # keys of older versions lack the order of fields
        if not isinstance(in_key, Mapping) or ORDER not in in_key:
            in_file.pop(ORDER, None)
        if in_file == in_key:
            return ""
        differing = differences({"config": in_key}, {"config": in_file})
        fields = [str(difference)[:_MOST_FIELD_CHARACTERS] for difference in differing]
        return f"isn't the configuration that the key was taken of: {first_of(fields, _MOST_FIELDS)}"

    def refuse_altered_config(self) -> None:
        """Check config.json against key.json; keys of older versions can't be checked. Raises AlteredError."""
        key = self.read_key()
        if key is not None and key.parts.get("version") == KEY_VERSION and (why := self.config_altered(key)):
            raise self.altered_error(run_folder.CONFIG, why)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object of the folder; None if it is missing or damaged."""
        return documents.read_or_none(self.path / name)

    def read_key(self) -> ContentKey | None:
        """Read key.json; None if it is missing. Raises AlteredError: its parts give another key."""
        parts = self.read_json(run_folder.KEY)
        if parts is None and not (self.path / run_folder.KEY).exists():
            return None
        key = keys.recorded(parts or {})
        if key is None or key.short != self.key:
            raise self.altered_error(run_folder.KEY, "doesn't agree with its own digest and the folder's name")
        return key

    def read_result(self) -> Result | None:
        """Read result.json; None if the run isn't finished. Raises AlteredError: altered, or another run's."""
        try:
            return self._result()
        except DamagedError as error:
            raise self.altered_error(run_folder.RESULT, str(error)) from error

    def _result(self) -> Result | None:
        """Read result.json for callers with a message of their own. Raises DamagedError."""
        result = results.read(self.result)
        if result is not None and result.key != self.key:
            raise DamagedError(f"is that of run {result.key}")
        return result

    def sweeps(self) -> list[dict[str, Any]]:
        """The sweeps that the run is a trial of, newest last: ``key``, ``name``, ``trial`` and ``overrides``."""
        listed = (self.read_json(SWEEPS) or {}).get("sweeps")
        return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []

    def overrides(self) -> list[str]:
        """The overrides that made the run."""
        return overrides_in(self.read_json(run_folder.PROVENANCE) or {})

    def short_name(self, config: Mapping[str, Any]) -> str:
        """Return the run's name in MLflow without the digits of its key; ``config`` is the content of config.json."""
        return hide(short_name(config, self.overrides(), swept=swept_overrides(self.sweeps())))

    def unkeyed(self) -> dict[str, str]:
        """Return what the finished run read on any node although its key lacks it: path → how (``contents.unkeyed``).
        Empty for a run without an intact result."""
        try:
            result = self.read_result()
        except AlteredError:
            result = None
        if result is None:
            return {}
        return unkeyed([result.fields, *self.dependencies_of_other_nodes()])

    def dependencies_of_other_nodes(self) -> list[Mapping[str, Any]]:
        """Return what the further nodes of a script's run recorded of the files that it read."""
        paths = sorted(self.path.glob(f"{run_folder.NODES}/*/{run_folder.DEPENDENCIES}"))
        return [self.read_json(path.relative_to(self.path).as_posix()) or {} for path in paths]

    def read_summary(self) -> dict[str, Any] | None:
        """Read summary.json, the results that the ranks report; None before their end. Raises AlteredError."""
        try:
            return documents.read_sealed(self.summary)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            raise self.altered_error(run_folder.SUMMARY, str(error)) from error

    def altered_error(self, name: str, why: str) -> AlteredError:
        """Return the error for an altered file; ``why`` begins with a verb."""
        return AlteredError(
            f"{self.path / name} was altered: it {why}",
            hint="doit train with the words of the run   (makes it again from the run's files, or trains where those "
            "were altered too)",
        )

    def write_result(
        self,
        *,
        key: ContentKey,
        summary: Mapping[str, Any],
        hosts: list[str],
        attempts: int,
        duration_s: float,
        mlflow_run_id: str | None,
    ) -> None:
        """Write result.json atomically, with a fingerprint of each target and the facts that lists of runs show.
        ``duration_s`` is the time of all attempts. Raises TrainingError: a target is missing; OSError."""
        self.refuse_incomplete()
        documents.write_sealed(
            self.result,
            {
                **summary,
                **({} if self.program.is_ours else {"program": self.program.name, "proven": False}),
                "state": State.FINISHED,
                "key": key.short,
                "digest": key.digest,
                "what": what_runs(self.read_json(run_folder.CONFIG) or {}),
                "nproc_per_node": ranks_of(self.read_json(run_folder.KEY) or {}, self.read_json(run_folder.PLAN) or {}),
                "hosts": hosts,
                "attempts": attempts,
                "hardware": recorded_hardware.of_attempts(self.path, str(key.parts.get("topology", {}).get("device"))),
                "unix_time": round(time.time(), 3),
                "duration_s": round(duration_s, 3),
                "mlflow_run_id": mlflow_run_id,
                "origin_sha256": {
                    name: sha256_file(self.path / name) for name in ORIGIN if (self.path / name).exists()
                },
                "files": self._fingerprints(self._targets),
            },
        )

    @property
    def _targets(self) -> tuple[str, ...]:
        return (*self.program.files(self.path), *DESCRIBED)

    def refuse_incomplete(self) -> None:
        """Refuse a result whose targets are missing. Raises TrainingError."""
        for name in self._targets:
            if not (self.path / name).is_file():
                raise missing_error(self.path / name)

    def mark_proven(self) -> None:
        """Record in result.json of a script's run that a repetition had equal results. Raises OSError."""
        result = self.read_result()
        if result is not None and result.fields.get("proven") is False:
            documents.write_sealed(self.result, {**result.fields, "proven": True})

    def refresh_fingerprints(self) -> None:
        """Update the report's fingerprints after it was recreated; nothing to do without a result."""
        result = self.read_result()
        if result is not None:
            report = self._fingerprints(EVALUATED)
            documents.write_sealed(self.result, {**result.fields, "files": {**result.fields["files"], **report}})

    def _fingerprints(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: results.fingerprint(self.path / name) for name in names if (self.path / name).exists()}

    def recorded_files(self) -> Mapping[str, results.Fingerprint]:
        """Return target → fingerprint from result.json; none if result.json is missing or altered."""
        try:
            result = self._result()
            return result.files if result is not None else {}
        except DamagedError:
            return {}

    def training_done(self, key: ContentKey) -> bool:
        """Return True if the ranks ended well under this key and their outputs are unchanged.

        result.json isn't needed for that: it may be altered, or missing because the controller died after the training.
        summary.json, which the ranks write and seal, lists all outputs; for a script, all files in its folders."""
        result = self.intact_result(key)
        try:
            recorded_key = self.read_key() if result is None else key
            summary = self.read_summary() if result is None else result.summary
        except AlteredError:
            return False
        if recorded_key is None or summary is None or recorded_key.digest != key.digest:
            return False
        recorded, trained = self.recorded_files(), self.program.trained
        # summary.json lists no files of further nodes: only result.json can show that one was altered
        names = [name for name in recorded if name in trained or name.startswith(f"{run_folder.NODES}/")]
        if any(why_altered(self.path / name, recorded[name]) for name in names):
            return False
        outputs = summary.get("outputs_sha256")
        return (
            isinstance(outputs, dict)
            and all((self.path / name).is_file() for name in (*trained, *outputs))
            and all(sha256_file(self.path / name) == digest for name, digest in outputs.items())
        )

    def intact_result(self, key: ContentKey) -> Result | None:
        """Return the result under this key; None if it is missing, altered or of another key."""
        try:
            result = self._result()
        except DamagedError:
            return None
        return result if result is not None and result.digest == key.digest else None

    def stale_because(self, digest: str) -> str | None:
        """Return why the run with this digest isn't finished and intact, in a few words; None if it is."""
        try:
            result = self._result()
            files = result.files if result is not None else {}
        except DamagedError as error:
            return f"{run_folder.RESULT} was altered: it {error}"
        if result is None:
            return "not finished yet"
        if result.digest != digest:
            return f"{run_folder.RESULT} belongs to another key"
        for name in programs.named(result.fields.get("program")).trained:
            if name not in files:
                return f"{run_folder.RESULT} holds no digest of {name}"
        first_altered = Stamps(self.path).first_altered(files.items())  # (name, "was altered")
        return None if first_altered is None else " ".join(first_altered)


# ------------------------------------------------------------------------------------------ links
def refuse_links(run_dir: Path) -> None:
    """Refuse links in the folder, except to the data, because writes would follow them. Raises PacelineError."""
    for path in (path for pattern in _WRITTEN_FOLDERS for path in sorted(run_dir.glob(f"{pattern}/*"))):
        if path.is_symlink() and path != run_dir / run_folder.DATA:
            raise PacelineError(
                f"{path} is a link to {path.readlink()}, where what is written into the run folder would land; a run "
                f"folder has no link but {run_folder.DATA}",
                hint=f"rm {shlex.quote(str(path))}, or what it leads to in its place, then the same command",
            )


def leads_out(path: Path, run_dir: Path) -> bool:
    """Return True if a link at ``path`` or above it leads out of the run folder; the link to the data pack may."""
    allowed = run_dir / run_folder.DATA if path.parent == run_dir / run_folder.DATA else run_dir
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(allowed))


def link_warning(paths: Iterable[Path], run_dir: Path) -> str:
    """Return the warning that these files are skipped because a link leads out of the run folder."""
    names = first_of([path.relative_to(run_dir).as_posix() for path in paths], 3)
    return f"{names}: a link leads out of the run folder, so it is not read"


def missing_error(path: Path | str | None) -> TrainingError:
    """Return the error for a file of the run that no longer exists."""
    return TrainingError(
        f"{path} is missing: it, or the whole folder, was removed while the run was going on",
        hint="the same command again",
    )


_ANOTHER_COPY = "another copy of the run folder, its export, or its MLflow run: doit reproduce <that>"


def check_parts(folder: RunFolder, key: ContentKey, result: Result | None, root: Path) -> None:
    """Check configuration and code against the key, and the files of ``ORIGIN`` against the result. ``result`` is None
    for a run that isn't finished; ``root`` is the project. Raises AlteredError."""
    if result is not None and result.digest not in ("", key.digest):  # "": results of older versions have none
        raise folder.altered_error(run_folder.RESULT, "belongs to another key")
    if why := folder.config_altered(key):
        raise folder.altered_error(run_folder.CONFIG, why)
    if folder.code.is_dir() and key.parts.get("version") == KEY_VERSION and not _code_matches_key(folder, key, root):
        raise _altered_history(folder.code, "isn't the code that the key was taken of")
    for name, digest in (result.origin_sha256 if result is not None else {}).items():
        path = folder.path / name
        if not path.exists():
            raise AlteredError(f"{path} is missing: the run had it when it finished", hint=_ANOTHER_COPY)
        if not (path.is_file() and sha256_file(path) == digest):
            raise _altered_history(path, "isn't what it was when the run finished")


def _code_matches_key(folder: RunFolder, key: ContentKey, root: Path) -> bool:
    try:
        return matches(root, folder.code, key.parts["code"])
    except (OSError, UsageError, KeyError, TypeError, AttributeError, ValueError):
        return False


def _altered_history(path: Path, why: str) -> AlteredError:
    return AlteredError(f"{path} was altered: it {why}", hint=_ANOTHER_COPY)
