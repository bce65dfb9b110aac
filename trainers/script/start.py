"""A user's script on one host: its own copy of the snapshot, torchrun as a child, metrics and results.

``python -m trainers.script.start --config RUN_DIR/config.json --script REL --node-rank N --data DIR -- TORCHRUN…``
ends as torchrun does. Standard library only: torch is loaded by the ranks alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from trainers.contract import run_folder, variables
from trainers.contract.beats import ENDED, hook_arguments
from trainers.core import dependencies
from trainers.core.dependencies import Observed, Places, Unkeyed
from trainers.core.fields import ConfigError
from trainers.script import command, outliving, rank_hook
from trainers.script import workdir as workdirs
from trainers.script.command import Paths, argv, program
from trainers.script.files import write_json, write_sealed
from trainers.script.outputs import (
    LEADS_OUT,
    NO_FILES,
    WORKDIR,
    Gathered,
    MissingOutputsError,
    gather,
    left,
    unreadable,
)
from trainers.script.recorder import Recorder, earlier_log, keep_unrecorded, mlflow_variables
from trainers.script.resume import whole_since
from trainers.script.settings import ScriptConfig

WARNING, NOTE = "WARNING: ", "note: "
"""Prefixes of lines that the user sees at once, and not only in the host's log."""
_SHOWN = 8
_LOOK_S = 0.5
SENT = ".paceline"
"""The agent puts this file into a run folder that was sent to this host; one that all hosts share lacks it."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The parsed command line of this module: what is started, and where."""

    config: Path
    script: str
    node_rank: int
    data: tuple[str, ...]
    log_dir: str | None
    torchrun: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code. An error that the user can mend is one line."""
    try:
        return Attempt(_parsed(words)).run()
    except ConfigError as error:
        say(f"error: {error}")
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
    return 1


def say(text: str) -> None:
    """Print a line of Paceline's own among those of the ranks."""
    print(f"paceline: {text}", flush=True)


def _parsed(words: Sequence[str]) -> Started:
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
    return Started(**parsed, torchrun=tuple(words[at + 1 :]))


