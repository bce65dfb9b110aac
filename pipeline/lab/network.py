"""The record of a lab in its folder (state.json), and its network, made with ``ip``.

All hosts are connected to a bridge, and an uplink connects the controller to it. The bridge has a network namespace of
its own: in the controller's, firewall rules for forwarded packets (Docker's ``FORWARD DROP`` with br_netfilter) would
drop the traffic between two hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import HostError, suggestion
from pipeline.core.files import write_json
from pipeline.core.processes import process

_VERSION = 1  # of state.json
_END_S = 10.0
# n hosts that all speak with each other learn n² hardware addresses, and a kernel holds 1,024 of them in all namespaces
# together (gc_thresh3). In a lab of more than 24 hosts they are set in advance. A dead host is then silent instead of
# unreachable.
_MOST_LEARNED = 24
_NETNS = Path("/run/netns")
_NETNS_OURS = Path("/run/paceline-made-netns")  # exists while a lab is the reason that /run/netns exists
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # a plain user's PATH often lacks sbin
_PACKAGES = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "mount": "mount",
}
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # name → bit number in linux/capability.h
_OWN_HOSTS = "or train on hosts of your own: doit train cluster=pssh cluster.hostfile=FILE"
_COMMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One host of the lab. Process ids are those in the controller's /proc; None: not running."""

    name: str
    address: str
    namespace: str
    folder: Path
    init_pid: int | None
    sshd_pid: int | None

    @property
    def scratch(self) -> Path:
        """The folder of the folders that the host sees as its home, /tmp, /var/tmp and project."""
        return self.folder / "scratch"

    @property
    def home(self) -> Path:
        """The host's ``~``, as a path of the controller."""
        return self.scratch / "home"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The lab of one project folder."""

    id: str
    root: Path
    subnet: str  # such as 10.83.7.0/24
    hosts: tuple[LabHost, ...]  # node0, node1, …

    @property
    def ssh_config(self) -> Path:
        return folder(self.root) / "ssh_config"

    @property
    def switch(self) -> str:
        """Name of the namespace with the bridge; each host's port in it has the host's name."""
        return namespace(self.id, "switch")

    @property
    def running(self) -> bool:
        """True if every host's ssh server lives."""
        return all(host.sshd_pid is not None for host in self.hosts)

    def host(self, name: str) -> LabHost:
        """Return the host of that name. Raises HostError with the valid names."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise HostError(f"lab: no host {name!r}; {suggestion(name, [host.name for host in self.hosts])}")


def folder(root: Path) -> Path:
    return root / ".lab"


def lab_id(root: Path) -> str:
    """Return eight hex digits of the path's digest: by them a lab's namespaces are found even without its record."""
    return hashlib.sha256(str(root).encode()).hexdigest()[:8]


def namespace(id_: str, name: str) -> str:
    return f"pl-{id_}-{name}"


def uplink(id_: str) -> str:
    """Return the controller's interface into the lab (at most 15 characters, IFNAMSIZ)."""
    return f"pl{id_}"


def write_record(root: Path, id_: str, hosts: int, subnet: str) -> None:
    """Record the lab that is about to be made. All its names and addresses follow from these values."""
    record = {"version": _VERSION, "id": id_, "root": str(root), "hosts": hosts, "subnet": subnet}
    write_json(folder(root) / "state.json", record)


def load(root: Path) -> Lab | None:
    """Return the recorded lab with the processes that live now; None: none is recorded in this folder."""
    record = _read_record(root)
    if record is None or _is_copy(root, record):
        return None
    base = record["subnet"].rsplit(".", 1)[0]  # the first three numbers of its addresses
    hosts = tuple(_host(root, record["id"], index, base) for index in range(record["hosts"]))
    return Lab(id=record["id"], root=Path(record["root"]), subnet=record["subnet"], hosts=hosts)


