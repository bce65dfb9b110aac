"""What follows a failed attempt: whether another could succeed, on which hosts and from where; hints to the user."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.cluster import launchers, starts, validation
from pipeline.cluster.launchers.transport.answers import ssh_command
from pipeline.core.errors import TrainingError
from pipeline.core.specs import Cluster, LaunchPlan
from pipeline.execution.run import Run
from pipeline.runs import checkpoints
from trainers.contract import run_folder
from trainers.script.settings import ScriptConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0


class Restarts:
    """Decides about the next attempt of a command, from the hosts that are left and from how the last one failed."""

    def __init__(
        self, cluster: Cluster, *, shards: int = 0, keeps_hosts: bool = False, begun_before: bool = False
    ) -> None:
        """``keeps_hosts``: a sweep assigned the hosts, so none is replaced. ``begun_before``: an earlier command began
        the run, and may have been killed after a host was lost.
        """
        self.cluster, self.shards = cluster, shards
        self.took_part = {host.label for host in cluster.hosts} if begun_before else set[str]()
        self._keeps_hosts = keeps_hosts
        self.has_failed = False  # an attempt of this command, so the next one is a restart
        self.replaces = begun_before and cluster.settings.max_restarts > 0  # whether silent hosts may be replaced
        self._last_failure: tuple[str, int, str] | None = None  # message, step, the script's checkpoint
        self._gone: dict[str, float] = {}  # host whose stop wasn't confirmed → unix time at which its lease ends

    def note_failure(self, error: TrainingError, *, step: int, now: float, saved: str = "") -> None:
        """Note that an attempt has failed. ``saved``: the checkpoints that a script resumes from, as text.

        Raises TrainingError if another attempt wouldn't help: a bad value, a cancelled job, outputs that can't be
        fetched, or the same message (numbers aside) at the same step with the same checkpoint twice, unless a host was
        the cause.
        """
        if error.cause in ("config", "cancelled", "outputs"):
            raise error
        self.took_part |= {host.label for host in self.cluster.hosts}
        failure = re.sub(r"\d+", "#", error.what.partition("\n")[0]), step, saved
        if error.cause != "host" and failure == self._last_failure:
            known = f"at step {step} before" if step else "before, and no logged step or checkpoint tells of progress"
            raise TrainingError(
                f"{error.what}\nit has failed in the same way {known}, so it is not tried again",
                hint=error.hint,
                cause=error.cause,
            ) from None
        self._last_failure, self.has_failed, self.replaces = failure, True, True
        self._gone |= dict.fromkeys(error.gone, now + self.cluster.settings.lease_s)

    def may_still_run(self, now: float) -> str:
        """Return the end of a sentence: hosts on which ranks of earlier attempts may still run; '' if none."""
        late = [f"{host} until {clock(ends)}" for host, ends in self._gone.items() if ends > now]
        if not late:
            return ""
        lease_s = self.cluster.settings.lease_s
        return f", but perhaps on {', '.join(late)} (cluster.lease_s={lease_s:g}), which couldn't be asked"

    def replace(self, gone: Sequence[str]) -> list[str]:
        """Replace the hosts ``gone`` by spares, or go on without them where that is allowed. Return lines about it."""
        if not gone or self._keeps_hosts:
            return []
        replaced = validation.replace_lost(self.cluster, gone)
        if replaced is None and self.shards:
            replaced = validation.go_on_with_fewer(self.cluster, gone, lambda ranks: self.shards % ranks == 0)
        if replaced is None:
            return []
        self.cluster, lines = replaced
        return lines

    def idle_spares(self, gone: Sequence[str]) -> list[str]:
        """Return a line for each spare that stays idle although hosts are ``gone``, with the reason."""
        return [] if self._keeps_hosts else validation.unfit_spares(self.cluster, gone)


class Pauses:
    """Pauses between requests to silent hosts: each longer than the last, ``limit_s`` in total."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.doing = limit_s, ""  # doing: words for what is waited for
        self._pause_s = _FIRST_PAUSE_S
        self._ends: float | None = None

    def next(self, now: float) -> float | None:
        """Return the seconds until the next request; None after ``limit_s``. ``now`` comes from a monotonic clock."""
        self._ends = now + self.limit_s if self._ends is None else self._ends
        if now >= self._ends:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return min(pause_s, self._ends - now)


def clock(unix_time: float) -> str:
    """Return ``13:45:12``, by this computer's clock."""
    return time.strftime("%H:%M:%S", time.localtime(unix_time))