class Attempt:
    """One start of the script on this host."""

    def __init__(self, started: Started) -> None:
        """Raises ConfigError, OSError."""
        self.started, self.run_dir = started, started.config.parent
        self.config: dict[str, Any] = json.loads(started.config.read_text(encoding="utf-8"))
        known = {field.name for field in fields(ScriptConfig)}
        self.settings = ScriptConfig(**{k: value for k, value in self.config["program"].items() if k in known})
        self.folder = workdirs.folder_of(self.run_dir, started.node_rank)
        self.snapshot, self.work = self.run_dir / run_folder.CODE, self.folder / run_folder.WORK_COPY
        self.logged = self.folder / run_folder.LOGGED
        self.is_first = started.node_rank == 0
        self.is_sent = (self.run_dir / SENT).exists()
        self.begun = time.time()
        self.id = os.environ.get(variables.NODE, "").rpartition(":")[0]
        number = self.id.rsplit("-", 2)[-2:][0]  # of KEY-ATTEMPT-RANDOM
        self.number = int(number) if number.isdecimal() else 0
        self.child: subprocess.Popen[bytes] | None = None
        self.is_stopped = False

    @property
    def name(self) -> str:
        """The name that the user gave it."""
        return self.started.script or self.settings.command[0]

    def run(self) -> int:
        """Run the attempt, from the copy of the snapshot to the results. Raises ConfigError, OSError."""
        paths = self.prepare()
        places = self.places()
        hook = f"{Path(str(rank_hook.__file__)).read_text(encoding='utf-8')}\npublish({hook_arguments()})"
        watches = self.settings.seal != "off"
        observed = Observed(self.folder, places.zones, watches=watches, in_copy=True, first=hook)
        env = self.environment(paths, observed.site)
        command = [*self.starter(), *argv(self.settings, paths)]
        if self.settings.command:
            make_executable(Path(program(self.settings, paths)), self.work)
            require_program(program(self.settings, paths), env, self.work / self.settings.workdir)
        recorder = self.recorder(paths) if self.is_first else None
        code = self.follow(command, env, recorder)
        seen = observed.seen()
        unkeyed = seen.unkeyed(places, ended_well=code == 0)
        if code < 0 or (code and not self.settings.torchrun):  # the ranks explain an exit code of torchrun's
            say(f"error: {'torchrun' if self.settings.torchrun else self.name} {how_it_ended(code)}")
        for line in dependencies.message(unkeyed):  # after a good end the controller warns
            say(line if code == 0 else f"{WARNING}{line}")
        if code == 0 and self.is_first and (ranks := self.group_warning()):
            say(f"{WARNING}{ranks}")
        if code:
            self.report_written_files()
        if code and paths.resume and recorder is not None and not recorder.recorded and not self.saved_anything(paths):
            say(f"{WARNING}{self.checkpoint_warning(paths)}")
        if code == 0 and unkeyed and self.settings.seal == "fail":
            return 1
        if code == 0 and recorder is not None and recorder.stopping:
            self.note_pruned(recorder)
            if not workdirs.written_by_script(self.run_dir, self.started.node_rank):  # else it may resume from them
                shutil.rmtree(self.folder, ignore_errors=True)
            return 0
        if code == 0:
            code = self.finish(paths, recorder, seen.record(places=places), unkeyed)
        return code

    def prepare(self) -> Paths:
        """Lay out the working directory and the folders that the script is given. Raises OSError."""
        resume = workdirs.checkpoints_to_resume(self.settings, self.run_dir)
        if not resume:
            self.set_aside()
        if self.is_first and resume:
            say(f"{NOTE}goes on from a checkpoint: {', '.join(map(self.shown_checkpoint, resume.items()))}")
        for folder in (self.run_dir / run_folder.CHECKPOINTS, self.run_dir / run_folder.OUTPUTS, self.folder):
            folder.mkdir(exist_ok=True, parents=True)
        if self.is_first:
            workdirs.keep_looked_for(self.run_dir)
        for name in ("lib", "mlflow", dependencies.NOTES, "site"):
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        besides = workdirs.take_carried(self.run_dir, self.started.node_rank) if self.is_sent else {}
        if self.is_first:
            keep_unrecorded(self.run_dir)
        with suppress(FileNotFoundError):
            self.logged.replace(earlier_log(self.logged))
        work = workdirs.lay_out(self.run_dir, self.started.node_rank, besides=besides)
        (work / self.settings.workdir).mkdir(parents=True, exist_ok=True)
        return Paths(
            run_dir=self.run_dir,
            work=self.work,
            script=self.started.script,
            data=self.started.data,
            seed=int(self.config.get("seed", 0)),
            resume=resume,
        )

    def set_aside(self) -> None:
        """Move the files of earlier attempts away, because this one starts anew; they are kept for the user."""
        folder, rank = self.before, self.started.node_rank
        names = workdirs.set_aside(self.run_dir, rank, folder, with_checkpoints=self.settings.resumes)
        if names:
            say(f"{NOTE}what earlier attempts left is kept in {self.shown(folder)}: {workdirs.in_words(names)}")

    @property
    def before(self) -> Path:
        """The folder for files of earlier attempts that this one replaces."""
        return self.run_dir / run_folder.ATTEMPTS / str(self.number) / "before"

    def shown_checkpoint(self, item: tuple[str, Path]) -> str:
        """Return ``{resume} is checkpoints/last.pt``, or a checkpoint of the working directory by its name there."""
        name, path = item
        if name == workdirs.BY_ITSELF:
            return f"{path.relative_to(self.work).as_posix()}, which {self.name} looks for by itself"
        return f"{{{name}}} is {self.shown(path)}"

    def shown(self, path: Path) -> str:
        """Return the path relative to the run folder."""
        return path.relative_to(self.run_dir).as_posix()

    def saved_anything(self, paths: Paths) -> bool:
        """Whether this attempt has saved a checkpoint; it may write settings and logs before it reads one."""
        newest = workdirs.checkpoints_to_resume(self.settings, self.run_dir)
        return newest != paths.resume or any(whole_since(path) > self.begun * 1e9 for path in newest.values())

    def report_written_files(self) -> None:
        """After a failure: print where the files are that it wrote in its working directory."""
        paths = workdirs.written_by_script(self.run_dir, self.started.node_rank)
        names = [os.path.relpath(path, self.work) for path in paths]
        if names:
            place = (
                self.shown(self.work) if self.is_first or not self.is_sent else f"nodes/{self.started.node_rank}/work"
            )
            say(f"{NOTE}wrote in its working directory: {workdirs.in_words(names)}; now in {place}")

    def checkpoint_warning(self, paths: Paths) -> str:
        """Return the warning about an attempt that failed before it had logged and saved anything."""
        given = " and ".join(self.shown(path) for path in paths.resume.values())
        if workdirs.BY_ITSELF in paths.resume:
            start_over = "program.resume_pattern=none starts over (what is there is kept)"
            return f"{self.name} ended before it had logged or saved anything, beside {given}; {start_over}"
        return (
            f"{self.name} ended before it had logged or saved anything, and had to go on from {given}; if it "
            "can't read that, program.resume_pattern='GLOB' names another checkpoint, and program.resume_pattern=none "
            "starts over (what is there is kept)"
        )

    @property
    def is_later_attempt(self) -> bool:
        """True if another attempt of the run came before."""
        return self.number > 1

    def places(self) -> Places:
        """Return the folders in which files may lie that the key lacks."""
        return Places(
            run_dir=self.run_dir,
            snapshot=self.snapshot,
            work=self.work,
            data=self.started.data,
            project=dependencies.project_of(self.config, self.run_dir),
            origin=dependencies.origin_of(self.config, self.started.script),
            whole=self.settings.inputs,
            folder=os.path.dirname(self.started.script),  # noqa: PTH120
        )

    def environment(self, paths: Paths, site: Path) -> dict[str, str]:
        """Return the ranks' variables: the copy replaces the snapshot on PYTHONPATH. Raises OSError."""
        library = self.folder / "lib"
        library.mkdir()
        shutil.copyfile(paceline.__file__, library / "paceline.py")
        own = command.variables(self.settings, paths)
        behind = os.environ.get("PYTHONPATH", "").split(os.pathsep) + own.pop("PYTHONPATH", "").split(os.pathsep)
        kept = [entry for entry in behind if entry and Path(entry).resolve() != self.snapshot]
        return {
            **mlflow_variables(self.logged),
            **os.environ,
            **own,
            "PYTHONPATH": os.pathsep.join([str(site), str(library), str(self.work), *kept]),
            variables.RUN_DIR: str(self.run_dir),
            variables.OUTPUTS: str(paths.outputs),
            variables.LOG: str(self.logged),
        }

    def starter(self) -> list[str]:
        """Return the words in front of the script: torchrun with its options, or Python alone; none for a program."""
        if self.settings.torchrun:
            return [*self.started.torchrun]
        return [self.started.torchrun[0], "-u"] if self.settings.script else []

    @property
    def log_dir(self) -> str | None:
        """torchrun's folder with a file per rank; the same place without torchrun."""
        logs = (word.partition("=")[2] for word in self.started.torchrun if word.startswith("--log-dir="))
        return next(logs, self.started.log_dir)

    def group_warning(self) -> str:
        """Return the warning that several ranks have ended and none of this host ever had a process group; else ''."""
        options = dict(word.lstrip("-").partition("=")[::2] for word in self.started.torchrun)
        ranks, nodes = options.get("nproc-per-node", ""), options.get("nnodes", "1")
        if not (self.settings.torchrun and self.log_dir and ranks.isdecimal() and nodes.isdecimal()):
            return ""
        world = int(ranks) * int(nodes)
        ended = Path(self.log_dir).glob(f"*/attempt_*/*/{ENDED}")
        without_group = sum(bool(path.stat().st_size) for path in ended)
        if world == 1 or without_group != int(ranks):
            return ""
        return (
            f"no process group was ever made in {'rank 0' if ranks == '1' else f'ranks 0 to {int(ranks) - 1}'} of "
            f"{world}: each rank ran all of {self.name} and wrote the same files; cluster.nproc_per_node=1 on one host "
            "starts it once"
        )

    def recorder(self, paths: Paths) -> Recorder:
        """Start to record on node 0. Raises OSError."""
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
                f"{self.shown(self.before)}/metrics.jsonl"
            ),
        )

    def follow(self, command: list[str], env: dict[str, str], recorder: Recorder | None) -> int:
        """Run torchrun in this process's group, and record until its end; return its exit code. Raises OSError."""
        signal.signal(signal.SIGTERM, self.pass_on)
        signal.signal(signal.SIGINT, self.pass_on)
        workdir = self.work / self.settings.workdir
        with ExitStack() as logs:
            streams = {} if self.settings.torchrun or self.log_dir is None else rank_logs(Path(self.log_dir), logs)
            self.child = subprocess.Popen(command, cwd=workdir, env=env, stdin=subprocess.DEVNULL, **streams)
        try:
            code = self.wait(self.child, recorder)
        except BaseException:  # a full disk, or a folder that was removed
            self.child.terminate()
            raise
        if code == 0 and not self.is_stopped:
            self.wait_for_outliving(recorder)
        if recorder is not None:
            recorder.look(last=True)
            names, before = recorder.read_printed() if code == 0 else ([], 0)
            if names:
                say(
                    f"{NOTE}it reported no metric, so those that it printed are recorded: {', '.join(names[:_SHOWN])}"
                    f"{', …' if len(names) > _SHOWN else ''} (program.metrics=off leaves them)"
                )
                if before:
                    rows = (
                        "1 row that earlier attempts printed stands"
                        if before == 1
                        else (f"{before:,} rows that earlier attempts printed stand")
                    )
                    say(f"{NOTE}{rows} before them")
                elif self.is_later_attempt:
                    say(f"{NOTE}what earlier attempts printed stands in their logs alone; paceline.log keeps it")
            for note in recorder.notes(ended_well=code == 0):
                say(f"{WARNING}{note}")
        return code

    @staticmethod
    def wait(child: subprocess.Popen[bytes], recorder: Recorder | None) -> int:
        """Return the exit code; until then rows are recorded as they come. Raises OSError."""
        while True:
            try:
                return child.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                if recorder is not None:
                    recorder.look()

    def wait_for_outliving(self, recorder: Recorder | None) -> None:
        """Wait for processes of the script that may still write its outputs. Raises OSError."""
        ended = outliving.wait_and_end(
            {variables.NODE: os.environ.get(variables.NODE, ""), variables.RUN_DIR: str(self.run_dir)},
            look=lambda: None if recorder is None else recorder.look(),
            say=lambda text: say(f"{NOTE}{text}"),
            is_stopped=lambda: self.is_stopped,
        )
        if ended:
            say(f"{WARNING}went on after the script's end, and was ended: {ended}")  # the agent reads this line

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal to torchrun: the agent signals every process of a run, other senders only this one."""
        self.is_stopped = True
        if self.child is not None:
            self.child.send_signal(number)

    def note_pruned(self, recorder: Recorder) -> None:
        """Write the end of a pruned run. Raises OSError."""
        metrics = recorder.metrics
        write_json(self.run_dir / run_folder.PRUNED, {"step": metrics.step or 0, "epoch": 0, "metrics": metrics.last})
        say(f"pruned at step {metrics.step or 0}")

    def finish(
        self, paths: Paths, recorder: Recorder | None, record: Mapping[str, Any], unkeyed: Sequence[Unkeyed]
    ) -> int:
        """Gather this node's outputs and write node 0's results, summary.json last; return the exit code.

        Args:
            record: what the script's processes have read (``Seen.record``), taken before files are moved away.

        Raises:
            OSError: a file can't be moved or written.
        """
        rank = self.started.node_rank
        outputs = (
            paths.outputs
            if self.is_first or self.is_sent
            else self.run_dir / run_folder.NODES / str(rank) / run_folder.OUTPUTS
        )
        if outputs.is_symlink() or (outputs.exists() and not outputs.is_dir()):
            what = "a link" if outputs.is_symlink() else "a file"
            say(
                f"error: {self.name} has put {what} in the place of its folder {{run}}, {outputs}; it is to write there"
            )
            return 1
        try:
            gathered = gather(
                self.settings.outputs,
                workdir=self.work / self.settings.workdir,
                wrote=workdirs.written_by_script(self.run_dir, rank),
                outputs=outputs,
                limit_bytes=self.settings.outputs_limit_bytes,
                required=self.is_first,
                lost=[self.run_dir / name for name in unreadable(self.run_dir, outputs)],
            )
        except MissingOutputsError as error:
            say(f"error: {self.name} ended with exit code 0 without {error}")
            return 1
        in_work = unreadable(self.run_dir, self.folder / run_folder.ABOVE)
        unkept = {name: why for name, why in in_work.items() if why != LEADS_OUT}  # a link there is no result
        unkept |= unreadable(self.run_dir, outputs, self.run_dir / run_folder.CHECKPOINTS)
        if unkept and not self.is_sent:  # else the controller warns when it fetches the files
            names = workdirs.in_words([f"{name} ({why})" for name, why in unkept.items()])
            say(f"{WARNING}not kept with what the script wrote: {names}")
        self.report_gathered(gathered, outputs)
        if recorder is not None:
            self.write_results(recorder, gathered, record, unkeyed, unkept)
        elif self.settings.seal != "off":
            outputs.parent.mkdir(parents=True, exist_ok=True)
            full_record = {**record, "unkeyed": dependencies.as_json(unkeyed)}
            write_sealed(outputs.parent / run_folder.DEPENDENCIES, full_record)
        if gathered.over or self.is_sent:  # what is above the limit stays; the agent fetches by the folder's given.json
            return 0
        if any(name in in_work and why not in NO_FILES for name, why in unkept.items()):
            say(f"{WARNING}what can't be read stays on this host in {self.keep_on_host() / run_folder.WORK_COPY}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # another node's folder lies there
                self.folder.parent.rmdir()
        return 0

    def report_gathered(self, gathered: Gathered, outputs: Path) -> None:
        """Print which files of the working directory were kept, renamed, or stay on this host because of the limit."""
        place = self.shown(outputs) if self.is_first or not self.is_sent else f"nodes/{self.started.node_rank}/outputs"
        if gathered.renamed:
            names = workdirs.in_words([f"{name} is {place}/{target}" for name, target in gathered.renamed.items()])
            say(f"{WARNING}files of the working directory whose place another file of the run has: {names}")
        if gathered.besides:
            what = workdirs.in_words([*gathered.besides], sum(gathered.besides.values()))
            say(f"{NOTE}wrote in its working directory: {what}; kept in {place}/{WORKDIR}")
        if gathered.over:
            what = workdirs.in_words([*gathered.over], sum(gathered.over.values()))
            left = self.keep_on_host()
            gib = self.settings.outputs_limit or 0.0
            say(
                f"{WARNING}wrote in its working directory more than program.outputs_limit={gib:g} GiB: {what}; they "
                f"stay on this host in {left / run_folder.WORK_COPY}; program.outputs=['GLOB'] or a higher limit "
                "bring such files back"
            )

    def keep_on_host(self) -> Path:
        """Move the working directory, whose files can't all be fetched, to its final place. Raises OSError."""
        final_place = self.folder.with_name(f"{self.folder.name}-left")
        shutil.rmtree(final_place, ignore_errors=True)
        self.folder.replace(final_place)
        return final_place

    def write_results(
        self,
        recorder: Recorder,
        gathered: Gathered,
        record: Mapping[str, Any],
        unkeyed: Sequence[Unkeyed],
        unkept: Mapping[str, str],
    ) -> None:
        """Write node 0's results. Raises OSError."""
        if self.settings.seal != "off" and (outside := [*record["files"]]):
            say(f"{WARNING}{dependencies.outside(outside)}")
        write_sealed(self.run_dir / run_folder.DEPENDENCIES, record)
        metrics = recorder.metrics
        hashes = {output.path: {"sha256": output.sha256, "bytes": output.size_bytes} for output in gathered.outputs}
        write_json(self.run_dir / run_folder.OUTPUT_DIGESTS, hashes)
        summary = {
            "steps": metrics.step,
            "metrics": metrics.last,
            **({"nonfinite": nonfinite} if (nonfinite := recorder.left_out()) else {}),
            "unkeyed": dependencies.as_json(unkeyed),
            "duration_s": round(time.time() - self.begun, 3),
            "outputs_sha256": left(self.run_dir, unkept),
            **({"not_kept": {workdirs.printed(name): why for name, why in unkept.items()}} if unkept else {}),
        }
        write_sealed(self.run_dir / run_folder.SUMMARY, summary)


