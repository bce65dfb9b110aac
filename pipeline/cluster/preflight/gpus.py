"""Parse and check nvidia-smi's answers about a host's GPUs. Pure: the agent sends them unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.cluster.preflight.judgement import Check, State, compared, judged
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted
from trainers.contract.host_facts import HostFacts, NvidiaSmi

# bits of clocks_throttle_reasons.active, without those that are configured (nvml.h, nvmlClocksEventReason…)
_SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}


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


def parse(output: NvidiaSmi | None) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's output; incomplete lines are skipped."""
    if output is None:
        return []
    slowed = _slowed(output.throttling)
    processes: dict[str, list[Process]] = {}
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
            slowed_by=slowed.get(int(index), ()),
            processes=tuple(processes.get(uuid, ())),
        )
        for index, uuid, name, memory, errors in rows(output.devices or "", 5)
        if index.isdecimal()
    ]


def rows(text: str, count: int) -> Iterator[list[str]]:
    """Yield the cells of each line that has so many; the last one may hold commas."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", count - 1)]
        if len(cells) == count:
            yield cells


def _slowed(text: str) -> dict[int, tuple[str, ...]]:
    """Parse ``0, 0x0000000000000020`` as {0: ("heat (software)",)}."""
    masks = {int(index): int(mask, 16) for index, mask in rows(text, 2) if index.isdecimal() and mask.startswith("0x")}
    return {index: tuple(why for bit, why in _SLOWED_BY.items() if mask & bit) for index, mask in masks.items()}


def _number(cell: str) -> int | None:
    """Return a number; None for ``[N/A]``, ``N/A`` and ``[Not Supported]``."""
    return int(cell) if cell.isdecimal() else None


def unanswered(cluster: Cluster, facts: Sequence[HostFacts], waited_s: float) -> Iterator[Check]:
    """Yield a failed check for each host whose nvidia-smi reports no GPUs although ranks need them."""
    for fact in facts if cluster.device == "cuda" else ():
        if parse(fact.nvidia_smi):
            continue
        hint = "sudo dmesg | grep -i xid there; sudo nvidia-smi -pm 1 keeps the driver loaded"
        if fact.nvidia_smi is None:
            seen, hint = "nvidia-smi isn't on the login's PATH", "install NVIDIA's utils for the driver"
        elif fact.nvidia_smi.devices is not None:
            seen = f"nvidia-smi says {fact.nvidia_smi.devices!r}"
        else:
            seen = f"nvidia-smi gave no answer within {waited_s:g} s"
        yield judged(fact.host, "nvidia-smi", seen, False, wanted="an answer", hint=hint)


def checks(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Compare models and memory over the hosts; check errors, clocks and processes of each GPU that ranks may use."""
    if cluster.device != "cuda":
        return
    pairs = zip(cluster.hosts, facts, strict=True)
    gpus = {fact.host: _visible(host, parse(fact.nvidia_smi)) for host, fact in pairs}
    models = {host: _models(visible) for host, visible in gpus.items() if visible}
    yield from compared("GPU model", models, state=State.WARNING, hint="the slowest GPU sets the pace of all")
    sizes = {host: [gpu.memory_mib for gpu in visible if gpu.memory_mib] for host, visible in gpus.items()}
    least = {host: f"{min(visible)} MiB" for host, visible in sizes.items() if visible}
    yield from compared("GPU memory", least, state=State.WARNING, hint="the smallest memory limits the batch of all")
    for host, visible in gpus.items():
        for gpu in visible:
            yield from _judged(host, gpu)


def _visible(host: Host, gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs that the configuration doesn't hide from the ranks."""
    chosen = {**host.placement, **host.env}.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [gpu for gpu in gpus if str(gpu.index) in names or any(gpu.uuid.startswith(name) for name in names)]


def _models(gpus: Sequence[Gpu]) -> str:
    names = dict.fromkeys(gpu.name for gpu in gpus)
    return ", ".join(f"{sum(gpu.name == name for gpu in gpus)} × {name}" for name in names)


def _judged(host: str, gpu: Gpu) -> Iterator[Check]:
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
    names = [f"{process.program} (pid {process.pid}{_holding(process)})" for process in gpu.processes]
    seen = f"{which} is used by {', '.join(names)}" if names else f"{which} is free"
    hint = f"ps -fp {','.join(str(process.pid) for process in gpu.processes)} there shows whose"
    yield judged(host, "GPU processes", seen, not names, hint=hint)


def _holding(process: Process) -> str:
    return f", {process.memory_mib} MiB" if process.memory_mib is not None else ""
