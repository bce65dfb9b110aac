"""`doit triage`: why a run failed, on which host and rank, the evidence, and the next command. At most 1,000 tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.cli.output import answer, as_typed, say, say_log, wants_json
from pipeline.cli.session import Session
from pipeline.cluster.attempt.failures import is_consequence, shortened, without_message
from pipeline.cluster.events import RankError
from pipeline.comparing.groups import ComparedRun, command_line, read
from pipeline.core import documents, locks
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.core.specs import LAST, UNDER_WAY, State
from pipeline.execution.failure_hints import OUT_OF_MEMORY, SCRIPT_HINTS
from pipeline.execution.restarts import next_start_in
from pipeline.execution.run import lacking_files
from pipeline.runs import checkpoints, index, journal
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_MAX_FAILED, _MAX_TRACEBACK, _MAX_LOG = 700, 1_000, 800  # characters, so that the answer has at most 1,000 tokens
_LOG_BYTES = 1 << 16  # of a log's end, in which the lines are looked for
_LINE = re.compile(r"(?P<rank>\d+|-) \| (?P<text>.*)")  # a line of a host's log; torchrun's lines have - as rank
_HUNG = re.compile(r"rank (?P<rank>\d+) on (?P<host>\S+) hangs")
_PROJECT_FRAME = re.compile(r'^  File "(?P<path>[^/"<][^"]*)", line (?P<line>\d+)', re.MULTILINE)
# pairs (pattern in the failure, fix); the first match counts. In braces: groups of the pattern, and names from _fix
_FIXES = (
    (r"No module named '(?P<missing>[^']+)'", "install what brings {missing} on the hosts, or put it into the project"),
    (f"{OUT_OF_MEMORY}|SIGKILL", "give it more memory, or a smaller batch"),
    *SCRIPT_HINTS,
    (r"No space left on device|Disk quota exceeded", "free space on {host}; {clean}"),
    (
        r"No such file or directory: '(?P<missing>[^']+)'",
        "see that {missing} is there; a file that git doesn't track reaches the ranks by program.inputs=[FILE], and "
        "a folder to write into by os.makedirs in the script, or by .gitkeep in git",
    ),
    (r"CUDA|NVIDIA|cuda", "take a host with a GPU, or the processor"),
    (r"another collective|mismatch|op\.preamble", "let every rank join every collective, in one order"),
    (r"no rank has moved", "see what it waits for: {logs}"),
    (
        r"^training failed: |the run's supervisor on this host|no longer answers|isolated: |not been heard of",
        "{preflight}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Triage:
    """The findings about a run, without secrets, in the form of the JSON answer."""

    run: str  # key, state and attempt
    key: str
    state: str
    what: str
    failed: str  # the error; '' for a finished run
    where: str  # hosts and ranks, the first error first
    evidence: dict[str, str]  # the traceback, the log of a host
    next: str  # the next command, and what to do before it


def triage(current: Session) -> None:
    """Print why a run failed, the evidence, and the next command. Raises UsageError: no such run."""
    invocation, runs_dir = current.invocation, current.config.runs_dir
    folder = index.find(runs_dir, invocation.options.get("run") or _newest_unfinished(runs_dir))
    result = examine(folder, invocation.runs_dir_words)
    if wants_json():
        answer(asdict(result))
        return
    for name, text in (("run", result.run), ("what", result.what), ("failed", result.failed), ("where", result.where)):
        if text:
            say(f"{name:<9}{text}")
    for name, text in result.evidence.items():
        say(f"{name}:")
        say_log("\n".join(f"  {line}" for line in text.splitlines()))
    say(f"next     {result.next}")


def _newest_unfinished(runs_dir: Path) -> str:
    """Return the key of the newest run that did not finish; if all did, ``last``, the word for the newest run."""
    unfinished = (State.FAILED, State.KILLED, *UNDER_WAY)
    return next((row.key for row in reversed(index.rows(runs_dir)) if row.state in unfinished), LAST)


def examine(folder: RunFolder, runs_dir_words: Sequence[str] = ()) -> Triage:
    """Read from a run's folder why it failed. ``runs_dir_words``: overrides for the next command."""
    run, entries = read(folder), journal.read(folder.journal)
    attempt = entries[-1].attempt if entries else 0
    errors = _rank_errors(folder, attempt)
    # a reservation says why nothing may be claimed about the run's figures: unproven, not finished
    failed = run.failure or (run.reservation if run.state != State.FINISHED else "")
    failed = failed if len(failed) <= _MAX_FAILED else f"{failed[:_MAX_FAILED]}…"
    # the first error names the host; without one, the message of the failure may
    host_in_message = next((name for name in run.hosts if name in failed), next(iter(run.hosts), ""))
    host, error = errors[0] if errors else (host_in_message, None)
    rank = error.rank if error else None
    places = [f"{name} rank {one.rank}" for name, one in errors]
    # if a rank hangs, the errors are those of the other ranks, which were ended because of it
    if hung := _HUNG.search(failed):
        host, rank = hung["host"], int(hung["rank"])
        places = [f"{host} rank {rank}"]
    frames = without_message(error.traceback, error.message) if error else ""
    traceback = shortened(frames, folder.key) if frames.strip() else ""  # frames of the user's code, and the last one
    evidence = {"traceback": _last_lines(traceback, _MAX_TRACEBACK)} if traceback else {}
    if run.failure and (log := _log_excerpt(folder, attempt, host, rank)):
        evidence[f"log of {host}"] = log
    return Triage(
        run=f"{run.key} {run.state}{f', attempt {attempt}' if entries else ''}",
        key=run.key,
        state=run.state,
        what=run.what,
        failed=failed,
        where=", ".join(dict.fromkeys(places)),
        evidence=evidence,
        next=as_typed(_next_step(folder, run, runs_dir_words, host, traceback)),
    )


