"""`doit triage`: what failed of a run, where, the evidence and the next command, in at most a thousand tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.cli import answers
from pipeline.cli.output import say, say_log
from pipeline.cli.session import session
from pipeline.cluster.failures import is_echo, shortened, without_message
from pipeline.comparing import reading
from pipeline.comparing.reading import ComparedRun, command_line
from pipeline.core import documents, locks
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.core.specs import LAST, UNDER_WAY, RankError, State
from pipeline.runs import index, journal
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_MOST_FAILED, _MOST_TRACEBACK, _MOST_LOG = 700, 1_000, 800  # characters: with the rest at most a thousand tokens
_LOG_BYTES = 1 << 16
_LINE = re.compile(r"(?P<rank>\d+|-) \| (?P<text>.*)")  # of a host's log; torchrun's own lines have no rank
_OWN_FRAME = re.compile(r'^  File "(?P<path>[^/"<][^"]*)", line (?P<line>\d+)', re.MULTILINE)
_MENDS = (  # what the failure says, and what mends it; the first that fits
    (
        r"No module named '(?P<what>[^']+)'",
        "install what brings {what} on the hosts, or put it into the project",
    ),
    (r"out of memory|MemoryError|can(?:no|')t allocate memory|SIGKILL", "give it more memory, or a smaller batch"),
    (r"No space left on device|Disk quota exceeded", "free space on {host}; doit clean says which runs may go"),
    (
        r"No such file or directory: '(?P<what>[^']+)'",
        "see that {what} is there; a file that git doesn't track reaches the ranks by program.inputs=[FILE]",
    ),
    (r"CUDA|NVIDIA|cuda", "take a host with a GPU, or the processor"),
    (r"another collective|mismatch|op\.preamble", "let every rank join every collective, in one order"),
    (r"no rank has moved", "see what it waits for: doit logs {key}"),
    (r"^training failed: |no longer answers|isolated: |not been heard of", "{preflight}"),
)


class _Failed(NamedTuple):
    """The error of one rank, and its host."""

    host: str
    error: RankError

    @property
    def place(self) -> str:
        return f"{self.host} rank {self.error.rank}"


def triage() -> None:
    """Print what is known of a run's end. Raises UsageError: no such run."""
    invocation, runs_dir = session().invocation, session().config.runs_dir
    known = examined(index.find(runs_dir, invocation.options.get("run", LAST)))
    if answers.wanted():
        answers.answer(known)
        return
    for name in ("run", "what", "failed", "where"):
        if known[name]:
            say(f"{name:<9}{known[name]}")
    for name, text in known["evidence"].items():
        say(f"{name}:")
        say_log("\n".join(f"  {line}" for line in text.splitlines()))
    say(f"next     {known['next']}")


def examined(folder: RunFolder) -> dict[str, Any]:
    """Return what is known of a run's end: ``run`` and ``state``, ``what`` was run, what ``failed``, ``where`` (hosts
    and ranks, the first error first), ``evidence`` (texts by name) and the ``next`` command. Secrets are masked.
    """
    run, entries = reading.read(folder), journal.read(folder.journal)
    attempt = entries[-1].attempt if entries else 0
    errors = _errors(folder, attempt)
    failed = _cut(run.failure or run.reservation, _MOST_FAILED)
    host = errors[0].host if errors else next((name for name in run.hosts if name in failed), next(iter(run.hosts), ""))
    traceback = _traceback(errors[0].error, folder.key) if errors else ""
    evidence = {"traceback": _end(traceback, _MOST_TRACEBACK)} if traceback else {}
    if run.failure and (log := _log(folder, attempt, host, errors[0].error.rank if errors else None)):
        evidence[f"log of {host}"] = log
    return {
        "run": f"{run.key} {run.state}{f', attempt {attempt}' if entries else ''}",
        "key": run.key,
        "state": run.state,
        "what": run.what,
        "failed": failed,
        "where": ", ".join(dict.fromkeys(one.place for one in errors)),
        "evidence": evidence,
        "next": _next(folder, run, host, traceback),
    }


def _errors(folder: RunFolder, attempt: int) -> list[_Failed]:
    """Return the errors of an attempt's ranks, first one first, without consequences of other errors."""
    errors = sorted(_all_errors(folder, attempt), key=lambda one: one.error.unix_time)
    return [one for one in errors if not is_echo(one.error)] or errors


def _all_errors(folder: RunFolder, attempt: int) -> Iterator[_Failed]:
    for path in sorted((folder.path / run_folder.ATTEMPTS / str(attempt)).glob("*.exit.json")):
        ended = documents.read_or_none(path) or {}
        for error in ended.get("errors") or ():
            yield _Failed(
                str(ended.get("host", path.name)),
                RankError(
                    rank=int(error.get("rank") or 0),
                    unix_time=float(error.get("unix_time") or 0.0),
                    message=str(error.get("message") or ""),
                    traceback=str(error.get("traceback") or ""),
                ),
            )


def _traceback(error: RankError, key: str) -> str:
    """Return the frames of the user's own code and the last one, with paths in the project, without the message."""
    frames = without_message(error.traceback, error.message)
    return shortened(frames, key) if frames.strip() else ""


def _log(folder: RunFolder, attempt: int, host: str, rank: int | None) -> str:
    """Return the last lines of a rank before its traceback; those of all ranks if none is at fault."""
    path = folder.path / run_folder.ATTEMPTS / str(attempt) / f"{host}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    parsed = [match for line in lines if (match := _LINE.fullmatch(line)) and match["rank"] != "-"]
    own = [match["text"] if rank is not None else match[0] for match in parsed if rank in (None, int(match["rank"]))]
    first = next((at for at, text in enumerate(own) if "Traceback (most recent call last):" in text), len(own))
    return _end("\n".join(own[:first]), _MOST_LOG)


def _next(folder: RunFolder, run: ComparedRun, host: str, traceback: str) -> str:
    """Return what to do now: the fix, and the command that continues."""
    again = command_line("train", run.overrides)
    if locks.is_held(folder.lock):
        return f"doit status {run.key} --watch; it is under way"
    if run.state in (State.FINISHED, index.ACCEPTED):
        return f"nothing: it is {run.state}"
    if run.state in UNDER_WAY or run.state == State.KILLED:
        return f"{again}; it goes on where it was"
    return f"{_mend(run, host, traceback)}, then {again}"


def _mend(run: ComparedRun, host: str, traceback: str) -> str:
    preflight = command_line("preflight", [word for word in run.overrides if word.lstrip("+").startswith("cluster")])
    for pattern, mend in _MENDS:
        if match := re.search(pattern, run.failure):
            what = match.groupdict().get("what", "")
            if "No module" in pattern and (ROOT / f"{what}.py").is_file():
                return f"add program.inputs=[{what}.py], as the code doesn't show the import"
            return mend.format(what=what, host=host, key=run.key, preflight=preflight)
    frames = _OWN_FRAME.findall(traceback)
    return f"mend {frames[-1][0]}, line {frames[-1][1]}" if frames else "mend what it names"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _end(text: str, most: int) -> str:
    """Return the last complete lines of a text, at most ``most`` characters, without secrets."""
    text = hide(text.strip("\n"))
    return text if len(text) <= most else f"…\n{text[-most:].partition(chr(10))[2]}"
