"""The checks of what each host offers the ranks: cores, memory, disk, limits, clock, network and GPUs. Pure.

A check that isn't ok is a warning, unless the code here names ``State.FAILED``, which stops the training.
They judge the facts of the last probe (``HostFacts``); about GPUs these contain the output of nvidia-smi, which is
parsed here. Whether hosts reach each other is checked by ``cluster/networks.py``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.cluster.launchers.base import workdir_of
from pipeline.cluster.preflight.judgement import ALL, Check, State, compared, judged
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted
from trainers.contract.host_facts import HostFacts, Limit, NvidiaSmi, ProbeTimes

_GIB = 1 << 30
# what is wanted, in bytes
RANK_MEMORY = _GIB  # torch with a small network needs half of it
DISK = 2 * _GIB
_SHARED_CPU, _SHARED_CUDA = 64 << 20, _GIB  # in /dev/shm: a container has 64 MiB by default, NCCL's channels need more
_LOCKED = 64 << 20  # NCCL registers more than that over InfiniBand
_FILES = 65536  # the number of open files that a hint proposes
_LIMITS = "/etc/security/limits.d/paceline.conf"


def checks(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Check each host; skip what its probe doesn't contain."""
    world_size = cluster.world_size  # not in the loop, as it is a sum over all hosts
    for host, fact in zip(cluster.hosts, facts, strict=True):
        yield _cores(host, fact)
        yield _memory(host, fact)
        free = f"free for {workdir_of(cluster)}"
        hint = "make room there, or cluster.workdir= a folder on another disk"
        yield _at_least(fact.host, "disk", fact.disk_free_bytes, DISK, free, hint)
        if fact.shared_memory_free_bytes is not None:
            yield _shared_memory(cluster, host, fact.shared_memory_free_bytes)
        if fact.limits is not None:
            yield _open_files(world_size, fact.host, fact.limits.open_files)
            yield from _locked_memory(cluster, host, fact, fact.limits.locked_memory_bytes)
    yield from _clocks(facts)
    yield from _network(cluster, facts)
    yield from _gpus(cluster, facts)


def _cores(host: Host, fact: HostFacts) -> Check:
    allowed = fact.control_group.cpus
    ranks = counted(host.nproc_per_node, "rank")
    # programs there start a thread for each core that they see, which are too many for a lower limit
    if allowed is not None and allowed < fact.cpus:
        seen = f"its control group allows {allowed:g} of {counted(fact.cpus, 'core')} to {ranks}"
        wanted = f"{fact.cpus}, which programs there see"
        hint = "a larger limit (docker run --cpus=…, systemctl set-property … CPUQuota=…), or fewer ranks"
        return judged(fact.host, "cores", seen, False, wanted=wanted, hint=hint)
    seen, is_ok = f"{counted(fact.cpus, 'core')} for {ranks}", fact.cpus >= host.nproc_per_node
    return judged(fact.host, "cores", seen, is_ok, wanted="one for each rank", hint="a smaller nproc_per_node")


def _memory(host: Host, fact: HostFacts) -> Check:
    available, total = fact.memory_available_bytes, f"of {_gib(fact.memory_bytes)}"
    limit = fact.control_group.memory_bytes
    if limit is not None:  # in a container: the smaller of both counts
        below_limit = limit - (fact.control_group.memory_used_bytes or 0)
        if available is None or below_limit < available:
            available, total = below_limit, f"of the {_gib(limit)} that its control group allows"
    if available is None:
        return Check(host=fact.host, name="memory", state=State.OK, seen=_gib(fact.memory_bytes))
    wanted = RANK_MEMORY * host.nproc_per_node
    hint = "end what takes it there, or fewer ranks: nproc_per_node"
    return _at_least(fact.host, "memory", available, wanted, total, hint)


def _shared_memory(cluster: Cluster, host: Host, free_bytes: int) -> Check:
    wanted = _SHARED_CUDA if cluster.device == "cuda" and host.nproc_per_node > 1 else _SHARED_CPU
    hint = "sudo mount -o remount,size=8G /dev/shm there; of a container: docker run --shm-size=8g"
    return _at_least(host.label, "shared memory", free_bytes, wanted, "free in /dev/shm", hint)


def _at_least(host: str, name: str, measured_bytes: int, wanted_bytes: int, of_what: str, hint: str) -> Check:
    seen, wanted = f"{_gib(measured_bytes)} {of_what}", f"at least {_gib(wanted_bytes)}"
    return judged(host, name, seen, measured_bytes >= wanted_bytes, wanted=wanted, hint=hint)