def _rank_errors(folder: RunFolder, attempt: int) -> list[tuple[str, RankError]]:
    """Return pairs (host, error) of an attempt's ranks, the earliest first, without errors that another one caused."""
    errors: list[tuple[str, RankError]] = []
    for path in sorted((folder.path / run_folder.ATTEMPTS / str(attempt)).glob("*.exit.json")):
        node_exit = documents.read_or_empty(path)
        for fields in node_exit.get("errors") or ():
            error = RankError(
                rank=int(fields.get("rank") or 0),
                unix_time=float(fields.get("unix_time") or 0.0),
                message=str(fields.get("message") or ""),
                traceback=str(fields.get("traceback") or ""),
            )
            errors.append((str(node_exit.get("host", path.name)), error))
    errors.sort(key=lambda item: item[1].unix_time)
    return [(host, error) for host, error in errors if not is_consequence(error)] or errors


def _log_excerpt(folder: RunFolder, attempt: int, host: str, rank: int | None) -> str:
    """Return the last lines before the first traceback in a host's log, of all ranks if ``rank`` is None; or ''."""
    path = folder.path / run_folder.ATTEMPTS / str(attempt) / f"{host}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    matches = [match for line in lines if (match := _LINE.fullmatch(line))]
    of_ranks = [match for match in matches if match["rank"] != "-"]
    if not of_ranks:  # torchrun itself could not start
        return _last_lines("\n".join(match["text"] for match in matches), _MAX_LOG)
    if rank is None:
        texts = [match[0] for match in of_ranks]  # with the rank in front
    else:
        texts = [match["text"] for match in of_ranks if int(match["rank"]) == rank]
    # the traceback is shown as evidence of its own
    end = next((n for n, text in enumerate(texts) if "Traceback (most recent call last):" in text), len(texts))
    return _last_lines("\n".join(texts[:end]), _MAX_LOG)


def _next_step(folder: RunFolder, run: ComparedRun, runs_dir_words: Sequence[str], host: str, traceback: str) -> str:
    """Return the next command, after what has to be fixed before it, if anything."""
    train = command_line("train", run.overrides, runs_dir_words)
    if locks.is_held(folder.lock):
        return f"doit status {run.key} --watch; it is under way"
    if run.state == State.FINISHED and (unkeyed := lacking_files(folder)) is not None:
        return f"{unkeyed}; until then {train} runs it again"
    if run.state in (State.FINISHED, index.ACCEPTED):
        return f"nothing: it is {run.state}"
    if folder.summary.exists() and not folder.result.exists():
        return f"{train}; it is trained, and this completes it"
    if run.state in UNDER_WAY or run.state == State.KILLED:
        return f"{train}; it starts {next_start_in(folder.path, checkpoints.settings_of(folder.path))}"
    logs = f"{command_line('logs', (), runs_dir_words)} {run.key}"
    return f"{_fix(run, host, traceback, logs)}, then {train}"


def _fix(run: ComparedRun, host: str, traceback: str, logs: str) -> str:
    """Return what to fix, by the failure's message or the traceback; ``logs``: the command that shows the logs."""
    cluster_words = [word for word in run.overrides if word.lstrip("+").startswith("cluster")]
    preflight, clean = command_line("preflight", cluster_words), "doit clean says which runs may go"
    if any(word.startswith("cluster=") and word != "cluster=local" for word in cluster_words):
        clean = f"{command_line('clean', ['--hosts', *cluster_words])} removes what ended attempts left there"
    for pattern, fix in _FIXES:
        if match := re.search(pattern, run.failure):
            missing = match.groupdict().get("missing", "")
            # the module is the project's own, but it isn't in the snapshot: its import can't be seen in the code
            if "No module" in pattern and (ROOT / f"{missing}.py").is_file():
                return f"add program.inputs=[{missing}.py], as the code doesn't show the import"
            names = {"host": host, "logs": logs, "preflight": preflight, "clean": clean}
            return fix.format(**{**match.groupdict(), "missing": missing, **names})
    frames = _PROJECT_FRAME.findall(traceback)
    return f"fix {frames[-1][0]}, line {frames[-1][1]}" if frames else "fix what it names"


def _last_lines(text: str, max_length: int) -> str:
    """Return the last complete lines of a text, at most ``max_length`` characters, without secrets."""
    text = hide(text.strip("\n"))
    return text if len(text) <= max_length else f"…\n{text[-max_length:].partition(chr(10))[2]}"
