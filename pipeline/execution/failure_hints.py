"""Hints to the user about failures of the code that ranks run: a missing file, module or variable, a lost host, …

``add_known_hint`` looks for a known cause in the message of a failed attempt, and adds what the user can do about it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.cluster import launchers
from pipeline.cluster.launchers.transport.answers import ssh_command
from pipeline.core.errors import TrainingError
from pipeline.core.specs import Cluster
from pipeline.execution.run import Run
from trainers.contract import run_folder

# in the words of Python, numpy and Hydra
_MISSING_FILE = re.compile(
    r"No such file or directory: '([^']+)'|FileNotFoundError: (\S+) not found\.|config directory '(?P<folder>[^']+)'"
)
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<module>\w+)")

OUT_OF_MEMORY = r"out of memory|MemoryError|can(?:no|')t allocate memory"
SCRIPT_HINTS = (  # (pattern in the failure, hint); the first match counts
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
    (r"\bBdbQuit\b", "a run has no keyboard, so a debugger ends it: take breakpoint() and pdb out of the code"),
    (
        r"attempted relative import with no known parent package",
        "Python runs a script outside its package: from utils import x instead of from .utils import x, or start it as "
        "a module, from the folder above its package: doit run -m PACKAGE.MODULE",
    ),
    (
        r"DataLoader worker \(pid\(s\)[^)]*\) exited unexpectedly",
        "doit logs last shows what the workers printed; workers that are spawned import the script once more, which "
        "therefore needs if __name__ == '__main__': before whatever it starts",
    ),
    (
        r"(?:unrecognized arguments|[Nn]o such option):.*(?P<what>--(?:nnodes|nproc[-_]per[-_]node|max[-_]restarts))\b",
        "{what} is an option of torchrun, whose options stand in front of the script: doit torchrun {what} N SCRIPT",
    ),
    (
        r"unrecognized arguments:.* ?(?P<what>--(?:sweep|cluster|json|dry-run|force|detach|prove|budget|max-trials))\b",
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


def add_known_hint(error: TrainingError, run: Run) -> TrainingError:
    """Return the error with a hint, if it has none and its cause is one that a user can fix in one step."""
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
    return error if hint is None else replace_hint(error, hint)


def replace_hint(error: TrainingError, hint: str) -> TrainingError:
    """Return the same error with this hint."""
    return TrainingError(error.what, hint=hint, cause=error.cause, gone=error.gone)


def script_hint(failure: str) -> str | None:
    """Return the hint for a common error of scripts that are started as a run; None for another error."""
    for pattern, hint in SCRIPT_HINTS:
        if match := re.search(pattern, failure):
            return hint.format(**match.groupdict())
    return None


def lost_host_hint(error: TrainingError, cluster: Cluster) -> str | None:
    """Return the hint for hosts that no longer answer: how to test one, and which setting replaces it by a spare."""
    host = next((host for host in cluster.hosts if host.label in error.gone), None)
    if host is None or launchers.capabilities(cluster).hosts_are_granted:
        return None
    again = "the same command goes on once it answers"
    spare = "" if cluster.spares else "; cluster.max_restarts=1 with cluster.spares=[HOST] goes on without it"
    return f"{ssh_command(host, cluster.ssh_config)} true; {again}{spare}"


def module_hint(failure: str, run: Run) -> str | None:
    """Return the hint for a module of the project that isn't in the snapshot of the code, because the script makes the
    module's name at run time (``importlib.import_module``)."""
    match = _NO_MODULE.search(failure)
    if match is None or run.config.script is None:
        return None
    name, script = match["module"], run.config.script
    folders = sorted(path for path in run.root.iterdir() if path.is_dir())
    for folder in (run.root / script.workdir, run.root, *folders):
        candidates = [folder / f"{name}.py", *sorted((folder / name).glob("*.py"))]
        files = [path for path in candidates if path.is_file() and path.is_relative_to(run.root)]
        if files:
            return _inputs_hint(files[0].relative_to(run.root), script.inputs)
    return None


def pip_hint(failure: str, cluster: Cluster) -> str | None:
    """Return the hint for a missing package: pip of the ranks' Python, as a shell's pip may be another Python's."""
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
        # Hydra names the path in the run's copy of the project, others the path as the script gave it
        _, is_in_copy, inside = path.rpartition(f"/{run_folder.WORK_COPY}/")
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
    # the built-in trainer: its ranks start in the run's folder, with the code in ``code`` below it
    name = path.partition("/code/")[2] if path.startswith("/") else path.removeprefix("./")
    if not name or not (run.root / name).is_file():
        return None
    opened = "ranks start in the run's folder, so open it by a path made of __file__"
    if name in run.code.sources:
        return f"{name} is in the run's copy of the code; {opened}"
    return f"model.inputs=[{name}] takes it along into the run's copy of the code; {opened}"


def _inputs_hint(file: Path, inputs: Sequence[str]) -> str:
    """Return the advice to add a file of the project, with its siblings, to ``inputs``, the value of program.inputs."""
    pattern = f"{file.parent}/*" if file.parent.parts else str(file)
    word = f"program.inputs=[{','.join([*inputs, pattern])}]"
    more = " with all that lies beside it" if file.parent.parts else ""
    return f"{shlex.quote(word)} in front of the script takes {file} along{more}"