def _open_files(world_size: int, host: str, limit: Limit) -> Check:
    """Check the limit of open files, of which a rank needs the more the more ranks there are."""
    soft, hard = limit
    # With gloo each rank has a connection to each other one, and rank 0, which has the store, two from each.
    least, enough = 32 + 2 * world_size, max(512, 128 + 4 * world_size)
    if soft is None or soft >= enough:
        return judged(host, "open files", "no limit" if soft is None else f"{soft:,}", True)
    if hard is None or hard >= enough:  # a user may raise the soft limit up to the hard one
        hint = f"ulimit -n {min(hard or _FILES, _FILES)} in the login's start file there"
    else:
        hint = f"echo '* - nofile {_FILES}' | sudo tee -a {_LIMITS} there"
    return Check(
        host=host,
        name="open files",
        state=State.FAILED if soft < least else State.WARNING,
        seen=f"a process of the login may have {soft:,}",
        wanted=f"at least {enough:,} for {counted(world_size, 'rank')}",
        hint=hint,
    )


def _locked_memory(cluster: Cluster, host: Host, fact: HostFacts, limit: Limit) -> Iterator[Check]:
    soft = limit.soft
    active = [port for port in fact.infiniband if port.state == "ACTIVE"]
    if cluster.device != "cuda" or cluster.nnodes < 2 or not active or host.env.get("NCCL_IB_DISABLE") == "1":
        return
    yield judged(
        host.label,
        "locked memory",
        f"a process of the login may lock {soft >> 10:,} KiB" if soft is not None else "no limit",
        soft is None or soft >= _LOCKED,
        wanted="no limit, as NCCL registers its buffers with InfiniBand",
        hint=f"echo '* - memlock unlimited' | sudo tee -a {_LIMITS} there (docker run --ulimit memlock=-1), "
        "or ++cluster.env={NCCL_IB_DISABLE: '1'}",
        otherwise=State.FAILED,
    )


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB / 10 else f"{count / (1 << 20):.1f} MiB"


# ------------------------------------------------------------------------------------------------------------ clocks
TOLERATED_S = 2.0
_CLOCK_HINT = "sudo chronyc makestep there, or sudo timedatectl set-ntp true"


class Offset(NamedTuple):
    """How far a clock is ahead of this computer's clock (negative: behind), as measured."""

    offset_s: float
    error_s: float  # the true offset is at most this far away

    @property
    def at_least_s(self) -> float:
        """The smallest possible difference between both clocks."""
        return max(0.0, abs(self.offset_s) - self.error_s)


def offset(times: ProbeTimes | None) -> Offset | None:
    """Compute an offset like NTP (RFC 5905, section 8); None if the launcher didn't record the controller's times."""
    if times is None or times.controller_asked is None or times.controller_answered is None:
        return None
    there, back = times.host_began - times.controller_asked, times.host_ended - times.controller_answered
    return Offset((there + back) / 2, abs(there - back) / 2)


