"""Whether the hosts have the same Python, NCCL, CUDA and driver. Pure.

torch's own release is compared by ``validation.validate``, and both with the run's key by ``host_versions``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.cluster.preflight.judgement import Check, State, compared
from pipeline.core.specs import Cluster, NodeFacts

# CUDA's major release → the first driver for it (docs.nvidia.com/deploy/cuda-compatibility, minor versions)
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def checks(cluster: Cluster, facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Of GPU software only where the ranks use GPUs."""
    install = "install the same version everywhere, or set cluster.python"
    pythons = {fact.host: ".".join(fact.python_version.split(".")[:2]) for fact in facts}
    yield from compared("Python", pythons, state=State.WARNING, hint=install)
    if cluster.device != "cuda":
        return
    nccl = {fact.host: version for fact in facts if (version := _nccl(fact))}
    yield from compared("NCCL", nccl, state=State.FAILED, hint=f"NCCL refuses ranks of another version: {install}")
    cuda = {fact.host: fact.extra["torch_cuda"] for fact in facts if fact.extra.get("torch_cuda")}
    yield from compared("CUDA", cuda, state=State.WARNING, hint=f"torch was built with it: {install}")
    drivers = {fact.host: driver for fact in facts if (driver := fact.extra.get("hardware", {}).get("gpu_driver"))}
    yield from compared("GPU driver", drivers, state=State.WARNING, hint="install the same driver everywhere")
    for host in drivers:
        if host in cuda:
            yield from _driver_too_old(host, drivers[host], cuda[host])


def _nccl(fact: NodeFacts) -> str | None:
    """That of NVIDIA's package, which torch's own packages require; a torch from elsewhere brings its NCCL along."""
    packages = fact.extra.get("packages", {})
    return next((version for name, version in packages.items() if re.fullmatch(r"nvidia-nccl-cu\d+", name)), None)


def _driver_too_old(host: str, driver: str, cuda: str) -> Iterator[Check]:
    oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0) if cuda[:1].isdecimal() else 0
    if int(driver.partition(".")[0]) < oldest:
        yield Check(
            host=host,
            name="GPU driver",
            state=State.WARNING,  # with NVIDIA's package for forward compatibility it may do all the same
            seen=f"{driver}, and torch was built with CUDA {cuda}",
            wanted=f"{oldest} or newer",
            hint="install a newer driver, or a torch for an older CUDA",
        )
