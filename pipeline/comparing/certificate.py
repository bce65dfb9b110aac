"""Certificates of runs: inputs and outcome of one or several runs, as one file sealed by its own digest.

The seal shows that the file is complete and wasn't edited by accident. It proves integrity, not authorship: anyone can
edit and reseal the file, so its author is only proven by a seal received through another channel. A part of the key
can't be changed without changing the key, because the key is the digest of the parts, which the file contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.comparing.reading import verdict_of
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import sha256_file
from pipeline.core.specs import State
from pipeline.core.tables import some_names
from pipeline.data import manifest
from pipeline.keys import content_key
from pipeline.keys.content_key import KEY_LENGTH, ContentKey
from pipeline.runs.folder import RunFolder, check_parts
from pipeline.runs.index import STATES
from pipeline.runs.provenance import LOCK
from pipeline.runs.result import AlteredError, Result
from trainers.contract import run_folder

KIND = "paceline certificate"
OF_RUNS = "paceline certificate of runs"
"""Kind of a certificate of several runs: full entries of finished runs, and the states of the others."""
VERSION = 1
FOLDER, SUFFIX = "reports", ".certificate.json"
"""Where `doit report` writes below the folder of runs, and how a certificate's name ends."""
_REPRODUCED, _WITHIN, _OTHERWISE = "reproduced", "within the spread, on other hardware", "not reproduced"
_RESPACED = re.compile(rb'"sha256":\s*"[0-9a-f]{64}"\s*\}\s*\Z')
_ORIGIN = ("git_commit", "git_dirty", "patch_sha256", "lock_sha256", "python")


_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}\Z")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_digests(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(name) and _DIGEST.match(str(one)) for name, one in value.items())


_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "run": _is_text,
    "what": _is_text,
    "hosts": lambda value: isinstance(value, list),
    "metrics": lambda value: isinstance(value, dict),
    "files_sha256": _are_digests,
    "origin": lambda value: isinstance(value, dict),
    "origin_sha256": _are_digests,
    "verdict": lambda value: value in (None, _REPRODUCED, _WITHIN, _OTHERWISE),
}
"""Fields that every certificate must have to be read and shown, with their checks."""
_OTHER_FIELDS = ("kind", "version", "key", "made_of", "finished_unix_time", "weights_sha256", "proven", "hardware")


def of_run(folder: RunFolder, verdict: Mapping[str, Any] | None, root: Path) -> str:
    """Return the text of a run's certificate.

    ``verdict`` is the result of `doit reproduce`, or None; ``root`` is the project, where the cache of parsed sources
    lies. Raises UsageError: the run isn't finished; AlteredError: a part isn't what was written.
    """
    return documents.sealed({"kind": KIND, "version": VERSION, **_checked_content(folder, verdict, root)})


def of_runs(title: str, finished: Sequence[RunFolder], others: Mapping[str, str], root: Path) -> str:
    """Return the text of a certificate of several runs; ``others``: key → state of runs without an entry.

    Raises what ``of_run`` raises.
    """
    runs = [_checked_content(folder, verdict_of(folder), root) for folder in finished]
    return documents.sealed({"kind": OF_RUNS, "version": VERSION, "title": title, "runs": runs, "others": dict(others)})


def _checked_content(folder: RunFolder, verdict: Mapping[str, Any] | None, root: Path) -> dict[str, Any]:
    """Return the entry of a run whose parts are unaltered. Raises UsageError, AlteredError."""
    result, key = folder.read_result(), folder.read_key()
    if result is None or key is None or result.state != State.FINISHED:
        raise UsageError(f"run {folder.key} isn't finished: there is nothing to certify", hint="doit runs")
    check_parts(folder, key, result, root)
    if (why := folder.stale_because(key.digest)) is not None:
        again = "the same doit train makes it again; or format=markdown, a report without a certificate"
        raise AlteredError(f"run {folder.key} isn't what it was when it finished: {why}", hint=again)
    return _content(folder, result, key, verdict)


def _content(folder: RunFolder, result: Result, key: ContentKey, verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    provenance = folder.read_json(run_folder.PROVENANCE) or {}
    return {
        "run": key.short,
        "key": key.digest,
        "what": result.what,
        "made_of": dict(key.parts),
        "finished_unix_time": result.unix_time,
        "hosts": list(result.hosts),
        "metrics": {name: value if value == value else "NaN" for name, value in result.metrics.items()},
        "weights_sha256": result.fields.get("weights_sha256"),
        "files_sha256": {name: file.sha256 for name, file in sorted(result.files.items())},
        "origin": {name: provenance.get(name) for name in _ORIGIN},
        "origin_sha256": dict(result.origin_sha256),
        "proven": result.fields.get("proven"),
        "hardware": result.fields.get("hardware"),
        "verdict": None if verdict is None else _said(verdict),
    }


def _said(verdict: Mapping[str, Any]) -> str:
    """Return the verdict of `doit reproduce` in a certificate's words."""
    if verdict.get("reproduced"):
        return _REPRODUCED
    return _WITHIN if verdict.get("within_spread") else _OTHERWISE


class Certificate(NamedTuple):
    """``runs`` are the entries of finished runs, ``others`` the states of runs without an entry."""

    runs: list[dict[str, Any]]
    others: dict[str, str]


def read(path: Path) -> Certificate:
    """Read a certificate and check its seal and keys.

    Raises:
        UsageError: the file doesn't exist, is no certificate, or has another version.
        PacelineError: it was altered or damaged.
    """
    try:
        data = documents.content(path)
    except (OSError, documents.DamagedError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} can't be read: {why}", hint="doit report KEY writes a certificate") from error
    try:
        document = documents.open_sealed(data)
    except documents.DamagedError as error:
        if KIND.encode() not in data[:200]:
            raise UsageError(f"{path} is no certificate of a run", hint="doit report KEY writes one") from error
        why = "its line ends or spacing were changed" if _RESPACED.search(data) else f"it {error}"
        raise PacelineError(f"{path} was edited or damaged: {why}", hint="another copy of it") from error
    if document.get("kind") not in (KIND, OF_RUNS):
        raise UsageError(f"{path} is no certificate of a run", hint="doit report KEY writes one")
    if document.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {document.get('version')!r}; this Paceline knows {VERSION}",
            hint="update this checkout",
        )
    runs: Any = document.get("runs") if document["kind"] == OF_RUNS else [document]
    others: Any = document.get("others") if document["kind"] == OF_RUNS else {}
    if wrong := next(_misfits(runs, others), None):
        raise PacelineError(f"{path} was edited and sealed anew: {wrong}", hint="another copy of it")
    return Certificate(runs=runs, others=others)


