"""The program that runs a user's script on one host, as the parent of torchrun; the node agent starts it.

It copies the snapshot, starts torchrun, records the metrics that the script leaves, and keeps the results.
``python -m trainers.script.start --config RUN_DIR/config.json --script PATH --node-rank N -- TORCHRUN…`` ends with the
script's exit code or signal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import paceline
from trainers.contract import run_folder, variables
from trainers.contract.beats import ENDED, hook_arguments
from trainers.core.errors import ConfigError
from trainers.observation import notes
from trainers.observation.input_record import record_inputs
from trainers.observation.processes import ObservedProgram, origin_of, project_of, zones_of
from trainers.observation.unkeyed import Places, Unkeyed, unkeyed_files, unkeyed_warnings
from trainers.script import command, rank_hook
from trainers.script import workdir as workdirs
from trainers.script.command import Paths, argv, program, require_program
from trainers.script.files import NOTE, WARNING, in_words, say, work_folder, write_json
from trainers.script.metrics.recorder import Recorder, earlier_log, keep_unrecorded, mlflow_variables
from trainers.script.outputs import Results
from trainers.script.resume import whole_since
from trainers.script.settings import ScriptConfig
from trainers.script.workdir import Node

_METRICS_SHOWN = 8
_STOPPED = 128 + signal.SIGTERM  # a shell's exit code for it
SENT = ".paceline"
"""The agent puts this file into a run folder that was sent to this host; one that all hosts share lacks it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    config: Path
    script: str  # relative to the snapshot
    node_rank: int
    data: tuple[str, ...]  # where the paths of ``program.data`` lie on this host
    log_dir: str | None  # for the output of a script without torchrun
    torchrun: tuple[str, ...]  # the command line of torchrun


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code. An error that the user can fix is one line."""
    try:
        return Attempt(_parsed(words)).run()
    except ConfigError as error:
        say(f"error: {error}")
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
    return 1


def _parsed(words: Sequence[str]) -> Options:
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="trainers.script.start", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="config.json in the run folder")
    parser.add_argument("--script", default="", help="the script, relative to the snapshot")
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--data", action="append", default=[], help="where {data}, {data2}, … lie on this host")
    parser.add_argument("--log-dir", help="without torchrun: where what the script prints lies")
    options = parser.parse_args(words[:at])
    if not words[at + 1 :]:
        parser.error("what starts the script is missing: -- PYTHON …/trainers/torchrun.py OPTIONS…")
    parsed = {**vars(options), "config": options.config.resolve(), "data": tuple(filter(None, options.data))}
    return Options(**parsed, torchrun=tuple(words[at + 1 :]))


class Attempt:
    """One attempt of a script on this host, from the copy of the snapshot to the results."""

    def __init__(self, options: Options) -> None:
        self.options, self.run_dir = options, options.config.parent
        self.config: dict[str, Any] = json.loads(options.config.read_text(encoding="utf-8"))
        names = {field.name for field in fields(ScriptConfig)}
        self.settings = ScriptConfig(**{k: value for k, value in self.config["program"].items() if k in names})
        self.node = Node(run_dir=self.run_dir, rank=options.node_rank, is_sent=(self.run_dir / SENT).exists())
        self.folder = work_folder(self.run_dir, options.node_rank)
        self.work, self.is_first = workdirs.copy_of(self.run_dir, options.node_rank), self.node.is_first
        self.snapshot, self.logged = self.run_dir / run_folder.CODE, self.folder / run_folder.LOGGED
        self.began_s = time.time()
        self.id = os.environ.get(variables.NODE, "").rpartition(":")[0]
        number = self.id.rsplit("-", 2)[-2:][0]  # the attempt in KEY-FOLDER-ATTEMPT-RANDOM
        self.number = int(number) if number.isdecimal() else 0
        self.was_stopped = False

    @property
    def name(self) -> str:
        return self.options.script or self.settings.command[0]

    def run(self) -> int:
        """Run the attempt; return the exit code, or minus the signal that ended it. Raises ConfigError, OSError."""
        paths = self.prepare()
        places = self.places()
        # each Python process of the script notes what it reads, and each rank shows itself to the agent
        hook = f"{Path(str(rank_hook.__file__)).read_text(encoding='utf-8')}\npublish({hook_arguments()})"
        is_noting = self.settings.seal != "off"
        observed = ObservedProgram(self.folder, zones_of(places), is_noting=is_noting, in_copy=True, first=hook)
        env = self.environment(paths, observed.site)
        # without torchrun its command line only names the Python to use
        without_torchrun = [self.options.torchrun[0], "-u"] if self.settings.script else []
        starter = self.options.torchrun if self.settings.torchrun else without_torchrun
        command = [*starter, *argv(self.settings, paths)]
        if self.settings.command:
            word = program(self.settings, paths)
            if (path := Path(word)).is_relative_to(self.work):
                path.chmod(path.stat().st_mode | 0o111)  # the snapshot holds contents and no modes
            require_program(word, env, self.work / self.settings.workdir)
        recorder = self.recorder(paths) if self.is_first else None
        code = self.follow(command, env, recorder)
        # an end with code 0 isn't always a good one: after a stop, or with unkeyed inputs, the run isn't finished
        read = observed.notes()
        unkeyed = unkeyed_files(read, places, ended_well=code == 0)
        if code:
            self.report_failure(code, unkeyed, paths, recorder)
            return code
        was_pruned = recorder is not None and recorder.was_pruned
        if self.was_stopped and not was_pruned:
            say(f"{NOTE}{self.name} ended with exit code 0, but was stopped: it does not count as finished")
            self.report_written_files()
            return _STOPPED
        for line in unkeyed_warnings(unkeyed):  # without WARNING: the controller warns of them
            say(line)
        if self.is_first and (warning := self.group_warning()):
            say(f"{WARNING}{warning}")
        if unkeyed and self.settings.seal == "fail":
            return 1
        if recorder is not None and was_pruned:
            metrics, step = recorder.metrics, recorder.metrics.step or 0
            write_json(self.run_dir / run_folder.PRUNED, {"step": step, "epoch": 0, "metrics": metrics.last})
            say(f"pruned at step {step}")
            # files that the script wrote stay: another attempt may resume from them
            if not workdirs.written_by_script(self.run_dir, self.options.node_rank):
                shutil.rmtree(self.folder, ignore_errors=True)
            return 0
        results = Results(self.node, self.settings, self.name, self.began_s)
        return results.keep(recorder, record_inputs(read, places=places), unkeyed)

    def report_failure(self, code: int, unkeyed: Sequence[Unkeyed], paths: Paths, recorder: Recorder | None) -> None:
        """Print what is known of a failure: how it ended, the files that the key lacks, and what the attempt left."""
        if code < 0 or not self.settings.torchrun:  # the ranks explain an exit code of torchrun's
            say(f"error: {'torchrun' if self.settings.torchrun else self.name} {how_it_ended(code)}")
        for line in unkeyed_warnings(unkeyed):
            say(f"{WARNING}{line}")
        self.report_written_files()
        if paths.resume and recorder is not None and not recorder.recorded:
            # it has saved no checkpoint (other files may come before one is read), so the given one may be at fault
            newest = workdirs.checkpoints_to_resume(self.settings, self.run_dir)
            if newest == paths.resume and not any(whole_since(path) > self.began_s * 1e9 for path in newest.values()):
                self.warn_of_checkpoint(paths)

    def prepare(self) -> Paths:
        """Lay out the working directory and the folders that the script is given. Raises OSError."""
        resume = workdirs.checkpoints_to_resume(self.settings, self.run_dir)
        if not resume:  # this attempt starts anew
            rank, resumes = self.options.node_rank, self.settings.resumes
            if names := workdirs.set_aside(self.run_dir, rank, self.before, with_checkpoints=resumes):
                say(f"{NOTE}what earlier attempts left is kept in {self.node.shown(self.before)}: {in_words(names)}")
        if self.is_first and resume:
            shown = [
                f"{path.relative_to(self.work).as_posix()}, which {self.name} looks for by itself"
                if name == workdirs.BY_ITSELF
                else f"{{{name}}} is {self.node.shown(path)}"
                for name, path in resume.items()
            ]
            say(f"{NOTE}goes on from a checkpoint: {', '.join(shown)}")
        for folder in (self.run_dir / run_folder.CHECKPOINTS, self.run_dir / run_folder.OUTPUTS, self.folder):
            folder.mkdir(exist_ok=True, parents=True)
        if self.is_first:
            workdirs.keep_looked_for(self.run_dir)
        for name in ("lib", "mlflow", notes.FOLDER, "site"):  # made anew for each attempt
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        others = workdirs.take_carried(self.run_dir, self.options.node_rank) if self.node.is_sent else {}
        # the last attempt may have been killed before it recorded all metrics: the recorder finds them in this file
        if self.is_first:
            keep_unrecorded(self.run_dir)
        with suppress(FileNotFoundError):
            self.logged.replace(earlier_log(self.logged))
        work = workdirs.lay_out(self.run_dir, self.options.node_rank, others=others)
        (work / self.settings.workdir).mkdir(parents=True, exist_ok=True)
        return Paths(
            run_dir=self.run_dir,
            work=self.work,
            script=self.options.script,
            data=self.options.data,
            seed=int(self.config.get("seed", 0)),
            resume=resume,
        )

    @property
    def before(self) -> Path:
        """Folder for files that earlier attempts left and this one must not find."""
        return self.run_dir / run_folder.ATTEMPTS / str(self.number) / "before"

    def report_written_files(self) -> None:
        paths = workdirs.written_by_script(self.run_dir, self.options.node_rank)
        names = [os.path.relpath(path, self.work) for path in paths]
        if names:
            place = self.node.place(self.work, run_folder.WORK)
            say(f"{NOTE}wrote in its working directory: {in_words(names)}; now in {place}")

    def warn_of_checkpoint(self, paths: Paths) -> None:
        """Warn that the attempt failed before it had logged and saved anything."""
        checkpoints = " and ".join(self.node.shown(path) for path in paths.resume.values())
        if workdirs.BY_ITSELF in paths.resume:
            how = f"beside {checkpoints}; "
        else:
            another = "if it can't read that, program.resume_pattern='GLOB' names another checkpoint"
            how = f"and had to go on from {checkpoints}; {another}, and "
        start_over = "program.resume_pattern=none starts over (what is there is kept)"
        say(f"{WARNING}{self.name} ended before it had logged or saved anything, {how}{start_over}")

    def places(self) -> Places:
        return Places(
            run_dir=self.run_dir,
            snapshot=self.snapshot,
            work=self.work,
            data=self.options.data,
            project=project_of(self.config, self.run_dir),
            origin=origin_of(self.config, self.options.script),
            bytewise=self.settings.inputs,
            script_folder=os.path.dirname(self.options.script),  # noqa: PTH120
        )

    def environment(self, paths: Paths, site: Path) -> dict[str, str]:
        """Return the ranks' variables: the copy replaces the snapshot on PYTHONPATH. Raises OSError."""
        library = self.folder / "lib"
        library.mkdir()
        shutil.copyfile(paceline.__file__, library / "paceline.py")
        of_program = command.variables(self.settings, paths)
        entries = [*os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        entries += of_program.pop("PYTHONPATH", "").split(os.pathsep)
        kept = [entry for entry in entries if entry and Path(entry).resolve() != self.snapshot]
        return {
            **mlflow_variables(self.logged),
            **os.environ,
            **of_program,
            "PYTHONPATH": os.pathsep.join([str(site), str(library), str(self.work), *kept]),
            variables.RUN_DIR: str(self.run_dir),
            variables.OUTPUTS: str(paths.outputs),
            variables.LOG: str(self.logged),
        }

    @property
    def log_dir(self) -> str | None:
        """torchrun's folder with a file per rank; the same place without torchrun."""
        logs = (word.partition("=")[2] for word in self.options.torchrun if word.startswith("--log-dir="))
        return next(logs, self.options.log_dir)

    def group_warning(self) -> str:
        """Return a warning if the ranks of this host never had a process group although there are several; else ''.
        Then each rank has done the whole work for itself, as if it were alone.
        """
        options = dict(word.lstrip("-").partition("=")[::2] for word in self.options.torchrun)
        ranks, nodes = options.get("nproc-per-node", ""), options.get("nnodes", "1")
        if not (self.settings.torchrun and self.log_dir and ranks.isdecimal() and nodes.isdecimal()):
            return ""
        world = int(ranks) * int(nodes)
        ended = Path(self.log_dir).glob(f"*/attempt_*/*/{ENDED}")
        without_group = sum(bool(path.stat().st_size) for path in ended)  # rank_hook has written a byte for these
        if world == 1 or without_group != int(ranks):
            return ""
        return (
            f"no process group was ever made in {'rank 0' if ranks == '1' else f'ranks 0 to {int(ranks) - 1}'} of "
            f"{world}: each rank ran all of {self.name} and wrote the same files; cluster.nproc_per_node=1 on one host "
            "starts it once"
        )

    def recorder(self, paths: Paths) -> Recorder:
        log_dir = self.log_dir
        return Recorder(
            self.settings,
            self.run_dir,
            logged=self.logged,
            log_dir=Path(log_dir) if log_dir else None,
            attempt=self.id,
            resumes=bool(paths.resume),
            aside=self.before / run_folder.METRICS,
            say=lambda rows: say(
                f"{NOTE}metrics.jsonl begins anew: what earlier attempts had logged ({rows}) is kept in "
                f"{self.node.shown(self.before)}/metrics.jsonl"
            ),
        )

    def follow(self, command: list[str], env: dict[str, str], recorder: Recorder | None) -> int:
        """Run the command to its end, while its metrics are recorded; return its exit code, negative for a signal."""
        log_dir = None if self.settings.torchrun or self.log_dir is None else Path(self.log_dir)
        child = Child(command, self.work / self.settings.workdir, env, log_dir)
        code = child.wait(recorder.look if recorder is not None else lambda: None)
        self.was_stopped = child.was_stopped
        if recorder is not None:
            recorder.look(last=True)
            if code == 0:
                self.record_printed(recorder)
            for note in recorder.notes(ended_well=code == 0):
                say(f"{WARNING}{note}")
        return code

    def record_printed(self, recorder: Recorder) -> None:
        """Record the metrics that a script printed, if it reported none, and print a note of them. Raises OSError."""
        names, earlier_rows = recorder.read_printed()
        if not names:
            return
        shown = ", ".join(names[:_METRICS_SHOWN]) + (", …" if len(names) > _METRICS_SHOWN else "")
        say(
            f"{NOTE}it reported no metric, so those that it printed are recorded: {shown} (program.metrics=off leaves "
            "them)"
        )
        if earlier_rows:
            rows = "1 row" if earlier_rows == 1 else f"{earlier_rows:,} rows"
            say(f"{NOTE}{rows} that earlier attempts printed {'stands' if earlier_rows == 1 else 'stand'} before them")
        elif self.number > 1:
            say(f"{NOTE}what earlier attempts printed stands in their logs alone; paceline.log keeps it")


_LOOK_S = 0.5


class Child:
    """A process in this process's group. SIGTERM and SIGINT are passed on to it; ``was_stopped``: one has come."""

    def __init__(self, command: Sequence[str], workdir: Path, env: dict[str, str], log_dir: Path | None) -> None:
        """Start the process. ``log_dir``: for its output; None: torchrun writes that. Raises OSError."""
        self._process: subprocess.Popen[bytes] | None = None
        self.was_stopped = False
        # the agent signals every process of a run, other senders only this one
        signal.signal(signal.SIGTERM, self._pass_on)
        signal.signal(signal.SIGINT, self._pass_on)
        with ExitStack() as logs:
            stdout = stderr = None
            if log_dir is not None:
                folder = log_dir / "alone" / "attempt_0" / "0"
                folder.mkdir(parents=True)
                stdout, stderr = (logs.enter_context((folder / f"std{name}.log").open("ab")) for name in ("out", "err"))
            self._process = subprocess.Popen(
                command, cwd=workdir, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )

    def wait(self, look: Callable[[], None]) -> int:
        """Return the exit code (negative: a signal). ``look`` is called twice a second; its error ends the process."""
        assert self._process is not None
        try:
            while True:
                try:
                    return self._process.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    look()
        except BaseException:
            self._process.terminate()
            raise

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.was_stopped = True
        if self._process is not None:
            self._process.send_signal(number)


def how_it_ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"


def end_as(code: int) -> NoReturn:
    """End with the child's exit code, or (negative) by the signal that ended the child, for the agent to see."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    end_as(main(sys.argv[1:]))
