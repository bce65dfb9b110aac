"""What a lab is: its names, where its files lie, and which of its processes live."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import HostError, suggestion
from pipeline.core.files import write_json

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One host of the lab. Process ids are the ones that the controller sees; None: not running.

    ``scratch`` holds the folders that the host has as its home, /tmp and /var/tmp.
    """

    name: str
    address: str
    namespace: str
    folder: Path
    init_pid: int | None
    sshd_pid: int | None

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    @property
    def home(self) -> Path:
        """Where the controller sees the files that the host has in its ``~``."""
        return self.scratch / "home"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The lab of one project folder. ``subnet`` like ``10.83.7.0/24``; hosts ordered by number."""

    id: str
    root: Path
    subnet: str
    hosts: tuple[LabHost, ...]

    @property
    def ssh_config(self) -> Path:
        return folder(self.root) / "ssh_config"

    @property
    def switch(self) -> str:
        """Name of the namespace that holds the bridge and one port per host, named as the host."""
        return namespace(self.id, "switch")

    @property
    def running(self) -> bool:
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
    """Return eight hex digits of the path's digest, so that a lab is found again when its folder was lost."""
    return hashlib.sha256(str(root).encode()).hexdigest()[:8]


def namespace(id_: str, name: str) -> str:
    return f"pl-{id_}-{name}"


def uplink(id_: str) -> str:
    """Return the controller's interface into the lab (at most 15 characters, IFNAMSIZ)."""
    return f"pl{id_}"


def journal(root: Path, id_: str, hosts: int, subnet: str) -> None:
    """Record the lab that is about to be made; everything else follows from these four values."""
    record = {"version": _VERSION, "id": id_, "root": str(root), "hosts": hosts, "subnet": subnet}
    write_json(folder(root) / "state.json", record)


def load(root: Path) -> Lab | None:
    """Return the lab of the journal, with the processes that live now; None: there is no journal."""
    record = _read(root)
    if record is None or _is_copy(root, record):
        return None
    base = record["subnet"].rsplit(".", 1)[0]
    hosts = tuple(_host(root, record["id"], f"node{index}", f"{base}.{10 + index}") for index in range(record["hosts"]))
    return Lab(id=record["id"], root=Path(record["root"]), subnet=record["subnet"], hosts=hosts)


def _read(root: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder(root) / "state.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) and record.get("version") == _VERSION else None


def _is_copy(root: Path, record: dict[str, Any]) -> bool:
    """Whether the whole checkout was copied: the lab then belongs to the folder it was copied from."""
    origin = Path(record["root"])
    if origin == root:
        return False
    record_there = _read(origin)
    return record_there is not None and record_there["id"] == record["id"]


def _host(root: Path, id_: str, name: str, address: str) -> LabHost:
    host_folder = folder(root) / name
    init = _live_init(host_folder)
    return LabHost(
        name=name,
        address=address,
        namespace=namespace(id_, name),
        folder=host_folder,
        init_pid=init,
        sshd_pid=None if init is None else _child(init, "sshd"),
    )


def _live_init(host_folder: Path) -> int | None:
    """Return the pid in ``host_folder/init`` if that very process (same start time) still runs."""
    try:
        pid, started = (host_folder / "init").read_text().split()
        return int(pid) if _stat(int(pid))[19] == started else None
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None


def _child(parent: int, name: str) -> int | None:
    with contextlib.suppress(OSError):  # one has just ended
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_bytes() == f"{name}\n".encode() and _stat(int(pid)):
                return int(pid)
    return None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name. Raises ProcessLookupError, FileNotFoundError: it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return fields
