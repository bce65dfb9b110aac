"""The node agent: one standard-library-only file that any launcher can run on a host (Python 3.9 or newer).

It is never installed. A launcher sends the source itself, then one line of JSON (the request), then an
optional tar, into the standard input of ``python3 -c BOOTSTRAP``: so no value ever reaches a remote shell
and controller and node cannot differ in version. Answers are lines ``@paceline {json}``; anything else on
stdout is a login shell's chatter.

``start`` leaves a supervisor behind that owns torchrun. It merges the ranks' output into one log, keeps a
lease, writes ``exit.json`` when everything of this node has ended, and kills exactly the processes that
carry its mark: ``PACELINE_NODE=<run id>:<node rank>`` in their environment, which torchrun's workers
inherit (so a SIGKILLed torchrun's orphans are found too), and whoever shares a session with one of them.
"""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH101, PTH103, PTH104, PTH105, PTH106, PTH108, PTH110, PTH111, PTH112
# ruff: noqa: PTH116, PTH118, PTH119, PTH120, PTH123, PTH202, PTH204, PTH207, PTH208, PTH211
from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from .processors import count_cpus, count_gpus

MARK = "PACELINE_NODE"
LINUX = os.path.isdir("/proc/self")
POLL_S = 0.05
BEAT_STALE_S = 3.0  # the controller beats every second
PEER_TRY_S = 1.0
TERM_GRACE_S = 3.0
SIBLING_GRACE_S = 2.0  # after a rank's error: what torchrun gets to reap the others by itself
FROZEN_S = 12.0  # long for a supervisor that looks twice a second, and told before a person would wonder
UNATTENDED_S = 20.0
LOOK_S = 1.5  # of one look at a silent file to the next: what is beyond, this process was stopped itself
RESERVE_BYTES = 64 << 10  # room for exit.json where the disk fills up, and as much for what a rank says of it
REMOVED = "the run's folder %s was removed while the run was going on; the same command goes on with what is left"
LONGEST_START_S = 3600.0
KEPT_S = 7 * 86400.0  # how long a host keeps what a dead attempt left, whose own command may still fetch it
FOREIGN_S = 86400.0
HEARTBEAT_TIMEOUT_S = 8.0
LONGEST_LINE_BYTES = 65536
CUT = " [cut: the line is longer, it goes on below]"

_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
Json = dict[str, Any]


def say(**fields: Any) -> None:
    """One answer line to the controller. Raises OSError when nobody reads any more."""
    sys.stdout.write("@paceline " + json.dumps(fields) + "\n")
    sys.stdout.flush()


def write_json(path: str, value: Any) -> None:
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def read_json(path: str) -> Any:
    """The value, or None while the file isn't there (files of the agent appear whole or not at all)."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def in_thread(target: Callable[..., Any], *args: Any, on_error: Callable[[str], Any]) -> None:
    """The one place where threads start: what one raises is told to ``on_error``, none ends without a word."""

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            traceback.print_exc()
            on_error(f"{type(error).__name__}: {error}")

    threading.Thread(target=run, daemon=True).start()


# ------------------------------------------------------------------------------------ processes
def start_time(pid: int) -> str | None:
    """When ``pid`` started, as the system spells it: with it a recycled pid isn't taken for ours.
    None: no such process (a zombie counts as gone)."""
    if LINUX:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    ps = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return ps.stdout.strip() or None


def find_processes(mark: str) -> set[int]:
    """Processes that carry ``PACELINE_NODE=mark``, and all of their sessions.

    A mark that ends with "-" is the beginning that all attempts of one run folder share.
    """
    if not LINUX:  # macOS: environments show with -E; sessions are left out
        ps = subprocess.run(["ps", "-axEww", "-o", "pid=,command="], capture_output=True, text=True, check=False)
        rows = (line.split() for line in ps.stdout.splitlines())
        return {int(words[0]) for words in rows if any(carries(word.encode(), mark) for word in words)}
    found: set[int] = set()
    sessions: dict[int, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            sessions[pid] = fields[3]
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if any(carries(variable, mark) for variable in environ.read().split(b"\0")):
                    found.add(pid)
        except OSError:
            continue
    mine = {sessions[pid] for pid in found} - {str(os.getsid(0))}
    return found | {pid for pid, session in sessions.items() if session in mine}


def carries(variable: bytes, mark: str) -> bool:
    wanted = f"{MARK}={mark}".encode()
    return variable.startswith(wanted) if mark.endswith("-") else variable == wanted


def send_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_tree(mark: str, grace_s: float) -> bool:
    """TERM to the whole tree, KILL after ``grace_s``, then sweeps until nothing is left. True: nothing is."""
    deadline = time.monotonic() + grace_s
    alive = find_processes(mark)
    send_all(alive, signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        alive = find_processes(mark)
    deadline = time.monotonic() + 3
    while alive and time.monotonic() < deadline:
        send_all(alive, signal.SIGKILL)
        time.sleep(POLL_S)
        alive = find_processes(mark)
    return not alive


# ---------------------------------------------------------------------------------------- probe
def server_address(request: Json) -> tuple[str, int]:
    """Address and port on which ssh reached this node; 127.0.0.1 and 0 without ssh."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    if request.get("local") or len(parts) != 4:
        return "127.0.0.1", 0
    return parts[2].partition("%")[0], int(parts[3])


