"""Find the container image of the ranks on this host, and start a run's container (podman, docker, apptainer).

A container shares the host's network, shared memory and process ids, so torchrun in it behaves as without one. The
ranks' variables, which may be secrets, reach it over standard input, because engines write their options to the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainers.contract import variables
from trainers.contract.host_facts import Container

from ..node import sha256_of_rest
from ..requests import NodeStart
from ..running.processes import LINUX, find_processes, remove_container, stat_fields
from ..wire import FIX_HERE, FIX_THERE, Json, read_json, write_json
from . import software

ENGINES = ("podman", "docker")
OF_FILES = ("apptainer", "singularity")  # engines whose images are files
_NOT_STARTED = (125, 126, 127)  # exit codes of an engine that could not start the program
_END_S = 20.0  # limit for a command of the engine
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
_ENTER = (
    "import json,os,sys;e=json.load(sys.stdin);os.dup2(os.open(os.devnull,0),0);"
    "os.environ.update(e);os.execv(sys.argv[1],sys.argv[1:])"
)
"""Python code that a container runs first: it reads variables as JSON from stdin, then executes its arguments."""


class Login(NamedTuple):
    """What a container has in common with the login that starts it."""

    uid: int
    gid: int
    ulimits: dict[str, str]  # limit → soft:hard, as podman and docker take it
    has_infiniband: bool


# --------------------------------------------------------------------------------------------------- the command (pure)
def command(container: Container, program: list[str], *, cwd: str, mounts: dict[str, bool], login: Login) -> list[str]:
    """Return the engine's command for ``program``, pure. ``mounts``: path → whether the container may write there."""
    bind_mounts = [
        f"type=bind,{csv_field(f'source={path}')},{csv_field(f'destination={path}')}{'' if is_writable else ',ro'}"
        for path, is_writable in sorted(mounts.items())
    ]
    engine, image, gpus = container.engine, container.image, container.gpus
    kind = os.path.basename(engine)
    if kind in OF_FILES:
        options = [*(["--nv"] if gpus else []), "--no-home", "--cleanenv"]
        options += [word for mount in bind_mounts for word in ("--mount", mount)]
        return [engine, "exec", *options, "--pwd", cwd, image, *program]
    options = ["--rm", "--interactive", "--name", container.name, "--network=host", "--ipc=host", "--pid=host"]
    # the agent keeps the output itself; SELinux's labels would forbid the mounts
    options += ["--log-driver=none", "--security-opt=label=disable", f"--user={login.uid}:{login.gid}"]
    options += [f"--ulimit={limit}={value}" for limit, value in login.ulimits.items()]
    if kind == "podman":
        options += ["--userns=keep-id"] if login.uid else []  # the login owns the files that ranks write
        options += ["--device=nvidia.com/gpu=all"] if gpus else []
    else:
        options += ["--gpus=all"] if gpus else []
    options += ["--device=/dev/infiniband"] if login.has_infiniband else []
    options += [f"--mount={mount}" for mount in bind_mounts]
    return [engine, "run", *options, f"--workdir={cwd}", f"--entrypoint={program[0]}", image, *program[1:]]


def csv_field(field: str) -> str:
    """Quote a part of a mount option, which engines read as a line of CSV."""
    return '"' + field.replace('"', '""') + '"' if re.search('[",\n]', field) else field


def this_login() -> Login:
    with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
        most = int(file.read())

    def limit(which: int) -> str:
        soft, hard = resource.getrlimit(which)
        if which == resource.RLIMIT_NPROC:  # podman's own limit is at most pid_max, and a container's can't be larger
            is_unlimited = resource.RLIM_INFINITY in (soft, hard)
            soft, hard = (most, most) if is_unlimited else (min(soft, most), min(hard, most))
        return ":".join("-1" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard))

    ulimits = {name: limit(which) for name, which in _LIMITS.items()}
    return Login(os.getuid(), os.getgid(), ulimits, os.path.isdir("/dev/infiniband"))


# ------------------------------------------------------------------------------------------------------------ the image
def find_image(name: str, workdir: str, *, gpus: bool, mounts: Iterable[str]) -> Container:
    """Return the container of an image: a name that podman or docker knows, or apptainer's file. Raises SystemExit."""
    if not LINUX:
        raise SystemExit(f"is no Linux, and the ranks' container shares its process ids (cluster.container={name})")
    if name.endswith(".sif"):
        return Container(engines_here(OF_FILES, name)[0], name, file_digest(name, workdir), gpus, tuple(mounts))
    engines, errors = engines_here(ENGINES, name), []
    for engine in engines:
        done = output_of([engine, "image", "inspect", "--format", "{{.Id}}", name])
        if done.returncode == 0:
            digest = f"sha256:{done.stdout.strip().rpartition(':')[2]}"
            return Container(engine, digest, digest, gpus, tuple(mounts))
        errors.append(f"{os.path.basename(engine)} says: {last_line(done.stderr)}")
    first = os.path.basename(engines[0])
    fix = f"{FIX_THERE}{first} pull {name}"
    if name.startswith("localhost/"):  # built on one computer, and in no registry
        fix = f"{FIX_HERE}{first} save {name} | ssh HOST {first} load"
    raise SystemExit(f"has no image {name} (cluster.container); {'; '.join(errors)}{fix}")


