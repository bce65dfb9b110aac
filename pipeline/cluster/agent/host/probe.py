"""The host's facts that a launch depends on. No installed package is imported."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import site
import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec

from ..node import address_and_port, from_environment, identity, machine, sha256
from ..running.leftovers import look_after
from ..running.processes import LINUX
from ..running.staging import free_bytes, holds_pack
from ..running.warm import warm_up
from ..wire import Json, say
from .checks import certificates, facts
from .processors import count_cpus, count_gpus, hardware


def interfaces() -> dict[str, str]:
    """Return every address of this node with its interface (Linux; elsewhere empty)."""
    by_address: dict[str, str] = {}
    if not LINUX:
        return by_address

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # interfaces without an IPv4 address
                question = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe_socket.fileno(), 0x8915, question)  # SIOCGIFADDR
                by_address[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, *_, name = line.split()
            by_address[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return by_address


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def torch_versions() -> tuple[str | None, str | None]:
    """Return the versions of torch and of its CUDA from torch/version.py, because importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None, None
    text = ""
    with contextlib.suppress(OSError):
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    patterns = (r"""^__version__ = ['"]([^'"]+)""", r"""^cuda\b.*= ['"]([^'"]+)""")
    torch, cuda = (re.search(pattern, text, re.MULTILINE) for pattern in patterns)
    return torch and torch.group(1), cuda and cuda.group(1)


def packages(named: list[str]) -> dict[str, str]:
    """Return name → version of this interpreter's packages, from folder names alone, because reading files takes long.

    For packages in ``named`` that came from no index, the version includes a digest of the content, as in the run's
    key.
    """
    versions: dict[str, str] = {}
    wanted = {normal(name) for name in named}
    for folder in reversed([path for path in sys.path if os.path.isdir(path)]):  # the first on the path counts
        for name in os.listdir(folder):
            project, version = distribution_of(name)
            label = normal(project)
            if version:
                versions[label] = version + (content(os.path.join(folder, name)) if label in wanted else "")
    return dict(sorted(versions.items()))