# ------------------------------------------------------------------------- where the next attempt begins
def next_start(run: Run, lost: Collection[str] = ()) -> str:
    """Return the end of "it starts …": ``from the checkpoint of step 40``, …. ``lost``: hosts that can't be reached."""
    script = ScriptConfig(**run.config.resolved["program"]) if run.config.script is not None else None
    return next_start_in(run.folder.path, script, lost)


def next_start_in(run_dir: Path, script: ScriptConfig | None, lost: Collection[str] = ()) -> str:
    """Return the same text for a run folder. ``script``: None for Paceline's own trainer."""
    unfinished = starts.unfinished_plan(run_dir)
    # rank 0 wrote into a folder of its host, which may have files that aren't here
    is_unfetched = unfinished is not None and Path(unfinished.nodes[0].run_dir) != run_dir.resolve()
    unfetched = unfinished if is_unfetched else None
    is_lost = unfetched is not None and unfetched.nodes[0].host in lost
    within_reach = None if is_lost else unfetched
    attempts = checkpoints.script_attempts(run_dir, script)
    start = _next_start_of_trainer(run_dir, within_reach) if attempts is None else attempts.next_start(within_reach)
    if unfetched is not None and is_lost and not start:
        host, fetched = unfetched.nodes[0].host, f"checkpoints are fetched each {unfetched.checkpoint_fetch_s:g} s"
        return (
            f"from the beginning: what attempt {unfetched.attempt} saved is on {host}, which is lost ({fetched}, by "
            "cluster.checkpoint_fetch_s)"
        )
    return start or "from the beginning: there is no checkpoint yet"


def _next_start_of_trainer(run_dir: Path, unfetched: LaunchPlan | None) -> str:
    if step := checkpoints.newest_step(run_dir):
        return f"from the checkpoint of step {step}"
    if unfetched is not None:
        host = unfetched.nodes[0].host
        return f"from the newest checkpoint that attempt {unfetched.attempt} has left on {host}, if there is one"
    return ""


# ------------------------------------------------------------------------- hints about failures of the ranks' code
_MISSING_FILE = re.compile(
    r"No such file or directory: '([^']+)'|FileNotFoundError: (\S+) not found\.|config directory '(?P<folder>[^']+)'"
)
"""As Python, numpy and Hydra say it."""
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<module>\w+)")

OUT_OF_MEMORY = r"out of memory|MemoryError|can(?:no|')t allocate memory"
OF_SCRIPTS = (  # (pattern in the failure, hint); the first match counts
    (
        r"(?s)KeyError: '(?P<what>[A-Z][A-Z0-9_]*)'.*environ",
        "cluster.env.{what}='${{oc.env:{what}}}' in front of the script passes this shell's variable on: the ranks get "
        "only those that are named",
    ),
    (OUT_OF_MEMORY, "a smaller batch or model, or fewer workers of the loader"),
    (
        r"[Ee]rror downloading|urlopen error|Dataset not found",
        "pass the folder of its data on this computer as an argument of the script, which takes it along as data; if "
        "the script has a fixed path in the project, put program.inputs=[data/*] in front of the script",
    ),
    (
        r"environment variable (?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT) expected, but not set",
        "torchrun starts the ranks of this script: doit torchrun --nproc-per-node N SCRIPT",
    ),
    (r"EOF when reading a line", "a run has no keyboard: let the script take the answer as an argument"),
    (
        r"(?:unrecognized arguments|[Nn]o such option):.*(?P<what>--(?:nnodes|nproc[-_]per[-_]node|max[-_]restarts))\b",
        "{what} is an option of torchrun, whose options stand in front of the script: doit torchrun {what} N SCRIPT",
    ),
    (
        r"unrecognized arguments:.* ?(?P<what>--(?:sweep|cluster|dry-run|force|detach|prove))\b",
        "{what} is an option of this command, whose options stand in front of the script: doit run {what} … SCRIPT",
    ),
    (
        r"unrecognized arguments: (?P<name>[A-Za-z]\w*)=(?P<value>\S+)",
        "an argument of this script is written --{name} {value}",
    ),
    (
        r"invalid \w+ value: '(?P<what>[^',]+,[^']*)'",
        "{what} are values of a sweep: doit sweep in front of the same words trains once with each",
    ),
)


def with_hint(error: TrainingError, run: Run) -> TrainingError:
    """Return the error with a hint, if it has none and a user can mend the failure in one step."""
    if error.hint is not None:
        return error
    hint = (
        lost_host_hint(error, run.config.cluster)
        or module_hint(error.what, run)
        or pip_hint(error.what, run.config.cluster)
        or file_hint(error.what, run)
    )
    if hint is None and run.config.script is not None:
        hint = script_hint(error.what)
    return error if hint is None else hinting(error, hint)


