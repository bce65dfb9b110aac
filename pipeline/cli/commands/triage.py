"""`doit triage`: what failed of a run, where, the evidence and the next command, in a thousand tokens at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.cli import answers
from pipeline.cli.output import say, say_log
from pipeline.cli.session import session
from pipeline.comparing import reading
from pipeline.comparing.reading import ComparedRun, command_line
from pipeline.core import documents, locks
from pipeline.core.redact import hide
from pipeline.core.specs import UNDER_WAY, State
from pipeline.runs import index, journal
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_MOST = 1_200  # characters of a traceback or a log: a thousand tokens hold both, and the rest
_LOG_BYTES = 1 << 16


def triage() -> None:
    """Raises UsageError: no such run."""
    invocation, runs_dir = session().invocation, session().config.runs_dir
    named = invocation.options.get("run") or next(iter(invocation.paths), "last")
    found = examined(index.find(runs_dir, named))
    if answers.wanted():
        answers.answer(found)
        return
    for name in ("run", "what", "failed", "where"):
        if found[name]:
            say(f"{name:<9}{found[name]}")
    for name, text in found["evidence"].items():
        say(f"{name}:")
        say_log("\n".join(f"  {line}" for line in text.splitlines()))
    say(f"next     {found['next']}")


def examined(folder: RunFolder) -> dict[str, Any]:
    """Return what is known of a run's end: ``run`` and ``state``, ``what`` was run, what ``failed``, ``where`` (hosts
    and ranks, the first error first), ``evidence`` (texts by name) and the ``next`` command. Secrets are masked."""
    run, entries = reading.read(folder), journal.read(folder.journal)
    errors = sorted(_errors(folder, entries[-1].attempt if entries else 0), key=lambda error: error["unix_time"])
    evidence = {}
    if errors and errors[0]["traceback"]:
        evidence["traceback"] = _end(errors[0]["traceback"])
    host = errors[0]["host"] if errors else next(iter(run.hosts), "")
    if run.failure and (log := _log(folder, entries[-1].attempt, host)):
        evidence[f"log of {host}"] = log
    return {
        "run": f"{run.key} {run.state}{f', attempt {entries[-1].attempt}' if entries else ''}",
        "key": run.key,
        "state": run.state,
        "what": run.what,
        "failed": run.failure or run.reservation,
        "where": ", ".join(dict.fromkeys(f"{error['host']} rank {error['rank']}" for error in errors)),
        "evidence": evidence,
        "next": _next(folder, run),
    }


def _errors(folder: RunFolder, attempt: int) -> Iterator[dict[str, Any]]:
    """Of all ranks of an attempt."""
    for path in sorted((folder.path / run_folder.ATTEMPTS / str(attempt)).glob("*.exit.json")):
        ended = documents.read_or_none(path) or {}
        for error in ended.get("errors") or ():
            known = {"rank": error.get("rank"), "unix_time": float(error.get("unix_time") or 0.0)}
            yield {**known, "host": ended.get("host", path.name), "traceback": str(error.get("traceback") or "")}


def _log(folder: RunFolder, attempt: int, host: str) -> str:
    path = folder.path / run_folder.ATTEMPTS / str(attempt) / f"{host}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return _end(file.read().decode(errors="replace"))
    except OSError:
        return ""


def _end(text: str) -> str:
    """The last lines, up to so many characters."""
    text = hide(text.strip())
    return text if len(text) <= _MOST else f"…{text[-_MOST:].partition(chr(10))[2]}"


def _next(folder: RunFolder, run: ComparedRun) -> str:
    again = command_line("train", run.overrides)
    if locks.is_held(folder.lock):
        return f"doit status {run.key} --watch; it is under way"
    if run.state in (State.FINISHED, index.ACCEPTED):
        return f"nothing: it is {run.state}"
    if run.state in UNDER_WAY or run.state == State.KILLED:
        return f"{again}; it goes on where it was"
    return f"fix it, then {again}; doit preflight with its cluster, if a host is at fault"