def rank_logs(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open files at the place where torchrun would put rank 0's output. Raises OSError."""
    place = folder / "alone" / "attempt_0" / "0"
    place.mkdir(parents=True)
    return {name: stack.enter_context((place / f"{name}.log").open("ab")) for name in ("stdout", "stderr")}


def make_executable(path: Path, work: Path) -> None:
    """Make a file of the copy executable, because the snapshot holds contents and no modes. Raises OSError."""
    if path.is_relative_to(work):
        path.chmod(path.stat().st_mode | 0o111)


def require_program(word: str, env: Mapping[str, str], workdir: Path) -> None:
    """Check that the program can be started: torchrun's traceback of twenty lines wouldn't name a missing one.

    Raises:
        ConfigError: there is no such file, or no such program in PATH.
    """
    path = env.get("PATH", os.defpath)
    folders = os.pathsep.join(str(workdir / entry) for entry in path.split(os.pathsep))
    program = workdir / word if "/" in word else shutil.which(word, path=folders)
    if program is None:
        raise ConfigError(
            f"program.command=[{word}]: no {word} in PATH={path}; install it on this host, or set program.env.PATH "
            f"(a file of the project is named with a slash: ./{word})"
        )
    if not os.access(program, os.X_OK) or not Path(program).is_file():
        raise ConfigError(
            f"program.command=[{word}]: {program} is no program here (an executable file); install it on this host, or "
            "name a file of the project"
        )
    why = command.why_not_executable(Path(program), folders)
    if why:
        raise ConfigError(f"program.command=[{word}]: this host can't start {program}: {why}")


def how_it_ended(code: int) -> str:
    """Describe the exit code of a child (negative: the signal that ended it)."""
    if code > 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def end_as(code: int) -> None:
    """End with an exit code, or by the signal that ended the child (negative), for the agent to see."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    end_as(main(sys.argv[1:]))
