"""The resources of a host for the ranks: cores, memory, disk, shared memory, open files, locked memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.cluster.preflight.judgement import Check, State, judged
from pipeline.core.specs import Cluster, Host, NodeFacts
from pipeline.core.tables import counted

_GIB = 1 << 30
RANK_MEMORY = _GIB  # bytes; torch with a small network needs half of it
DISK = 2 * _GIB
_SHARED_CPU, _SHARED_CUDA = 64 << 20, _GIB  # a container's default is 64 MiB; NCCL's channels need more
_LOCKED = 64 << 20  # NCCL registers more than that over InfiniBand
_FILES = 65536
_LIMITS = "/etc/security/limits.d/paceline.conf"


def checks(cluster: Cluster, facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Check the resources of each host; what its probe doesn't contain is skipped."""
    world_size = cluster.world_size  # a sum over all hosts
    for host, fact in zip(cluster.hosts, facts, strict=True):
        system = fact.extra.get("system", {})
        yield _cores(host, fact, system)
        yield _memory(host, fact, system)
        free = f"free for {cluster.workdir or '~/.cache/paceline'}"
        hint = "make room there, or cluster.workdir= a folder on another disk"
        yield _at_least(fact.host, "disk", fact.disk_free_bytes, DISK, free, hint)
        if system.get("shared_memory"):
            yield _shared_memory(cluster, host, system["shared_memory"])
        if system.get("limits"):
            yield _open_files(world_size, fact.host, *system["limits"]["open_files"])
            yield from _locked_memory(cluster, host, system)


def _cores(host: Host, fact: NodeFacts, system: dict[str, Any]) -> Check:
    allowed = system.get("cgroup", {}).get("cpus")
    ranks = counted(host.nproc_per_node, "rank")
    if allowed is not None and allowed < fact.cpus:
        seen = f"its control group allows {allowed:g} of {counted(fact.cpus, 'core')} to {ranks}"
        wanted = f"{fact.cpus}, which programs there see"
        hint = "a larger limit (docker run --cpus=…, systemctl set-property … CPUQuota=…), or fewer ranks"
        return judged(fact.host, "cores", seen, False, wanted=wanted, hint=hint)
    seen, is_ok = f"{counted(fact.cpus, 'core')} for {ranks}", fact.cpus >= host.nproc_per_node
    return judged(fact.host, "cores", seen, is_ok, wanted="one for each rank", hint="a smaller nproc_per_node")


def _memory(host: Host, fact: NodeFacts, system: dict[str, Any]) -> Check:
    left, limit = system.get("memory_available_bytes"), system.get("cgroup", {}).get("memory_bytes")
    whose = f"of {_gib(fact.memory_bytes)}"
    if limit is not None:
        within = limit - (system["cgroup"].get("memory_used_bytes") or 0)
        if left is None or within < left:
            left, whose = within, f"of the {_gib(limit)} that its control group allows"
    if left is None:
        return Check(host=fact.host, name="memory", state=State.OK, seen=_gib(fact.memory_bytes))
    wanted = RANK_MEMORY * host.nproc_per_node
    return _at_least(
        fact.host, "memory", left, wanted, whose, "end what takes it there, or fewer ranks: nproc_per_node"
    )


def _shared_memory(cluster: Cluster, host: Host, shm: dict[str, int]) -> Check:
    wanted = _SHARED_CUDA if cluster.device == "cuda" and host.nproc_per_node > 1 else _SHARED_CPU
    hint = "sudo mount -o remount,size=8G /dev/shm there; of a container: docker run --shm-size=8g"
    return _at_least(host.label, "shared memory", shm["free_bytes"], wanted, "free in /dev/shm", hint)


def _at_least(host: str, name: str, measured: int, wanted: int, what: str, hint: str) -> Check:
    seen = f"{_gib(measured)} {what}"
    return judged(host, name, seen, measured >= wanted, wanted=f"at least {_gib(wanted)}", hint=hint)


def _open_files(world_size: int, host: str, soft: int | None, hard: int | None) -> Check:
    """Check the limit: each rank has a connection to each other one (gloo), and rank 0 with its store two from each."""
    least, enough = 32 + 2 * world_size, max(512, 128 + 4 * world_size)
    if soft is None or soft >= enough:
        return judged(host, "open files", "no limit" if soft is None else f"{soft:,}", True)
    if hard is None or hard >= enough:
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


def _locked_memory(cluster: Cluster, host: Host, system: dict[str, Any]) -> Iterator[Check]:
    """Check the limit where NCCL would use InfiniBand or RoCE."""
    soft = system["limits"]["locked_memory_bytes"][0]
    active = [port for port in system.get("infiniband", []) if port["state"] == "ACTIVE"]
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