def _misfits(runs: Any, others: Any) -> Iterator[str]:
    """Yield why Paceline can't have written this; only the first reason may be asked for."""
    if not isinstance(runs, list) or not runs:
        yield "it names no runs"
    for run in runs:
        entry = run if isinstance(run, dict) else {}
        parts = entry.get("made_of")
        known = {"key": entry.get("run"), "digest": entry.get("key"), **(parts if isinstance(parts, dict) else {})}
        if content_key.recorded(known) is None:  # the key is the digest of the parts
            yield f"its parts don't give key {str(entry.get('key'))[:12]}"
        for name, is_such in _FIELDS.items():
            if name not in entry or not is_such(entry[name]):
                yield f"{name} is {repr(entry[name])[:60] if name in entry else 'missing'}"
        if added := sorted(entry.keys() - _FIELDS.keys() - {*_OTHER_FIELDS}):
            yield f"it holds {some_names(added[:1], len(added))}, which no certificate does"
    is_known = isinstance(others, dict) and all(_KEY.match(key) and state in STATES for key, state in others.items())
    if not is_known or State.FINISHED in others.values():
        yield f"others is {repr(others)[:60]}"
    keys = [*(run["run"] for run in runs), *others]
    if twice := [key for key in keys if keys.count(key) > 1]:
        yield f"run {twice[0]} stands in it more than once"


def disagreements(entry: Mapping[str, Any], folder: RunFolder, root: Path) -> Iterator[str]:
    """Yield a line for each difference between a run's folder and the certificate; hashes every file again.

    ``root`` is the project, where the cache of parsed sources lies.
    """
    try:
        key, result = folder.read_key(), folder.read_result()
        if key is None or key.digest != entry["key"]:
            yield f"key.json: the folder is of key {key.digest[:24] if key else '(none)'}…, not {entry['key'][:24]}…"
            return
        check_parts(folder, key, result, root)
        yield from _result(entry, folder, key, result)
    except AlteredError as error:
        yield str(error.what)
    if entry["made_of"].get("code") and not folder.code.is_dir():
        yield "code is missing"
    for name, digest in sorted(entry["files_sha256"].items()):
        yield from _file(folder, name, digest)
    yield from _data(folder, entry)


def _result(entry: Mapping[str, Any], folder: RunFolder, key: ContentKey, result: Result | None) -> Iterator[str]:
    """Compare the certificate's entry of a run with the entry that would be written now."""
    if result is None:
        yield "result.json is missing"
        return
    # Through JSON, because tuples become lists there, as in the entry that was read.
    current = json.loads(json.dumps(_content(folder, result, key, None)))
    for name in sorted(current.keys() - {"verdict", "files_sha256"}):
        if entry.get(name) != current[name]:
            yield f"{name}: the run has {_short(current[name])}, the certificate {_short(entry.get(name))}"
    for name in sorted(current["files_sha256"].keys() - entry["files_sha256"].keys()):
        yield f"{name}: the certificate doesn't name it"
    verdict = verdict_of(folder)
    if verdict is not None and entry["verdict"] not in (None, _said(verdict)):
        yield f"verdict: doit reproduce found {_said(verdict)}"
    lock = folder.path / LOCK
    if lock.is_file() and sha256_file(lock) != entry["origin"].get("lock_sha256"):
        yield f"{LOCK}: its sha256 isn't {str(entry['origin'].get('lock_sha256'))[:12]}…"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _file(folder: RunFolder, name: str, digest: str) -> Iterator[str]:
    path = folder.path / name
    if not path.resolve().is_relative_to(folder.path.resolve()):
        yield f"{name}: leads out of the run's folder"
    elif not path.is_file():
        yield f"{name} is missing"
    elif sha256_file(path) != digest:
        yield f"{name}: its sha256 isn't {digest[:12]}…"


def _data(folder: RunFolder, entry: Mapping[str, Any]) -> Iterator[str]:
    """Check the data pack that the run links to, if any."""
    place = folder.path / "data"
    if not (place / manifest.MANIFEST).is_file() or not folder.program.is_ours:
        return
    pack = manifest.read(place)
    if pack is None:
        yield f"data: the pack in {place.resolve()} was altered, or isn't whole"
    elif pack.digest != entry["made_of"].get("data"):
        yield f"data: the pack in {place.resolve()} has digest {pack.digest[:12]}…"


def unchecked(entry: Mapping[str, Any], folder: RunFolder) -> list[str]:
    """Return the parts of the certificate that can't be checked here: missing data, or a missing verdict."""
    if not folder.program.is_ours:
        left = ["the script's data"] if entry["made_of"].get("data") else []
    else:
        left = [] if (folder.path / "data" / manifest.MANIFEST).is_file() else ["the data, which isn't here"]
    if entry["verdict"] is not None and verdict_of(folder) is None:
        left.append("that it was made again, of which nothing is here")
    return left