def identity(request: Json) -> str:
    """Equal for two names of one node: host name, ssh server's address and port, user id."""
    address, port = server_address(request)
    return f"{socket.gethostname()} {address}:{port} uid {os.getuid()}"


def interfaces() -> dict[str, str]:
    """Every address of this node with the interface that holds it (Linux; elsewhere empty)."""
    found: dict[str, str] = {}
    if not LINUX:
        return found
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # interfaces without an IPv4 address
                question = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe_socket.fileno(), 0x8915, question)  # SIOCGIFADDR
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def torch_version() -> str | None:
    """From torch/version.py, without importing torch (which takes seconds)."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    with contextlib.suppress(OSError):
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path, encoding="utf-8") as file:
            found = re.search(r"""^__version__ = ['"]([^'"]+)""", file.read(), re.MULTILINE)
        return found.group(1) if found else None
    return None


def packages(named: list[str]) -> dict[str, str]:
    """Name → version of what this interpreter has installed, from the folders' names alone (reading takes long).

    Of ``named``, what no index gave has the digest of its content behind the version, as in the run's key.
    """
    found: dict[str, str] = {}
    wanted = {normal(name) for name in named}
    for folder in reversed([path for path in sys.path if os.path.isdir(path)]):  # the first on the path counts
        for name in os.listdir(folder):
            project, version = distribution_of(name)
            label = normal(project)
            if version:
                found[label] = version + (content(os.path.join(folder, name)) if label in wanted else "")
    return dict(sorted(found.items()))