def content(folder: str) -> str:
    """Return a digest of a package from a folder or repository, as pipeline/keys/installed.py computes it; else ''."""
    if not os.path.exists(os.path.join(folder, "direct_url.json")):
        return ""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(os.path.join(folder, "RECORD"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    files = sorted(line for line in lines if not re.match(r"\.\.|/|[^,]*(\.dist-info/|\.pyc,)", line))
    digest = sha256("\n".join(files).encode())
    return f" (content {digest[:12]})"


def distribution_of(name: str) -> tuple[str, str]:
    """Return project and version from the name of a metadata folder; Debian's packages have x-1.0.egg-info."""
    if name.endswith(".dist-info"):
        project, _, version = name[: -len(".dist-info")].rpartition("-")
        return project, version
    legacy = name.endswith(".egg-info") and re.fullmatch(r"([^-]+)-([^-]+)(-py[\d.]+)?\.egg-info", name)
    return (legacy.group(1), legacy.group(2)) if legacy else ("", "")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules(names: list[str], python_path: list[str]) -> dict[str, str]:
    """Return the modules of ``names`` (dotted) that a rank could import → the version of their distribution.

    Nothing is imported. ``python_path`` are the folders of the ranks' PYTHONPATH.
    """
    if not names:  # usual: the names of folders show the distributions
        return {}
    path = [*python_path, *(entry for entry in sys.path if is_installed(entry))]
    return {name: version_of_module(name, path) for name in names if is_importable(name, path)}


def is_installed(entry: str) -> bool:
    """Whether ranks keep this entry of sys.path; trainers/distributed/isolation.py removes the others."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    place = os.path.realpath(entry)
    if any(f"{place}/".startswith(f"{os.path.realpath(folder)}/") for folder in folders):
        return True
    return bool(entry) and bool(glob.glob(os.path.join(glob.escape(place), "*.dist-info")))


def is_importable(name: str, path: list[str]) -> bool:
    for part in name.split("."):  # part by part, because a dotted name would import its parent
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return True


def version_of_module(name: str, path: list[str]) -> str:
    """Return the version by the file lists of installed packages; ``unknown`` if none has the module."""
    from importlib.metadata import distributions  # reads e-mail headers: much to import for a rare question

    begin = name.replace(".", "/")
    for distribution in distributions(path=path):
        files = distribution.read_text("RECORD") or ""
        top_level = (distribution.read_text("top_level.txt") or "").split()
        if re.search(rf"^{re.escape(begin)}[/.]", files, re.MULTILINE) or (not files and name in top_level):
            return distribution.version
    return "unknown"


def numa(system: str = "/sys") -> bool:
    """Whether torchrun can bind each rank to the cores near its GPU.

    It can if numactl exists, the system knows the NUMA node of each NVIDIA device, and this process may use cores of
    all
    these nodes.
    """
    if shutil.which("numactl") is None:
        return False
    try:
        vendors = glob.glob(f"{system}/bus/pci/devices/*/vendor")
        folders = [os.path.dirname(path) for path in vendors if text_of(path) == "0x10de"]
        nodes = {text_of(os.path.join(folder, "numa_node")) for folder in folders}
        cores = [cores_of(text_of(f"{system}/devices/system/node/node{node}/cpulist")) for node in nodes]
        return bool(cores) and all(node_cores & os.sched_getaffinity(0) for node_cores in cores)
    except (AttributeError, OSError, ValueError):  # a node of -1 has no folder; macOS tells no affinity
        return False


def text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def cores_of(ranges: str) -> set[int]:
    """Parse ``0-2,8`` into {0, 1, 2, 8}."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def login(request: Json) -> Json:
    """Return the machine behind this login, its TLS files, and its variables.

    ``env``: variables that decide where ranks run. ``left_behind``: relevant variables that don't reach the ranks.
    """
    return {
        "machine": machine(),
        "certificates": certificates(request.get("certificates", {})),
        "env": from_environment(request.get("env_names", [])),
        "left_behind": from_environment(request.get("env_families", []), but=request.get("env_passed", [])),
    }


def pack_path(digest: str, places: list[str], workdir: str) -> str | None:
    """Return the place of the data pack with that digest, if it is there; '' means no pack."""
    folders = [*places, os.path.join(workdir, "data", digest)] if digest else []
    return next((folder for folder in folders if holds_pack(folder, digest)), None)


def software(names: list[str], python_path: list[str]) -> Json:
    """Return the installed packages, and the importable modules among ``names`` that no distribution is named after."""
    installed = packages(names)
    others = [name for name in names if normal(name) not in installed]
    return {"packages": installed, "modules": modules(others, python_path)}


def probe(request: Json, answer: Callable[..., object] = say) -> None:
    """Return the facts for a launch as one JSON object, with the field names of NodeFacts."""
    began = time.time()
    if request.get("warm"):
        warm_up(request["env_passed"], request["warm"])
    address, port = address_and_port(request)
    holding, ports = interfaces(), free_ports(4)
    workdir = os.path.expanduser(request["workdir"])
    unused = look_after(request, workdir)
    torch, cuda = torch_versions()
    answer(
        identity=identity(request),
        hostname=socket.gethostname(),
        address=address,
        interface=holding.get(address),
        python=sys.executable,
        python_version=".".join(map(str, sys.version_info[:3])),
        torch_version=torch,
        gpus=count_gpus(),
        cpus=count_cpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_free_bytes=free_bytes(workdir),
        free_port=ports[0],
        home=os.path.expanduser("~"),
        unix_time=time.time(),
        pack_path=pack_path(request.get("pack_digest", ""), request.get("pack_places", []), workdir),
        extra={
            "ssh_port": port,
            "ssh_address": address,
            "free_ports": ports,
            "interfaces": holding,
            **login(request),
            **software(request.get("modules", []), request.get("python_path", [])),
            "hardware": hardware(),
            "left": unused,
            "numa": numa(),
            "torch_cuda": cuda,
            "system": facts(request.get("gpu_s", 0.0)),
            "began": began,
        },
    )