def hinting(error: TrainingError, hint: str) -> TrainingError:
    """Return the same error with this hint."""
    return TrainingError(error.what, hint=hint, cause=error.cause, gone=error.gone)


def script_hint(failure: str) -> str | None:
    """Return the hint for an error that scripts make when they are started as a run."""
    for pattern, hint in OF_SCRIPTS:
        if match := re.search(pattern, failure):
            return hint.format(**match.groupdict())
    return None


def lost_host_hint(error: TrainingError, cluster: Cluster) -> str | None:
    """Return the hint for hosts that no longer answer: how to ask one, and what goes on without it."""
    host = next((host for host in cluster.hosts if host.label in error.gone), None)
    if host is None or launchers.capabilities(cluster).hosts_are_granted:
        return None
    again = "the same command goes on once it answers"
    spare = "" if cluster.spares else "; cluster.max_restarts=1 with cluster.spares=[HOST] goes on without it"
    return f"{ssh_command(host, cluster.ssh_config)} true; {again}{spare}"


def module_hint(failure: str, run: Run) -> str | None:
    """Return the hint for a module of the project that the import closure missed, because the script makes its name at
    run time (``importlib.import_module``).
    """
    match = _NO_MODULE.search(failure)
    if match is None or run.config.script is None:
        return None
    name, script = match["module"], run.config.script
    inside = sorted(path for path in run.root.iterdir() if path.is_dir())
    for folder in (run.root / script.workdir, run.root, *inside):
        modules = [folder / f"{name}.py", *sorted((folder / name).glob("*.py"))]
        if module := next((path for path in modules if path.is_file() and path.is_relative_to(run.root)), None):
            return _inputs_hint(module.relative_to(run.root), script.inputs)
    return None


def pip_hint(failure: str, cluster: Cluster) -> str | None:
    """Return the hint for a missing module: pip of the Python that ran, as a shell's pip may be another Python's."""
    match = _NO_MODULE.search(failure)
    if match is None:
        return None
    here = launchers.capabilities(cluster).is_this_computer
    named = next((host.python for host in cluster.hosts if host.python), None)
    python, where = named or (sys.executable if here else "python3"), "" if here else "on each host "
    return (
        f"{where}{python} -m pip install {match['module']} (or uv pip install --python {python} {match['module']}); "
        "where it is code of yours, cluster.env.PYTHONPATH=<its folder>"
    )


def file_hint(failure: str, run: Run) -> str | None:
    """Return the hint for a file that a rank missed and that exists here: the setting that copies it to the hosts."""
    match = _MISSING_FILE.search(failure)
    if match is None:
        return None
    path = next(filter(None, match.groups()))
    if run.config.script is not None:
        _, is_in_copy, inside = path.rpartition(f"/{run_folder.WORK_COPY}/")  # Hydra names it with the run's copy
        here = (run.root / inside if is_in_copy else run.root / run.config.script.workdir / path).resolve()
        if match["folder"] and here.is_dir() and run.root in here.parents:
            inputs = [*run.config.script.inputs, f"{here.relative_to(run.root)}/"]
            word = shlex.quote(f"program.inputs=[{','.join(inputs)}]")
            return f"{word} in front of the script takes the folder along"
        if here.is_file() and here.is_relative_to(run.root):
            return _inputs_hint(here.relative_to(run.root), run.config.script.inputs)
        if not path.startswith("../") or not here.exists() or here.is_relative_to(run.root):
            return None
        return (
            f"{here} lies above the project, and the script runs in a copy of it: pass the path as an argument, which "
            "makes it data, or move it into the project and name it in program.inputs"
        )
    name = path.partition("/code/")[2] if path.startswith("/") else path.removeprefix("./")
    if not name or not (run.root / name).is_file():
        return None
    opened = "ranks start in the run's folder, so open it by a path made of __file__"
    if name in run.code.sources:
        return f"{name} is in the run's copy of the code; {opened}"
    return f"model.inputs=[{name}] takes it along into the run's copy of the code; {opened}"


def _inputs_hint(file: Path, inputs: Sequence[str]) -> str:
    beside = f"{file.parent}/*" if file.parent.parts else str(file)
    word = f"program.inputs=[{','.join([*inputs, beside])}]"
    more = " with all that lies beside it" if file.parent.parts else ""
    return f"{shlex.quote(word)} in front of the script takes {file} along{more}"