def content(folder: str) -> str:
    """Of a distribution of a folder or a repository, as pipeline/keys/installed.py has it; '' of all others."""
    if not os.path.exists(os.path.join(folder, "direct_url.json")):
        return ""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(os.path.join(folder, "RECORD"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    told = sorted(line for line in lines if not re.match(r"\.\.|/|[^,]*(\.dist-info/|\.pyc,)", line))
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
    return f" (content {digest[:12]})"


def distribution_of(name: str) -> tuple[str, str]:
    """Project and version of a folder that says what is installed; Debian's packages have x-1.0.egg-info."""
    if name.endswith(".dist-info"):
        project, _, version = name[: -len(".dist-info")].rpartition("-")
        return project, version
    legacy = re.fullmatch(r"([^-]+)-([^-]+)(-py[\d.]+)?\.egg-info", name)
    return (legacy.group(1), legacy.group(2)) if legacy else ("", "")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules(names: list[str], behind: list[str]) -> dict[str, str]:
    """Which of ``names`` (dotted) a rank could import here → the version of the distribution that has it.

    Nothing is imported. ``behind`` are the folders of the ranks' PYTHONPATH.
    """
    path = [*behind, *(entry for entry in sys.path if is_installed(entry))]
    return {name: version_of_module(name, path) for name in names if is_importable(name, path)}


def is_installed(entry: str) -> bool:
    """Whether ranks keep this entry of sys.path: trainers/distributed/isolation.py takes the others off."""
    import site
    import sysconfig

    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    place = os.path.realpath(entry)
    if any(f"{place}/".startswith(f"{os.path.realpath(folder)}/") for folder in folders):
        return True
    return bool(entry) and bool(glob.glob(os.path.join(glob.escape(place), "*.dist-info")))


def is_importable(name: str, path: list[str]) -> bool:
    from importlib.machinery import PathFinder

    for part in name.split("."):  # by its last part alone: for a dotted name the parent would have to be imported
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return True


def version_of_module(name: str, path: list[str]) -> str:
    """From the lists of files of what is installed; ``unknown`` where none has it."""
    from importlib.metadata import distributions

    begin = name.replace(".", "/")
    for found in distributions(path=path):
        files = found.read_text("RECORD") or ""
        told = (found.read_text("top_level.txt") or "").split()
        if re.search(rf"^{re.escape(begin)}[/.]", files, re.MULTILINE) or (not files and name in told):
            return found.version
    return "unknown"


def hardware() -> Json:
    """Models of CPU and GPUs and the GPU driver's version, as the system's files tell; null where they don't."""

    def seen(pattern: str, paths: list[str]) -> list[str]:
        lines = []
        for path in sorted(paths):
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                lines += re.findall(pattern, file.read(), re.MULTILINE)
        return lines

    cpus = seen(r"^model name\s*:\s*(.+)$", ["/proc/cpuinfo"])
    driver = seen(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", ["/proc/driver/nvidia/version"])
    return {
        "cpu_model": cpus[0] if cpus else None,
        "gpu_models": seen(r"^Model:\s*(.+)$", glob.glob("/proc/driver/nvidia/gpus/*/information")),
        "gpu_driver": driver[0] if driver else None,
    }


def numa(system: str = "/sys") -> bool:
    """Whether torchrun can bind each rank to the cores beside its GPU: numactl is there, the system says which NUMA
    node each NVIDIA device belongs to, and this process may use cores of all of those nodes."""
    if shutil.which("numactl") is None:
        return False
    try:
        vendors = glob.glob(f"{system}/bus/pci/devices/*/vendor")
        folders = [os.path.dirname(path) for path in vendors if text_of(path) == "0x10de"]
        nodes = {text_of(os.path.join(folder, "numa_node")) for folder in folders}
        cores = [cores_of(text_of(f"{system}/devices/system/node/node{node}/cpulist")) for node in nodes]
        return bool(cores) and all(found & os.sched_getaffinity(0) for found in cores)
    except (AttributeError, OSError, ValueError):  # a node of -1 has no folder; macOS tells no affinity
        return False


def text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def cores_of(ranges: str) -> set[int]:
    """{0, 1, 2, 8} of the text ``0-2,8``."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def from_environment(patterns: list[str], but: list[str] | None = None) -> dict[str, str]:
    """The variables of this process whose names match ``patterns`` and none of ``but``."""

    def among(name: str, wanted: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)

    return {name: value for name, value in os.environ.items() if among(name, patterns) and not among(name, but or [])}


def holds_pack(folder: str, digest: str) -> bool:
    """Whether ``folder`` is the whole data pack: its digest, and the sizes that the manifest implies."""
    manifest = read_json(os.path.join(folder, "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("digest") != digest:
        return False
    try:
        count = manifest["count"]
        sizes = {
            "images.bin": count * manifest["channels"] * manifest["height"] * manifest["width"],
            "labels.bin": count * 8,
        }
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in sizes.items())
    except (KeyError, TypeError, OSError):
        return False


def free_bytes(folder: str) -> int:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def probe(request: Json) -> None:
    """One JSON with what the launch depends on; the field names are those of NodeFacts."""
    address, port = server_address(request)
    holding = interfaces()
    ports = free_ports(4)
    workdir = os.path.expanduser(request["workdir"])
    digest = request.get("pack_digest", "")
    places = [*request.get("pack_places", []), os.path.join(workdir, "data", digest)] if digest else []
    names = request.get("modules", [])
    installed = packages(names)
    say(
        identity=identity(request),
        hostname=socket.gethostname(),
        address=address,
        interface=holding.get(address),
        python=sys.executable,
        python_version=".".join(map(str, sys.version_info[:3])),
        torch_version=torch_version(),
        gpus=count_gpus(),
        cpus=count_cpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_free_bytes=free_bytes(workdir),
        free_port=ports[0],
        home=os.path.expanduser("~"),
        unix_time=time.time(),
        pack_path=next((place for place in places if holds_pack(place, digest)), None),
        extra={
            "ssh_port": port,
            "ssh_address": address,
            "free_ports": ports,
            "interfaces": holding,
            "env": from_environment(request.get("env_names", [])),
            "left_behind": from_environment(request.get("env_families", []), but=request.get("env_passed", [])),
            "packages": installed,
            "modules": modules(
                [name for name in names if normal(name) not in installed], request.get("python_path", [])
            ),
            "hardware": hardware(),
            "numa": numa(),
        },
    )


# ----------------------------------------------------------------------------- stop and clean-up
def entries(request: Json) -> list[tuple[str, Json]]:
    """Registered supervisors of this node (homes on NFS show other nodes' entries too)."""
    me = identity(request)
    registry = os.path.expanduser(request["registry"])
    paths = sorted(glob.glob(os.path.join(glob.escape(registry), "*.json")))
    found = ((path, read_json(path)) for path in paths)
    return [(path, entry) for path, entry in found if isinstance(entry, dict) and entry.get("identity") == me]


def own_entries(request: Json) -> list[tuple[str, Json]]:
    """Those of the attempts of one run folder, whose ids begin alike."""
    return [(path, entry) for path, entry in entries(request) if str(entry["run_id"]).startswith(request["attempts"])]


def tombstone_path(request: Json, run_id: str) -> str:
    return os.path.join(os.path.expanduser(request["registry"]), f"{run_id}.tombstone")


def end_entry(path: str, entry: Json) -> bool:
    """Stop one supervisor and everything it owns; forget it. True when nothing of it is left."""
    if start_time(entry["pid"]) == entry["born"]:
        send_all({entry["pid"]}, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_S + 3
        while start_time(entry["pid"]) == entry["born"] and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if start_time(entry["pid"]) == entry["born"]:
            send_all({entry["pid"]}, signal.SIGKILL)
    gone = end_tree(entry["mark"], 0.5)
    if gone:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return gone


def stop(request: Json) -> None:
    """End everything that runs here for one run folder, registered or not; what is ``left`` is what still lives."""
    if request["bar"]:  # a start that is still on its way finds this after it has registered
        os.makedirs(os.path.expanduser(request["registry"]), exist_ok=True)
        write_json(tombstone_path(request, request["bar"]), {"monotonic_s": time.monotonic()})
    say(left=[f"process {pid}" for pid in sorted(end_attempts(request))])


def end_attempts(request: Json) -> set[int]:
    """End every attempt of the run folder; the processes that could not be ended."""
    for path, entry in own_entries(request):
        end_entry(path, entry)
    # those whose registration was removed, perhaps together with the run's folder
    alive = find_processes(request["attempts"])
    if alive:
        end_tree(request["attempts"], TERM_GRACE_S)
        alive = find_processes(request["attempts"])
    return alive


def outdated(bar: str) -> bool:
    """Whether nothing can be on its way any more that this bar is for: it is old, or of before a reboot."""
    value = read_json(bar)
    at = value.get("monotonic_s") if isinstance(value, dict) else None
    return not isinstance(at, float) or not 0 <= time.monotonic() - at <= LONGEST_START_S


def status(request: Json) -> None:
    """What is registered on this node and whether it lives."""
    rows = [{**entry, "alive": start_time(entry["pid"]) == entry["born"]} for _, entry in entries(request)]
    say(runs=rows)


def clean(request: Json) -> None:
    """Remove this node's folders of a run. Only folders that ``start`` made (its stamp lies inside)."""
    remove_ours(own_node(request)["remove"])
    say(cleaned=True)


def remove_ours(folders: list[str]) -> None:
    for folder in folders:
        if os.path.exists(os.path.join(folder, ".paceline")):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(folder))


def remove_left(request: Json, node: Json) -> None:
    """Remove below the workdir what nobody needs: what was half unpacked by a process that is gone, the folders of
    earlier attempts of this run, and those of other runs' dead attempts after KEPT_S."""
    runs = os.path.dirname(os.path.dirname(node["run_dir"]))
    places = [os.path.join(os.path.dirname(runs), "data"), *glob.glob(os.path.join(glob.escape(runs), "*"))]
    left = []
    for place in places:
        found = glob.glob(os.path.join(glob.escape(place), ".staging-*"))
        left += [folder for folder in found if not is_unpacking(folder)]
    for folder in glob.glob(os.path.join(glob.escape(runs), "*", "node*")):
        run_id = os.path.basename(os.path.dirname(folder))
        earlier = run_id.startswith(request["attempts"]) and run_id != request["run_id"]
        left += [folder] if earlier or idle_s(folder) > KEPT_S else []
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # it isn't empty
            os.rmdir(os.path.dirname(folder))
    for path, entry in entries(request):
        if start_time(entry["pid"]) != entry["born"] and not os.path.isdir(entry["state_dir"]):
            with contextlib.suppress(OSError):
                os.unlink(path)


def is_unpacking(folder: str) -> bool:
    """Whether the process that makes this folder lives, as its name tells; of another host's only the age is known."""
    named = re.fullmatch(r"\.staging-(.+)-(\d+)-([^-]+)-\w+", os.path.basename(folder))
    if named and named.group(1) == socket.gethostname():
        return start_time(int(named.group(2))) == named.group(3)
    return idle_s(folder) < FOREIGN_S


def idle_s(folder: str) -> float:
    """Seconds since something was last written there: a supervisor that lives writes twice a second."""
    times = [0.0]
    for name in ("", "agent", "agent/beat", "checkpoints"):
        with contextlib.suppress(OSError):
            times.append(os.path.getmtime(os.path.join(folder, name)))
    return time.time() - max(times)


# ---------------------------------------------------------------------------------------- start
def own_node(request: Json) -> Json:
    me = identity(request)
    for node in request["nodes"]:
        if node["identity"] == me:
            return dict(node)
    raise SystemExit(f"this node is {me!r}, which the plan does not name")


def unpack(stream: BinaryIO, folder: str) -> None:
    """Extract a tar into ``folder``, which then appears whole or not at all."""
    parent = os.path.dirname(folder)
    try:
        os.makedirs(parent, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        raise SystemExit(f"can't make the folder {parent} there ({error.strerror}); set cluster.workdir") from error
    temporary = tempfile.mkdtemp(
        prefix=f".staging-{socket.gethostname()}-{os.getpid()}-{start_time(os.getpid())}-", dir=parent
    )
    try:
        os.chmod(temporary, 0o755)
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(temporary, filter="data")
            else:
                archive.extractall(temporary)
        os.rename(temporary, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # else somebody else put the same thing there meanwhile
            error.filename = error.filename or folder  # a write doesn't say to which file
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder that was made for nothing
            os.rmdir(parent)


def put_pack(request: Json) -> None:
    """Lay the data pack from the tar on stdin at ``workdir/data/<digest>``, once, whole."""
    folder = os.path.join(os.path.expanduser(request["workdir"]), "data", request["pack_digest"])
    if os.path.isdir(folder) and not holds_pack(folder, request["pack_digest"]):
        shutil.rmtree(folder)
    if not os.path.isdir(folder):
        unpack(sys.stdin.buffer, folder)
    if not holds_pack(folder, request["pack_digest"]):
        shutil.rmtree(folder, ignore_errors=True)
        raise SystemExit(f"the data pack arrived damaged in {folder}")
    say(pack_path=folder)


def settle_pack(run_dir: str, data_dir: str, digest: str) -> None:
    """Move a pack that came with the run to its own place; let ``run_dir/data`` point to it."""
    came = os.path.join(run_dir, "pack")
    if os.path.isdir(came):
        os.makedirs(os.path.dirname(data_dir), exist_ok=True)
        if not holds_pack(data_dir, digest):
            shutil.rmtree(data_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # another node of a shared home was quicker
                os.rename(came, data_dir)
        shutil.rmtree(came, ignore_errors=True)
    link = os.path.join(run_dir, "data")
    if not os.path.lexists(link):
        os.symlink(data_dir, link)
    if not os.path.exists(os.path.join(link, "manifest.json")):
        raise SystemExit(
            f"the data pack is missing: no manifest.json in {data_dir}; the same doit train makes it again"
        )


def start(request: Json) -> None:
    """Stage the run, end left-overs of the same key, leave a supervisor behind; answers when torchrun is up."""
    node = own_node(request)
    for old in glob.glob(tombstone_path(request, "*")):
        with contextlib.suppress(OSError):
            if outdated(old):
                os.unlink(old)
    before = own_entries(request)
    left = end_attempts(request)
    if left:
        raise SystemExit(f"an earlier attempt of this run cannot be ended: processes {sorted(left)}")
    for _, entry in before:
        remove_ours(entry["remove"])
    if request["stage"]:
        remove_left(request, node)
        unpack(sys.stdin.buffer, node["run_dir"])
    if request["pack_digest"]:  # a diagnosis may need no data
        settle_pack(node["run_dir"], node["data_dir"], request["pack_digest"])
    os.makedirs(node["state_dir"], mode=0o700, exist_ok=True)  # what ranks print lies there as they print it
    for folder in node["remove"]:
        open(os.path.join(folder, ".paceline"), "w").close()
    touch(os.path.join(node["state_dir"], "lease"))
    told, tell = os.pipe()
    if os.fork() == 0:
        os.close(told)
        os.setsid()
        if os.fork() == 0:
            supervise_forever(request, node, tell)
        os._exit(0)
    os.close(tell)
    os.wait()
    with os.fdopen(told, "r", encoding="utf-8") as pipe:
        answer = pipe.read()
    say(**(json.loads(answer) if answer else {"error": "the supervisor died at once"}))


def touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        os.utime(path)


def supervise_forever(request: Json, node: Json, tell: int) -> None:
    """The daemon's whole life; never returns into the caller's stack."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(os.path.join(node["state_dir"], "agent.log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.chdir("/")
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        Supervisor(request, node).run(tell)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


class Tail:
    """One growing file, read as whole lines from where the last look ended. ``hide`` alters each before it is cut."""

    def __init__(self, path: str, hide: Callable[[str], str] = str) -> None:
        self.path = path
        self.hide = hide
        self.offset = 0
        self._rest = b""

    def lines(self, last: bool = False) -> list[str]:
        """What came since the last look, line by line; what is longer than a log can take in one piece is cut."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
        except FileNotFoundError:
            data = b""
        self.offset += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        texts = [text for line in map(self.shown, whole) for text in in_pieces(line)]
        rest = self.shown(rest) if last or len(rest) > LONGEST_LINE_BYTES else rest
        if last and len(data) < 1 << 20:
            texts += in_pieces(rest) if rest else []
            rest = b""
        elif len(rest) > LONGEST_LINE_BYTES:
            states, returned, unfinished = rest.rpartition(b"\r")
            if returned:  # a progress bar that never ends its line: its last state
                texts += in_pieces(states)
                rest = unfinished
            cut, rest = cut_long(rest)
            texts += cut
        self._rest = rest
        return texts

    def shown(self, line: bytes) -> bytes:
        """Bytes that are no text are left to ``as_text``."""
        return self.hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def in_pieces(line: bytes) -> list[str]:
    """A whole line as a terminal shows it (what stands after a progress bar's last carriage return), cut if it is
    longer than anything downstream should have to hold."""
    cut, rest = cut_long(line.rstrip(b"\r").rpartition(b"\r")[2])
    return [*cut, as_text(rest)]


def cut_long(line: bytes) -> tuple[list[str], bytes]:
    """Marked pieces of a long line, never in the middle of a character, and what is left."""
    texts = []
    while len(line) > LONGEST_LINE_BYTES:
        end = LONGEST_LINE_BYTES
        while end > LONGEST_LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:
            end -= 1
        texts.append(as_text(line[:end]) + CUT)
        line = line[end:]
    return texts, line


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


class Silence:
    """For how many seconds a file has not changed, as this process saw it.

    Neither the system's clock (which may be set) nor a time stamp of the file's counts, only changes; and no time in
    which this process, its machine or its container was stopped: nobody could have been heard then.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds = 0.0
        self.looked = time.monotonic()
        self.seen = self.state()

    def state(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            return found.st_mtime_ns, found.st_ino
        return None

    def look(self) -> float:
        now, seen = time.monotonic(), self.state()
        changed = seen is not None and seen != self.seen
        self.seconds = 0.0 if changed else self.seconds + min(now - self.looked, LOOK_S)
        self.looked, self.seen = now, seen or self.seen
        return self.seconds


class Supervisor:
    """Owns one torchrun: merges the ranks' output, keeps the lease, ends the tree, writes exit.json."""

    def __init__(self, request: Json, node: Json) -> None:
        self.request, self.node = request, node
        self.state = node["state_dir"]
        self.mark = f"{request['run_id']}:{node['node_rank']}"
        self.reason = ""
        self.end_at: float | None = None
        self.rules = [(re.compile(pattern), shown) for pattern, shown in request.get("hide", [])]
        self.chatter = Tail(self.path("torchrun.log"), self.hide)
        self.said: list[str] = []
        self.failed: dict[int, Json] = {}
        self.tails: dict[str, tuple[int, Tail]] = {}
        self.reachable: set[tuple[str, int]] = set()
        self.lease = Silence(self.path("lease"))

    def hide(self, text: str) -> str:
        """A line of a rank or of torchrun with placeholders for secrets: nothing else is written down."""
        for pattern, shown in self.rules:
            text = pattern.sub(shown, text)
        return text

    def path(self, name: str) -> str:
        return os.path.join(self.state, name)

    def run(self, tell: int) -> None:
        """From the registration to the end of everything it owns; no way out leaves a process of the run behind."""
        signal.signal(signal.SIGTERM, lambda *_: self.end("stopped"))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        entry, code = self.entry_path(), 1
        try:
            child = self.begin(tell)
            if child is None:
                return
            in_thread(self.watch_peers, on_error=lambda why: self.end(f"the node agent could not go on: {why}"))
            code = self.watch(child)
        except BaseException as error:
            traceback.print_exc()
            self.end(f"the node agent could not go on: {reason(error)}")
        finally:
            gone = end_tree(self.mark, 0.5)
            if gone:
                with contextlib.suppress(OSError):
                    os.unlink(entry)
        self.conclude(code, gone)

    def begin(self, tell: int) -> subprocess.Popen[bytes] | None:
        """Register, start torchrun, answer the start command (which may be gone by then); None: it could not start."""
        child = None
        try:
            self.register()
            if os.path.exists(tombstone_path(self.request, self.request["run_id"])):
                raise SystemExit("it was stopped meanwhile")
            child = self.spawn()
            answer: Json = {"pid": os.getpid(), "torchrun": child.pid, "unix_time": time.time()}
        except BaseException as error:
            answer = {"error": f"cannot start {self.node['argv'][0]}: {reason(error)}"}
        with contextlib.suppress(OSError):
            os.write(tell, json.dumps(answer).encode())
        os.close(tell)
        return child

    def conclude(self, code: int, gone: bool) -> None:
        """The last lines, and how it ended; a folder that was removed needs neither."""
        if not os.path.isdir(self.state):
            return
        try:
            while self.pump(last=True):
                pass
        except OSError as error:
            self.reason = self.reason or f"its log could not be written: {reason(error)}"
        free = free_bytes(self.state)
        for name in ("reserve", "reserve-of-ranks"):  # makes room on a full disk
            with contextlib.suppress(OSError):
                os.unlink(self.path(name))
        if code != 0 and free < RESERVE_BYTES and all(mute(error) for error in self.errors()):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.node["run_dir"])
            self.reason = "; ".join(filter(None, (self.reason, f"the host {full_disk(full, free)}")))
        self.finish(code, gone)

    def spawn(self) -> subprocess.Popen[bytes]:
        env = {**from_environment(self.request["env_passed"]), **self.node["env"]}
        env[MARK] = self.mark
        env["PACELINE_RESERVE"] = self.path("reserve-of-ranks")
        with open(self.chatter.path, "ab") as output:
            return subprocess.Popen(
                self.node["argv"],
                env=env,
                cwd=self.node["run_dir"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def entry_path(self) -> str:
        registry = os.path.expanduser(self.request["registry"])
        return os.path.join(registry, f"{self.request['run_id']}.{self.node['node_rank']}.json")

    def register(self) -> None:
        registry = os.path.expanduser(self.request["registry"])
        os.makedirs(registry, exist_ok=True)
        entry = {
            "identity": self.node["identity"],
            "run_key": self.request["run_key"],
            "run_id": self.request["run_id"],
            "mark": self.mark,
            "pid": os.getpid(),
            "born": start_time(os.getpid()),
            "state_dir": self.state,
            "remove": self.node["remove"],
        }
        write_json(self.entry_path(), entry)
        write_json(self.path("agent.json"), entry)
        for name in ("reserve", "reserve-of-ranks"):
            with open(self.path(name), "wb") as reserve:
                reserve.write(bytes(RESERVE_BYTES))

    def end(self, reason: str, grace_s: float = 0.0) -> None:
        """Ask for the end in ``grace_s``; the first reason is kept."""
        self.reason = self.reason or reason
        at = time.monotonic() + grace_s
        self.end_at = at if self.end_at is None else min(self.end_at, at)

    def watch(self, child: subprocess.Popen[bytes]) -> int:
        """Until torchrun is gone. Returns its exit code (negative: the signal that ended it)."""
        looked = 0.0
        while child.poll() is None:
            now = time.monotonic()
            try:
                self.pump()
                if now - looked > 0.5:
                    looked = now
                    self.look()
            except OSError as error:
                folder = self.node["run_dir"]
                removed = not os.path.exists(self.path("agent.json"))
                self.end(REMOVED % folder if removed else f"cannot write to {folder}: {reason(error)}")
            if self.end_at is not None and now >= self.end_at:
                in_thread(end_tree, self.mark, TERM_GRACE_S, on_error=lambda _: None)  # tried again below
                self.end_at = now + TERM_GRACE_S + 3
            time.sleep(POLL_S)
        return child.returncode

    def look(self) -> None:
        """What else would end the run: the folder removed, the controller gone, a rank's error. Raises OSError."""
        os.stat(self.path("agent.json"))
        touch(self.path("beat"))
        lease_s = self.request["lease_s"]
        if not os.path.exists(self.path("attached")):  # the controller died between start and follow
            lease_s = min(lease_s, UNATTENDED_S)
        if self.lease.look() > lease_s:
            self.end(f"the controller has not been heard of for {lease_s:g} s")
        if glob.glob(os.path.join(glob.escape(self.state), "ranks/*/attempt_*/*/error.json")):
            self.end("a rank failed", SIBLING_GRACE_S)

    def watch_peers(self) -> None:
        """End the run when this node is cut off: no beats, and no node that used to answer does any more."""
        peers = [tuple(peer) for peer in self.node["peers"]]
        misses, beats = 0, Silence(self.path("lease"))
        while peers:
            stale = beats.look() > BEAT_STALE_S
            if stale or not self.reachable:
                alive = {peer for peer in peers if answers(*peer)}
                self.reachable |= alive
                cut = stale and self.reachable and not (alive & self.reachable)
                misses = misses + 1 if cut else 0
                if misses >= 2:
                    self.end("isolated: neither the controller nor any other node can be reached")
            time.sleep(PEER_TRY_S if not stale else 0.2)

    def pump(self, last: bool = False) -> bool:
        """Append what ranks and torchrun wrote since the last look to the one log; False: nothing."""
        if len(self.tails) < 2 * self.node["nproc_per_node"] or last:
            self.find_outputs()
        rows = [f"{rank} | {text}" for rank, tail in self.tails.values() for text in tail.lines(last)]
        for text in self.chatter.lines(last):
            self.said = [*self.said[-39:], text]
            rows.append(f"- | {text}")
            found = _FAILED.search(text)
            if found:
                code, local_rank, pid = map(int, found.groups())
                self.failed.setdefault(local_rank, {"code": code, "pid": pid, "unix_time": time.time()})
        if rows:
            with open(self.path("log"), "a", encoding="utf-8") as log:
                log.write("\n".join(rows) + "\n")
        return bool(rows)

    def find_outputs(self) -> None:
        for path in glob.glob(os.path.join(glob.escape(self.state), "ranks/*/attempt_*/*/std*.log")):
            if path not in self.tails:
                local_rank = int(os.path.basename(os.path.dirname(path)))
                self.tails[path] = (self.node["first_rank"] + local_rank, Tail(path, self.hide))

    def finish(self, code: int, gone: bool) -> None:
        reason = self.reason or ("" if code == 0 else f"torchrun ended with {describe(code)}")
        if not gone:
            reason += "; some processes could not be ended"
        tail = [text for text in self.said if text.strip()][-12:] if code else []
        errors = [] if code == 0 else self.errors()
        write_json(
            self.path("exit.json"), {"code": code, "reason": reason, "errors": errors, "tail": tail, "gone": gone}
        )

    def errors(self) -> list[Json]:
        """Each rank's own error: from torch's error file, else from its stderr and exit code."""
        found: dict[int, Json] = {}
        for folder in sorted(glob.glob(os.path.join(glob.escape(self.state), "ranks/*/attempt_*/*/"))):
            local_rank = int(os.path.basename(os.path.dirname(folder)))
            error = recorded_error(os.path.join(folder, "error.json"))
            if error is None and (local_rank in self.failed or self.end_at is None):
                error = printed_error(os.path.join(folder, "stderr.log"), self.failed.get(local_rank))
            if error is not None:
                said = {name: self.hide(error[name]) for name in ("message", "traceback")}
                found[local_rank] = {"rank": self.node["first_rank"] + local_rank, **error, **said}
        return sorted(found.values(), key=lambda error: float(error["unix_time"]))


def mute(error: Json) -> bool:
    """Whether a rank left nothing but its exit code."""
    return str(error["message"]).startswith("ended with ")


def describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def recorded_error(path: str) -> Json | None:
    """What torch's @record wrote. The file's own time is used: the one inside counts whole seconds."""
    value = read_json(path)
    if not isinstance(value, dict):
        return None
    message = value.get("message")
    extra: Json = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    return {"unix_time": os.path.getmtime(path), "message": text, "traceback": extra.get("py_callstack", "")}


def printed_error(path: str, failed: Json | None) -> Json | None:
    """The last traceback on a rank's stderr, or how it ended; None for a rank that did nothing wrong."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode("utf-8", "replace").replace("\r\n", "\n")
        printed = os.path.getmtime(path)
    except FileNotFoundError:
        text, printed = "", time.time()
    _, head, rest = text.rpartition("Traceback (most recent call last):\n")
    body = re.match(r"(?:[ \t].*\n|\n)*(?:.*\n?)", rest) if head else None
    # a traceback in the middle of the output was handled by the program, unless the rank ended by exit code 1
    if body and ((failed and failed["code"] == 1) or not rest[body.end() :].strip()):
        shown = body.group(0).rstrip()
        return {"unix_time": printed, "message": shown.splitlines()[-1], "traceback": head + shown}
    if failed is None:
        return None
    last = "\n".join(text.rstrip().splitlines()[-10:])
    message = f"ended with {describe(failed['code'])}"
    return {"unix_time": failed["unix_time"], "message": message, "traceback": last}


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=PEER_TRY_S).close()
    except OSError:
        return False
    return True


# --------------------------------------------------------------------------------------- follow
def follow(request: Json) -> None:
    """Stream the log, rank 0's metrics and the end as JSON lines; renew the lease from the beats on stdin.

    Resumable: ``log_at`` and ``metrics_at`` are byte offsets that the answers carry.
    """
    node = own_node(request)
    heard = [time.monotonic()]
    in_thread(listen, node, heard, on_error=leave)
    in_thread(leave_after_heartbeat_timeout, heard, on_error=leave)
    try:
        send_news(request, node)
    except OSError as error:  # nobody reads any more, or a file can't be read: a new stream may do better
        leave(str(error))


def leave(why: str) -> None:
    """End the stream at once: the listening thread sits in a read that would hold up an ordinary exit."""
    with contextlib.suppress(OSError):
        print(why, file=sys.stderr, flush=True)
    os._exit(1)


def send_news(request: Json, node: Json) -> None:
    state = node["state_dir"]
    supervisor = Silence(os.path.join(state, "beat"))
    offsets = {"log": int(request["log_at"]), "metrics": int(request["metrics_at"])}
    files = {"log": os.path.join(state, "log")}
    if node["node_rank"] == 0 and request["metrics"]:
        files["metrics"] = os.path.join(node["run_dir"], "metrics.jsonl")
    beat = time.monotonic()
    while True:
        ended = read_json(os.path.join(state, "exit.json")) or orphaned(node, supervisor)
        while sum(forward(name, path, offsets) for name, path in files.items()):
            beat = time.monotonic()
        if ended:
            say(exit=ended, now=time.time())
            os._exit(0)
        if time.monotonic() - beat > 1:
            beat = time.monotonic()
            say(beat=time.time())
        time.sleep(POLL_S)


def forward(name: str, path: str, offsets: dict[str, int]) -> bool:
    """Send the next whole lines of a file; True when there were any."""
    try:
        with open(path, "rb") as file:
            # a resuming trainer cuts metrics.jsonl back to its checkpoint
            start_bytes = offsets[name] = min(offsets[name], os.fstat(file.fileno()).st_size)
            file.seek(start_bytes)
            data = file.read(1 << 18)
            if b"\n" not in data:  # one line that is longer (the supervisor cuts what ranks print)
                data += file.readline()
    except FileNotFoundError:
        return False
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        return False
    offsets[name] = start_bytes + len(whole)
    texts = whole.decode("utf-8", "replace").split("\n")[:-1]
    say(**{name: texts, "from": start_bytes, "at": offsets[name]})
    return True


def orphaned(node: Json, supervisor: Silence) -> Json | None:
    """Ends what a dead or frozen supervisor left behind; None while it lives."""
    state = node["state_dir"]
    if not os.path.isdir(state):
        return {"code": 1, "reason": REMOVED % node["run_dir"], "lost": True, "errors": [], "tail": []}
    entry = read_json(os.path.join(state, "agent.json"))
    frozen = supervisor.look() > FROZEN_S
    if entry is None or (start_time(entry["pid"]) == entry["born"] and not frozen):
        return None
    time.sleep(3 * POLL_S)
    ended: Json | None = read_json(os.path.join(state, "exit.json"))
    if ended:
        return ended
    send_all({entry["pid"]} if start_time(entry["pid"]) == entry["born"] else set(), signal.SIGKILL)
    gone = end_tree(entry["mark"], 1.0)
    why = "the node agent was killed" if not frozen else f"the node agent was frozen for {FROZEN_S:.0f} s"
    ended = {"code": -signal.SIGKILL, "reason": why, "lost": True, "errors": [], "tail": [], "gone": gone}
    with contextlib.suppress(OSError):  # a full disk, or the folder is removed right now
        write_json(os.path.join(state, "exit.json"), ended)
    return ended


def listen(node: Json, heard: list[float]) -> None:
    """Renew the lease for as long as the controller beats; ``stop`` asks the supervisor to end the run,
    ``prune`` asks rank 0, which looks for that file at the end of an epoch."""
    state = node["state_dir"]
    touch(os.path.join(state, "lease"))
    touch(os.path.join(state, "attached"))
    while line := sys.stdin.buffer.readline():
        heard[0] = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            os.utime(os.path.join(state, "lease"))  # the supervisor looks for a change, not for the time
            if line.strip() == b"prune" and node["node_rank"] == 0:
                touch(os.path.join(node["run_dir"], "prune"))
            if line.strip() == b"stop":
                entry = read_json(os.path.join(state, "agent.json"))
                if entry and start_time(entry["pid"]) == entry["born"]:
                    send_all({entry["pid"]}, signal.SIGTERM)


def leave_after_heartbeat_timeout(heard: list[float]) -> None:
    """A cut connection can leave the stream blocked in a write for minutes: no beat, no stream."""
    while time.monotonic() - heard[0] < HEARTBEAT_TIMEOUT_S:
        time.sleep(0.5)
    os._exit(1)


# -------------------------------------------------------------------------------------- collect
def collect(request: Json) -> None:
    """Send the named files of the run folder as a tar behind one answer line."""
    run_dir = own_node(request)["run_dir"]
    say(tar=True)
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for pattern in request["patterns"]:
            for path in sorted(glob.glob(os.path.join(glob.escape(run_dir), pattern))):
                archive.add(path, arcname=os.path.relpath(path, run_dir))
    sys.stdout.buffer.flush()


COMMANDS = {
    "probe": probe,
    "start": start,
    "follow": follow,
    "stop": stop,
    "status": status,
    "collect": collect,
    "clean": clean,
    "put_pack": put_pack,
}


def full_disk(error: OSError, free: int | None) -> str:
    seen = "" if free is None else f", {free} bytes are free there"
    return f"has a full disk ({error}{seen}); make room there, or set cluster.workdir to a folder on another disk"


def reason(error: BaseException) -> str:
    """What the controller is told, as it stands behind the host's name."""
    if isinstance(error, SystemExit):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full_disk(error, free_bytes(os.path.dirname(error.filename)) if error.filename else None)
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return (
            f"can't write there ({error}); set cluster.workdir to a folder that this login can write to, "
            "or fix its permissions"
        )
    return f"{type(error).__name__}: {error}"


def main() -> int:
    """Read one request from stdin and answer it. Exit code 0, or 1 with ``{"error": …}`` as the answer."""
    request = json.loads(sys.stdin.buffer.readline())
    sys.stdout.write("\n")  # a login script may have printed something without an end of line
    try:
        COMMANDS[request["do"]](request)
    except (SystemExit, OSError, tarfile.TarError) as error:
        with contextlib.suppress(OSError):
            say(error=reason(error))
        return 1
    return 0