def _clocks(facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Check the clock of each host; if all hosts differ from this computer by the same offset, only this computer's."""
    offsets = {fact.host: measured for fact in facts if (measured := offset(fact.times)) is not None}
    ordered = sorted(measured.offset_s for measured in offsets.values())
    all_differ = len(ordered) > 1 and all(measured.at_least_s > TOLERATED_S for measured in offsets.values())
    if all_differ and ordered[-1] - ordered[0] <= TOLERATED_S:  # the hosts agree, so this computer's clock is wrong
        median_s = ordered[len(ordered) // 2]
        seen = f"this computer's is {_difference(-median_s)} those of all hosts, which agree"
        hint = _CLOCK_HINT.replace(" there", " here")
        yield judged(ALL, "clock", seen, False, wanted=f"within {TOLERATED_S:g} s", hint=hint)
        return
    for host, measured in offsets.items():
        seen = f"{_difference(measured.offset_s)} this computer's (±{measured.error_s:.2f} s)"
        is_ok = measured.at_least_s <= TOLERATED_S
        yield judged(host, "clock", seen, is_ok, wanted=f"within {TOLERATED_S:g} s", hint=_CLOCK_HINT)


def _difference(offset_s: float) -> str:
    return f"{abs(offset_s):.2f} s {'ahead of' if offset_s >= 0 else 'behind'}"


# ----------------------------------------------------------------------------------------------------------- network
_PORT_HINTS = {
    "INIT": "start the fabric's subnet manager (opensm)",
    "ARMED": "start the fabric's subnet manager (opensm)",
    "Polling": "check its cable and the switch's port",
    "Disabled": "ibportstate -D 0 PORT enable there",
    "Sleep": "check its cable and the switch's port",
}


def _network(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Check the network of the hosts, unless there is only one."""
    if cluster.nnodes < 2:
        return
    for fact in facts:
        yield from _own_name(fact)
    # host → the link of the interface that the collectives use
    links = {fact.host: link for fact in facts if (link := fact.links.get(fact.interface or "")) is not None}
    where = {fact.host: f" on {fact.interface}" for fact in facts}
    for host, link in links.items():
        is_up = link.state in ("up", "unknown")  # a loopback or a tunnel has no state
        hint = "sudo ip link set dev INTERFACE up there, or another interface by cluster.hosts[].interface"
        yield judged(host, "link", f"{link.state}{where[host]}", is_up, wanted="up", hint=hint)
    mtus = {host: str(link.mtu) for host, link in links.items() if link.mtu}
    hint = "sudo ip link set dev INTERFACE mtu N: packets larger than the smallest on the way get lost"
    yield from compared("MTU", mtus, state=State.WARNING, hint=hint, where=where)
    speeds = {host: f"{link.speed_mbit} Mbit/s" for host, link in links.items() if link.speed_mbit}
    hint = "check its cable and the switch's port (ethtool INTERFACE): the slowest link sets the pace of all"
    yield from compared("link speed", speeds, state=State.WARNING, hint=hint, where=where)
    yield from _infiniband(facts)


def _own_name(fact: HostFacts) -> Iterator[Check]:
    """Check what the host's own name is resolved to: if no interface is configured, gloo announces that address."""
    if fact.own_name is None:
        return
    addresses, slow_s = fact.own_name
    hint = f"a line '{fact.address} {fact.hostname}' in its /etc/hosts, in place of 127.0.1.1"
    if slow_s is not None:
        seen = f"{fact.hostname} isn't resolved within {slow_s:g} s, for which torchrun waits several times"
        yield judged(fact.host, "host name", seen, False, wanted=f"{fact.address} at once", hint=hint)
        return
    # the host may choose the interface itself, by variables of the login such as GLOO_SOCKET_IFNAME
    has_interface = bool(fact.interface or fact.network_variables)
    # Debian's installer maps the host's name to 127.0.1.1, at which other hosts can't reach it
    is_loopback = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    is_ok = not is_loopback if addresses else has_interface
    unresolved = "not resolved, and need not be" if is_ok else "not resolved"
    yield judged(
        fact.host,
        "host name",
        f"{fact.hostname} is {', '.join(addresses) or unresolved}{'' if is_ok else ' there'}",
        is_ok,
        wanted=f"{fact.address}, where the other hosts reach it",
        hint=hint if has_interface else f"{hint}, or cluster.interface=",
        otherwise=State.WARNING if has_interface else State.FAILED,
    )


def _infiniband(facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Check that each port is active, and that the hosts have the same number of active ports and the same rate."""
    active, rates = {}, {}
    for fact in facts:
        for port in fact.infiniband:
            netdev = f", {port.netdev}" if port.netdev else ""
            state = f"{port.state} ({port.phys_state}), {port.rate}, {port.link_layer}{netdev}"
            seen, is_active = f"{port.device} port {port.port} is {state}", port.state == "ACTIVE"
            hint = _PORT_HINTS.get(port.state) or _PORT_HINTS.get(port.phys_state, "ibstatus there")
            yield judged(fact.host, "InfiniBand", seen, is_active, wanted="ACTIVE", hint=hint)
        active_ports = [port for port in fact.infiniband if port.state == "ACTIVE"]
        if fact.infiniband:
            active[fact.host] = counted(len(active_ports), "active port")
        if active_ports:
            rates[fact.host] = min(port.rate for port in active_ports)
    hint = "ibstatus on both hosts shows the difference"
    yield from compared("InfiniBand", active, state=State.WARNING, hint=hint)
    yield from compared("InfiniBand rate", rates, state=State.WARNING, hint=hint)


# ---------------------------------------------------------------------------------------------------------------- GPUs
_SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of clocks_throttle_reasons.active (nvml.h, nvmlClocksEventReason…), without limits that users configure."""


class Process(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    memory_mib: int | None
    program: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi describes it; None for values that its GPU or driver doesn't report."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    uncorrected_errors: int | None
    slowed_by: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()


def parse_gpus(output: NvidiaSmi | None) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's output; incomplete lines are skipped."""
    if output is None:
        return []
    slowed_by = _parse_throttling(output.throttling)
    processes: dict[str, list[Process]] = {}  # GPU's uuid → processes
    for uuid, pid, memory, program in rows(output.processes, 4):
        if pid.isdecimal():
            processes.setdefault(uuid, []).append(Process(int(pid), _number(memory), program))
    return [
        Gpu(
            index=int(index),
            uuid=uuid,
            name=name,
            memory_mib=_number(memory),
            uncorrected_errors=_number(errors),
            slowed_by=slowed_by.get(int(index), ()),
            processes=tuple(processes.get(uuid, ())),
        )
        for index, uuid, name, memory, errors in rows(output.devices or "", 5)
        if index.isdecimal()
    ]


def rows(text: str, count: int) -> Iterator[list[str]]:
    """Yield the cells of each comma-separated line that has ``count`` cells; the last cell may contain commas."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", count - 1)]
        if len(cells) == count:
            yield cells


def _parse_throttling(text: str) -> dict[int, tuple[str, ...]]:
    """Parse ``0, 0x0000000000000020`` as {0: ("heat (software)",)}: GPU's index → what slows it down."""
    masks = {int(index): int(mask, 16) for index, mask in rows(text, 2) if index.isdecimal() and mask.startswith("0x")}
    return {index: tuple(why for bit, why in _SLOWED_BY.items() if mask & bit) for index, mask in masks.items()}


def _number(cell: str) -> int | None:
    """Return a number; None for ``[N/A]``, ``N/A`` and ``[Not Supported]``."""
    return int(cell) if cell.isdecimal() else None


def unanswered(cluster: Cluster, facts: Sequence[HostFacts], waited_s: float) -> Iterator[Check]:
    """Yield a warning for each host whose nvidia-smi reports no GPUs although ranks need them."""
    for fact in facts if cluster.device == "cuda" else ():
        if parse_gpus(fact.nvidia_smi):
            continue
        hint = "sudo dmesg | grep -i xid there; sudo nvidia-smi -pm 1 keeps the driver loaded"
        if fact.nvidia_smi is None:
            seen, hint = "nvidia-smi isn't on the login's PATH", "install NVIDIA's utils for the driver"
        elif fact.nvidia_smi.devices is not None:
            seen = f"nvidia-smi says {fact.nvidia_smi.devices!r}"
        else:
            seen = f"nvidia-smi gave no answer within {waited_s:g} s"
        yield judged(fact.host, "nvidia-smi", seen, False, wanted="an answer", hint=hint)


def _gpus(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[Check]:
    if cluster.device != "cuda":
        return
    pairs = zip(cluster.hosts, facts, strict=True)
    gpus = {fact.host: _visible(host, parse_gpus(fact.nvidia_smi)) for host, fact in pairs}
    models = {host: _models(visible) for host, visible in gpus.items() if visible}
    yield from compared("GPU model", models, state=State.WARNING, hint="the slowest GPU sets the pace of all")
    sizes = {host: [gpu.memory_mib for gpu in visible if gpu.memory_mib] for host, visible in gpus.items()}
    smallest = {host: f"{min(mib)} MiB" for host, mib in sizes.items() if mib}
    yield from compared("GPU memory", smallest, state=State.WARNING, hint="the smallest memory limits the batch of all")
    for host, visible in gpus.items():
        for gpu in visible:
            yield from _gpu(host, gpu)


def _visible(host: Host, gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs that the ranks see; CUDA_VISIBLE_DEVICES names them by index or by the beginning of a uuid."""
    chosen = {**host.placement, **host.env}.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [gpu for gpu in gpus if str(gpu.index) in names or any(gpu.uuid.startswith(name) for name in names)]


def _models(gpus: Sequence[Gpu]) -> str:
    """Return ``8 × NVIDIA H200``."""
    names = dict.fromkeys(gpu.name for gpu in gpus)
    return ", ".join(f"{sum(gpu.name == name for gpu in gpus)} × {name}" for name in names)


def _gpu(host: str, gpu: Gpu) -> Iterator[Check]:
    """Check one GPU: memory errors, slowdown, and processes on it."""
    which = f"GPU {gpu.index}"
    if gpu.uncorrected_errors is not None:
        seen = f"{which}: {counted(gpu.uncorrected_errors, 'uncorrectable memory error')} since its driver was loaded"
        hint = f"sudo nvidia-smi --gpu-reset -i {gpu.index} there, or other GPUs by CUDA_VISIBLE_DEVICES in "
        hint += "cluster.hosts[].env"
        is_ok = gpu.uncorrected_errors == 0
        yield judged(host, "GPU errors", seen, is_ok, wanted="0", hint=hint, otherwise=State.FAILED)
    seen = f"{which} is slowed down by {' and '.join(gpu.slowed_by)}" if gpu.slowed_by else f"{which} runs freely"
    hint = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index} there"
    yield judged(host, "GPU clocks", seen, not gpu.slowed_by, hint=hint)
    names = [f"{process.program} (pid {process.pid}{_memory_of(process)})" for process in gpu.processes]
    seen = f"{which} is used by {', '.join(names)}" if names else f"{which} is free"
    hint = f"ps -fp {','.join(str(process.pid) for process in gpu.processes)} there shows whose"
    yield judged(host, "GPU processes", seen, not names, hint=hint)


def _memory_of(process: Process) -> str:
    return f", {process.memory_mib} MiB" if process.memory_mib is not None else ""
