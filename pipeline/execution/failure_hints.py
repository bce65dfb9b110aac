"""Hints about failures of the code that ranks run: what a user can do about the error. Starts nothing."""

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

_MISSING_FILE = re.compile(
    r"No such file or directory: '([^']+)'|FileNotFoundError: (\S+) not found\.|config directory '([^']+)'"
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
        # Hydra names it with the folder of the run's copy of the project
        in_project = re.sub(r"^/.*?/code/", f"{run.root}/", path)
        here = (run.root / run.config.script.workdir / in_project).resolve()
        if here.is_dir() and run.root in here.parents:
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
    if not name or name in run.code.sources or not (run.root / name).is_file():
        return None
    return f"model.inputs=[{name}] takes it along: it lies in the project, and not in the run's copy of the code"


def _inputs_hint(file: Path, inputs: Sequence[str]) -> str:
    beside = f"{file.parent}/*" if file.parent.parts else str(file)
    word = f"program.inputs=[{','.join([*inputs, beside])}]"
    more = " with all that lies beside it" if file.parent.parts else ""
    return f"{shlex.quote(word)} in front of the script takes {file} along{more}"