def engines_here(names: tuple[str, ...], image: str) -> list[str]:
    """Return the paths of the installed engines among ``names``. Raises SystemExit: there is none."""
    engines = [path for path in map(shutil.which, names) if path]
    if not engines:
        lacking = " and no ".join(names)
        raise SystemExit(f"has no {lacking} for cluster.container={image}{FIX_THERE}sudo apt-get install {names[0]}")
    return engines


def file_digest(image: str, workdir: str) -> str:
    """Return the digest of an image that is a file. Raises SystemExit: it can't be read."""
    # an image has gigabytes, so its digest is remembered in ``workdir`` until the file changes
    try:
        with open(image, "rb") as file:
            status = os.fstat(file.fileno())
            version = f"{image} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
            name = hashlib.sha256(version.encode()).hexdigest()[:32]
            remembered = os.path.join(workdir, "images", f"{name}.json")
            if isinstance(digest := read_json(remembered), str):
                return digest
            digest = f"sha256:{sha256_of_rest(file)}"
    except OSError as error:
        raise SystemExit(
            f"has no image {image} (cluster.container): {error.strerror}{FIX_THERE}ls -l {image}"
        ) from error
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(remembered), exist_ok=True)
        write_json(remembered, digest)
    return digest


def software_in(container: Container, image_name: str, names: Sequence[str], python_path: Sequence[str]) -> Json:
    """Return ``software.software`` of the image's python3. Raises SystemExit: the image or the engine can't run it."""
    # the container runs the text of that module, as nothing of the agent is in the image
    text = sys.modules[software.__name__].__spec__.loader.get_source(software.__name__)  # type: ignore[union-attr]
    main = "import json,sys\nprint(json.dumps(software(*json.load(sys.stdin))))"
    program = ["python3", "-I", "-c", f"{text}\n{main}"]
    container = container._replace(name=f"paceline-probe-{os.getpid()}")
    argv = command(container, program, cwd="/", mounts=mounts_of(container.mounts), login=this_login())
    try:
        done = output_of(argv, json.dumps([names, python_path]))
    except subprocess.TimeoutExpired as error:
        remove_container(container.engine, container.name)
        raise SystemExit(f"starts no container of {image_name} within {_END_S:g} s") from error
    if done.returncode != 0:
        why = f"exit code {done.returncode}: {last_line(done.stderr)}"
        raise SystemExit(f"can't run the python3 of {image_name} by {os.path.basename(container.engine)}: {why}")
    answer: Json = json.loads(done.stdout.splitlines()[-1])
    return answer


def output_of(argv: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, input=text, capture_output=True, text=True, errors="replace", timeout=_END_S, check=False, cwd="/"
    )


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1][-400:]


# ---------------------------------------------------------------------------------------------------- a run's container
def mounts_of(paths: Iterable[str]) -> dict[str, bool]:
    """Return the mounts of the configured folders and files, all writable. Raises SystemExit: one doesn't exist."""
    mounts = {os.path.expanduser(path): True for path in paths}
    for path in mounts:
        if not os.path.exists(path):
            raise SystemExit(
                f"has no {path}, which the ranks' container is to see; cluster.container_mounts= without it"
            )
    return mounts


def of_run(planned: Container, mark: str) -> Container:
    """Return the planned container with its name on this node; containers of apptainer have none."""
    has_name = os.path.basename(planned.engine) not in OF_FILES
    return planned._replace(name=f"paceline-{mark.replace(':', '-')}" if has_name else "")


def begin(container: Container, node: NodeStart, env: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start a run's container, whose first process becomes torchrun. Raises OSError, SystemExit."""
    run_dir, data_dir = node.run_dir, node.data_dir
    # links in the run folder, such as that to the data, lead out of it: their targets are mounted, too
    links = [os.path.realpath(entry.path) for entry in os.scandir(run_dir) if entry.is_symlink()]
    read_only = [path for path in [*links, data_dir] if path and os.path.exists(path)]
    mounts = {**dict.fromkeys(read_only, False), **mounts_of(container.mounts), run_dir: True}
    program = [node.argv[0], "-I", "-c", _ENTER, *node.argv]
    argv = command(container, program, cwd=run_dir, mounts=mounts, login=this_login())
    environment = os.memfd_create("paceline-environment")
    try:
        os.write(environment, json.dumps({"HOME": "/tmp", **env}).encode())
        os.lseek(environment, 0, os.SEEK_SET)
        # the engine's own processes must not have the run's mark, because marked processes get TERM
        own_environment = {name: value for name, value in os.environ.items() if name != variables.NODE}
        return subprocess.Popen(
            argv, env=own_environment, cwd="/", stdin=environment, stdout=output, stderr=output, start_new_session=True
        )
    finally:
        os.close(environment)


def first_process(mark: str) -> int | None:
    """Return the process that the engine started for the run with this mark; None: there is none yet."""
    pids = find_processes(mark)
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            if int(stat_fields(pid)[1]) not in pids:  # its parent, the engine, has no mark
                return pid
    return None


def exit_code(code: int) -> int:
    """Return the exit code of the program in the container (negative: the signal that ended it)."""
    return 128 - code if code > 128 else code


def not_started(container: Container, code: int, first: int | None) -> str:
    """Return the error of an engine that started no container; '' if it did. ``first``: pid of its first process."""
    engine = os.path.basename(container.engine)
    return f"{engine} started no container (exit code {code})" if first is None and code in _NOT_STARTED else ""
