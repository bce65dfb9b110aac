"""Run a step's program on the hosts of the cluster: sent, started and followed like a script's run, once per host.

``on: first`` uses only the first host. The outputs of the first host are fetched.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import AttemptEvent, HostNote, ShownLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.local_gpus import usable_gpus
from pipeline.config.cluster import build_cluster
from pipeline.core import masking
from pipeline.core.errors import TrainingError
from pipeline.core.files import write_atomic, write_json
from pipeline.core.program import SCRIPT, TORCHRUN
from pipeline.core.specs import Cluster, Outputs
from pipeline.keys.import_closure import import_closure
from pipeline.keys.script_files import STARTER
from pipeline.steps.here import CALL, as_text, call
from pipeline.steps.key import is_python, sources_of
from pipeline.steps.step import Making, Step, StepError, filled
from trainers.contract import run_folder

_INPUTS = "_inputs"  # the snapshot's folder for inputs from outside of the project
_LEFT = Outputs(
    final=("outputs", run_folder.OUTPUT_DIGESTS, run_folder.SUMMARY), needed=(run_folder.SUMMARY,), whole=("outputs",)
)
_NO_METRIC = "the script logged no metric"
_OUT = "\0out\0"  # placeholder of the output folder until braces are escaped; no argument can contain a NUL
_BRACES = re.compile(r"\{(\w*)\}")


def run_elsewhere(making: Making, composed: Mapping[str, Any]) -> int:
    """Run the step on the hosts, move the first host's outputs to ``making.out``, and return the exit code.

    Raises:
        StepError: the program can't be sent.
        HostError: a host can't take part.
        Killed: the step was stopped.
    """
    cluster = build_cluster(composed["cluster"], root=making.root, local_gpus=usable_gpus())
    hosts = cluster.hosts[:1] if making.step.on == "first" else cluster.hosts
    once = tuple(dataclasses.replace(host, nproc_per_node=1) for host in hosts)  # whatever the ranks of a training
    cluster = dataclasses.replace(cluster, hosts=once).with_settings(min_nodes=0)
    spec = _laid_out(making, cluster)
    if not _ended_well(making, cluster, spec):
        return 1
    shutil.rmtree(making.out)
    (spec.run_dir / "outputs").rename(making.out)
    shutil.rmtree(spec.run_dir)
    shutil.rmtree(spec.run_dir.parent / ".agents", ignore_errors=True)
    return 0


def _laid_out(making: Making, cluster: Cluster) -> AttemptSpec:
    """Create a run folder for the attempt next to its outputs. Raises StepError, OSError."""
    folder = making.out.parent / "attempt"
    program, files = _program(making)
    files = {**files, **import_closure(making.root, (STARTER, TORCHRUN), cluster.python_path, may_lack=True).sources}
    for name, source in files.items():
        write_atomic(folder / "code" / name, source.read_bytes())
    write_json(folder / run_folder.CONFIG, {"seed": 0, "program": program})
    return AttemptSpec(
        run_dir=folder.resolve(),
        run_key=f"step-{making.step.name}-{secrets.token_hex(3)}",  # random: a fixed key would end another user's step
        attempt=1,
        trainer=SCRIPT.entry,
        outputs=_LEFT,
        script=str(program["script"] or ""),
        project=str(making.root),
    )


def _ended_well(making: Making, cluster: Cluster, spec: AttemptSpec) -> bool:
    """Run the attempt to its end, with every line in the log and on the terminal. Raises HostError, Killed."""
    with making.log.open("a", encoding="utf-8") as log:

        def log_and_say(event: AttemptEvent) -> None:
            match event:
                case ShownLine(line=line) if _NO_METRIC not in line.text:  # steps don't log metrics
                    text = masking.shown(f"{line.host} | {line.text}")
                    log.write(f"{text}\n")
                    log.flush()
                    making.say(f"{making.step.name} | {text}")
                case HostNote(text=text):
                    making.say(text)

        try:
            run_attempt(spec, closing(Hosts(cluster)), log_and_say, making.stop)
        except TrainingError as error:
            # The run folder is removed, so drop lines that refer to it.
            lines = [line for line in str(error).splitlines() if str(spec.run_dir) not in line]
            log.write(masking.shown("\n".join([*lines, ""])))
            return False
    return True


def _program(making: Making) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the section ``program`` of config.json, and the files of the snapshot. Raises StepError."""
    step = making.step
    _refuse_secret(step)
    placed, inputs = _inputs(making)
    files, flat = {**sources_of(step, making.root), **inputs}, [name for group in placed for name in group]
    section: dict[str, Any] = {"name": SCRIPT.name, "seal": "off", "script": None, "command": [], "env": dict(step.env)}
    section["outputs_limit"] = None  # a step writes only into its output folder
    if step.function:
        script = f"{CALL.replace('.', '/')}.py"
        text = _literal(call(step, flat, _OUT)).replace(json.dumps(_OUT)[1:-1], "{run}")
        return {**section, "script": script, "args": [text]}, {**files, script: making.root / script}
    if isinstance(step.command, str):
        args = {name: _literal(as_text(value)) for name, value in step.args.items()}
        own = {**section["env"], **args, "out": "{run}"}
        line = ["bash", "-euo", "pipefail", "-c", step.command, step.name]
        return {**section, "command": line, "args": [_literal(word) for word in flat], "env": own}, files
    argv = filled(step, _OUT, placed)
    words = [_literal(word).replace(_OUT, "{run}") for word in argv]
    if not is_python(argv[0]):
        return {**section, "command": argv[:1], "args": words[1:]}, files
    if len(words) < 2 or not words[1].endswith(".py"):
        raise StepError(
            f"step {step.name}: on: {step.on} takes python FILE.py …, a function, a line for bash or another program; "
            f"not python {' '.join(words[1:2])}"
        )
    return {**section, "script": words[1], "args": words[2:]}, files


def _refuse_secret(step: Step) -> None:
    """Refuse secret variables, which would be sent in a file. Raises StepError."""
    for variable, value in step.env.items():
        if any(secret in value for secret in step.secrets):
            raise StepError(
                f"step {step.name}: env.{variable} is secret, and with on: {step.on} it would be sent as a file",
                hint=f"++cluster.env.{variable}='${{oc.env:{variable}}}', which reaches the hosts' environment alone",
            )


def _inputs(making: Making) -> tuple[list[list[str]], dict[str, Path]]:
    """Return the snapshot names of the files of each entry of ``inputs``, and snapshot name → local path."""
    placed: list[list[str]] = []
    files: dict[str, Path] = {}
    for number, group in enumerate(making.inputs):
        steps_dir = making.out.parent.parent
        names = [_inside(path, making.root, steps_dir, f"{_INPUTS}/{number}/{at}") for at, path in enumerate(group)]
        files |= dict(zip(names, group, strict=True))
        placed.append(names)
    return placed, files


def _inside(path: Path, root: Path, steps_dir: Path, elsewhere: str) -> str:
    """Return the snapshot path of an input: its project path, unless it lies outside or is a step's output."""
    if path.is_relative_to(root) and not path.is_relative_to(steps_dir):
        return path.relative_to(root).as_posix()
    return f"{elsewhere}/{path.name}"


def _literal(text: str) -> str:
    """Escape {x}, which would otherwise be a placeholder."""
    return _BRACES.sub(lambda mark: f"{{{{{mark[1]}}}}}", text)