def _read_record(root: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder(root) / "state.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) and record.get("version") == _VERSION else None


def _is_copy(root: Path, record: dict[str, Any]) -> bool:
    """Return True if the record came here with a copy of another project folder, to which the lab belongs.

    If that folder has no such record any more, it was moved here, and the lab with it.
    """
    origin = Path(record["root"])
    if origin == root:
        return False
    record_there = _read_record(origin)
    return record_there is not None and record_there["id"] == record["id"]


def _host(root: Path, id_: str, index: int, base: str) -> LabHost:
    name = f"node{index}"
    host_folder = folder(root) / name
    init = _live_init(host_folder)
    return LabHost(
        name=name,
        address=f"{base}.{10 + index}",
        namespace=namespace(id_, name),
        folder=host_folder,
        init_pid=init,
        sshd_pid=None if init is None else _child(init, "sshd"),
    )


def _live_init(host_folder: Path) -> int | None:
    """Return the pid in ``host_folder/init`` if that process still runs; None if not."""
    try:
        pid, started = (host_folder / "init").read_text().split()
        return int(pid) if _stat(int(pid))[19] == started else None  # another process with its pid began later
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None


def _child(parent: int, name: str) -> int | None:
    """Return the pid of the parent's child process of this name; None: there is none."""
    with contextlib.suppress(OSError):  # a process has just ended
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_bytes() == f"{name}\n".encode() and _stat(int(pid)):
                return int(pid)
    return None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name. Raises ProcessLookupError, FileNotFoundError: it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX":  # a zombie, or dead
        raise ProcessLookupError(pid)
    return fields


# ------------------------------------------------------------------------------------------- this computer, its network
def missing() -> HostError | None:
    """Return the error if no lab can run here, with the way to get what is missing; None: a lab can run."""
    if sys.platform != "linux":
        return HostError(
            f"the lab needs Linux (network namespaces); this is {sys.platform}",
            hint="doit train cluster=pssh cluster.hostfile=FILE, with hosts of your own",
        )
    absent = [program for program in _PACKAGES if shutil.which(program, path=PATH) is None]
    if absent:
        packages = sorted({_PACKAGES[program] for program in absent})
        return HostError(
            f"the lab needs {', '.join(absent)}, not found in {PATH}",
            hint=f"sudo apt-get install {' '.join(packages)}   ({_OWN_HOSTS})",
        )
    if os.geteuid() != 0:
        return HostError(
            f"the lab needs root (network namespaces); this is uid {os.geteuid()}",
            hint=f'sudo "$(command -v doit)" lab --hosts 2   ({_OWN_HOSTS})',
        )
    # root of a container may lack capabilities
    effective = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    mask = int(effective[1], 16) if effective else 0
    lacking = [name for name, bit in _CAPABILITIES.items() if not mask >> bit & 1]
    if lacking:
        return HostError(
            f"the lab needs {' and '.join(lacking)}, which this container's root does not have",
            hint=f"docker run --privileged …   ({_OWN_HOSTS})",
        )
    return None


def command(*argv: str, stdin: str = "") -> str:
    """Run a system command in a clean environment and return its stdout. Raises HostError: it failed."""
    done = process.run(argv, input=stdin.encode(), timeout_s=_COMMAND_TIMEOUT_S, env={"PATH": PATH, "LC_ALL": "C"})
    if done.code != 0:
        stderr = " ".join(done.stderr.split()) or "(nothing)"
        raise HostError(
            f"lab: `{' '.join(argv)}` ended with {done.code} and said: {stderr}", hint="doit lab --down, then again"
        )
    return done.stdout


def free_subnet(id_: str) -> str:
    """Return a /24 that overlaps no address and no route (except the default route) of this computer.

    Nothing but the kernel's tables says what is in use. So the caller must hold the lab's lock until the uplink has its
    address.
    """
    links = json.loads(command("ip", "-4", "-j", "addr") or "[]")
    in_use = [f"{address['local']}/{address['prefixlen']}" for link in links for address in link.get("addr_info", ())]
    routes = json.loads(command("ip", "-4", "-j", "route", "show", "table", "all") or "[]")
    in_use += [route["dst"] for route in routes if route["dst"] != "default"]
    others = [ipaddress.ip_network(text, strict=False) for text in in_use]
    start = int(id_, 16)  # a lab that is made again gets the same addresses if it can
    for block in ("10.83", "198.18", "198.19"):
        for index in range(256):
            subnet = ipaddress.ip_network(f"{block}.{(start + index) % 256}.0/24")
            if not any(subnet.overlaps(other) for other in others):
                return str(subnet)
    raise HostError("lab: no free /24 in 10.83.0.0/16 and 198.18.0.0/15", hint="ip route, and free one of them")


def connect(lab: Lab) -> None:
    """Make the namespaces, the bridge and the links. Raises HostError with what ``ip`` said."""
    if not _NETNS.exists():
        _NETNS_OURS.touch()
    for name in (lab.switch, *(host.namespace for host in lab.hosts)):
        command("ip", "netns", "add", name)
    device, base = uplink(lab.id), lab.subnet.rsplit(".", 1)[0]
    lines = [
        f"link add {device} type veth peer name uplink netns {lab.switch}",
        f"addr add {base}.1/24 dev {device}",
        f"link set {device} up",
    ]
    ports = ["link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up", "link set uplink master br0 up"]
    for host in lab.hosts:
        lines.append(f"link add {host.name} netns {lab.switch} type veth peer name eth0 netns {host.namespace}")
        ports.append(f"link set {host.name} master br0 up")
    # one process of ip for all links instead of one for each
    command("ip", "-batch", "-", stdin="\n".join(lines))
    command("ip", "-n", lab.switch, "-batch", "-", stdin="\n".join(ports))
    for host in lab.hosts:
        inside = ["link set lo up", f"link set eth0 address {_hardware(host)}"]
        inside += [f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
        if len(lab.hosts) > _MOST_LEARNED:
            entries = ((other.address, _hardware(other)) for other in lab.hosts if other != host)
            inside += [f"neigh add {address} lladdr {hardware} dev eth0 nud permanent" for address, hardware in entries]
        command("ip", "-n", host.namespace, "-batch", "-", stdin="\n".join(inside))


def _hardware(host: LabHost) -> str:
    """Return the hardware address of its network card: 02:… are those that anybody may choose (IEEE 802)."""
    return ":".join(["02", "00", *(f"{part:02x}" for part in ipaddress.ip_address(host.address).packed)])


def namespaces(id_: str) -> list[str]:
    """Return the lab's namespaces that exist now, whatever its record says."""
    prefix = namespace(id_, "")
    existing = json.loads(command("ip", "-j", "netns", "list") or "[]")
    return sorted(entry["name"] for entry in existing if entry["name"].startswith(prefix))


def disconnect(id_: str) -> list[str]:
    """End every process in the lab's namespaces, remove them and the uplink; return the names of what was removed."""
    removed = [*namespaces(id_), *([uplink(id_)] if _exists(uplink(id_)) else [])]
    for name in namespaces(id_):
        end_processes(name)
        command("ip", "netns", "delete", name)
    if uplink(id_) in removed:
        try:
            command("ip", "link", "delete", uplink(id_))
        except HostError:
            # the kernel may have removed it just now, after the namespace of its other end
            if _exists(uplink(id_)):
                raise
    _remove_netns_folder()
    return removed


def _exists(device: str) -> bool:
    return device in [link["ifname"] for link in json.loads(command("ip", "-j", "link") or "[]")]


def _remove_netns_folder() -> None:
    """Remove /run/netns if a lab's first ``ip netns add`` has made it and nobody's namespace is in it any more."""
    if not _NETNS_OURS.exists() or (_NETNS.exists() and any(_NETNS.iterdir())):
        return
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if str(_NETNS) in mounted:  # a folder bound to itself, which Path.is_mount() can't see
        command("umount", "--no-mtab", str(_NETNS))
    if _NETNS.exists():
        _NETNS.rmdir()
    _NETNS_OURS.unlink()


def end_processes(name: str) -> None:
    """Send SIGKILL to all processes of a network namespace until none is left. Raises HostError after 10 s."""
    deadline = time.monotonic() + _END_S
    while pids := command("ip", "netns", "pids", name).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise HostError(f"lab: processes {', '.join(pids)} in {name} survive SIGKILL", hint="doit lab --down")
        time.sleep(0.01)


def cut(lab: Lab, host: str) -> None:
    """Cut the host's link: packets are lost both ways without a reply."""
    command("ip", "-n", lab.switch, "link", "set", lab.host(host).name, "down")


def restore(lab: Lab, host: str) -> None:
    """Undo ``cut`` and ``limit``."""
    command("ip", "-n", lab.switch, "link", "set", lab.host(host).name, "up")
    for name, device in _ends(lab, host):
        if "tbf" in command("tc", "-n", name, "qdisc", "show", "dev", device):
            command("tc", "-n", name, "qdisc", "delete", "dev", device, "root")


def limit(lab: Lab, host: str, rate_mbit: float) -> None:
    """Limit the host's link to ``rate_mbit`` (10^6 bits/s) each way. Needs ``tc`` and the kernel's sch_tbf."""
    burst_bytes = max(64 << 10, int(rate_mbit * 1e6 / 8 * 0.004))  # a few timer ticks: less would never reach the rate
    rate = [f"rate {rate_mbit}mbit", f"burst {burst_bytes}b", "latency 100ms"]
    for name, device in _ends(lab, host):
        words = " ".join(["qdisc", "replace", "dev", device, "root", "tbf", *rate]).split()
        command("tc", "-n", name, *words)


def _ends(lab: Lab, host: str) -> list[tuple[str, str]]:
    """Return (namespace, interface) of both ends of the host's link; a limit at an end holds for what leaves there."""
    return [(lab.switch, lab.host(host).name), (lab.host(host).namespace, "eth0")]
