"""Compare the hosts' Python and libraries with the run's key, and their NCCL, CUDA and driver with each other. Pure.

``validation.validate_hosts`` compares the releases of torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from pipeline.cluster.preflight.judgement import Check, State, compared, judged
from pipeline.core.errors import HostError
from pipeline.core.printable import hydra_value
from pipeline.core.specs import Cluster
from pipeline.keys import ABSENT, IMAGE
from pipeline.keys.installed import normal_name
from trainers.contract.host_facts import HostFacts

# CUDA's major release → its oldest driver (docs.nvidia.com/deploy/cuda-compatibility, minor versions)
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def checks(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Compare Python and, if the ranks use GPUs, the GPU software."""
    install = "install the same version everywhere, or set cluster.python"
    pythons = {fact.host: ".".join(fact.python_version.split(".")[:2]) for fact in facts}
    yield from compared("Python", pythons, state=State.WARNING, hint=install)
    if cluster.device != "cuda":
        return
    nccl = {fact.host: version for fact in facts if (version := _nccl(fact))}
    yield from compared("NCCL", nccl, state=State.FAILED, hint=f"NCCL refuses ranks of another version: {install}")
    cuda = {fact.host: fact.torch_cuda for fact in facts if fact.torch_cuda}
    yield from compared("CUDA", cuda, state=State.WARNING, hint=f"torch was built with it: {install}")
    drivers = {fact.host: fact.hardware.gpu_driver for fact in facts if fact.hardware.gpu_driver}
    yield from compared("GPU driver", drivers, state=State.WARNING, hint="install the same driver everywhere")
    for host in drivers:
        if host in cuda:
            yield from _driver_too_old(host, drivers[host], cuda[host])


def _nccl(fact: HostFacts) -> str | None:
    """Return the version of NVIDIA's NCCL package, which torch from PyPI requires; None if torch contains NCCL."""
    nccl = (version for name, version in fact.packages.items() if re.fullmatch(r"nvidia-nccl-cu\d+", name))
    return next(nccl, None)


def _driver_too_old(host: str, driver: str, cuda: str) -> Iterator[Check]:
    oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0) if cuda[:1].isdecimal() else 0
    major = driver.partition(".")[0]
    if major.isdecimal() and int(major) < oldest:
        seen = f"{driver}, and torch was built with CUDA {cuda}"
        hint = "install a newer driver, or a torch for an older CUDA"
        # only a warning, as NVIDIA's forward compatibility package may make it work
        yield judged(host, "GPU driver", seen, False, wanted=f"{oldest} or newer", hint=hint)


Versions = Mapping[str, str]

_COPY_IMAGE = "copy one image to every host (podman save IMAGE | ssh HOST podman load, or docker's)"
_UNKNOWN = "unknown"  # version of a module that no installed distribution lists among its files
_UNQUOTED = re.compile(r"\d[\w+-]*(\.[\w+-]+){2,}")  # Hydra doesn't take a text with two dots for a number


def refuse_different(facts: Sequence[HostFacts], key: Versions, configured: Versions) -> None:
    """Refuse hosts whose Python or libraries differ from the key, because their weights would differ, too.

    Args:
        key: name of a distribution (or ``python``) → version, as in key.json.
        configured: the value of ``cluster.environment``.

    Raises:
        HostError: lists every difference, and the override that makes the key fit the hosts.
    """
    by_host = {fact.host: differing(fact, key) for fact in facts}
    different = {host: versions for host, versions in by_host.items() if versions}
    if not different:
        return
    rows: dict[str, list[str]] = {}
    for host, versions in different.items():
        what = ", ".join(f"{name} {version} (the key says {key[name]})" for name, version in versions.items())
        rows.setdefault(what, []).append(host)
    lines = [f"  {', '.join(hosts)}: {what}" for what, hosts in rows.items()]
    raise HostError("\n".join(["the hosts differ from the run's key:", *lines]), hint=_fix(by_host, configured))


def common_versions(facts: Sequence[HostFacts], key: Versions) -> dict[str, str]:
    """Return the key's names with the versions of the hosts; a version that no probe reports stays as in the key.

    Raises HostError: the hosts differ.
    """
    by_host = {fact.host: {**key, **differing(fact, key)} for fact in facts}
    (first, wanted), *others = by_host.items()
    rows = [
        f"  {host}: {name} {there[name]} ({first} has {wanted[name]})"
        for host, there in others
        for name in sorted(key)
        if there[name] != wanted[name]
    ]
    if rows:
        hint = "install the same versions everywhere, or cluster.python=<an interpreter that has them>"
        if IMAGE in key:
            hint = f"{_COPY_IMAGE}; or cluster.container=NAME@sha256:<the same digest for all hosts>"
        raise HostError("\n".join(["the hosts differ, and a run has one key:", *rows]), hint=hint)
    return wanted


def names_to_probe(key: Versions) -> list[str]:
    """Return the names whose versions a probe reports, including modules that are absent in the key."""
    return [name for name in key if name not in ("python", IMAGE)]


def differing(fact: HostFacts, key: Versions) -> dict[str, str]:
    """Return name → version (or ``absent``) on a host that differs from the key; leave out unknown versions."""
    installed = {name: _version_on(fact, name) for name in key}
    return {
        name: version
        for name, version in installed.items()
        if version and _comparable(version) != _comparable(key[name]) and (version != _UNKNOWN or key[name] == ABSENT)
    }


def _version_on(fact: HostFacts, name: str) -> str | None:
    """Return the version of a distribution, or of the distribution with a module of that name; None: not known."""
    if name == "python":
        return fact.python_version
    if name == IMAGE:
        return fact.container and fact.container.digest
    installed = {"torch": fact.torch_version, **fact.packages}
    return installed.get(normal_name(name)) or (fact.modules.get(name, ABSENT) if fact.modules is not None else None)


def _fix(by_host: Mapping[str, dict[str, str]], configured: Versions) -> str:
    """Return the override that makes the key fit the hosts, if all have the same versions; else what to install."""
    if any(IMAGE in versions for versions in by_host.values()):
        return f"the same command, if the image has just changed; else {_COPY_IMAGE}"
    same = len({tuple(sorted(versions.items())) for versions in by_host.values()}) == 1
    others = "install the key's versions there, or cluster.python=<an interpreter that has them>"
    if not same:
        return f"hosts of one run need the same versions: {others}"
    versions = next(iter(by_host.values()))
    listed = ", ".join(f"{name}: {_value(version)}" for name, version in sorted({**configured, **versions}.items()))
    override = f"cluster.environment={shlex.quote(f'{{{listed}}}')}"
    lacking = [name for name, version in versions.items() if version == ABSENT]
    but = f" (whose code can do without {', '.join(lacking)})" if lacking else ""
    return f"{override}, which is the key of a run on such hosts{but}; or {others}"


def _value(version: str) -> str:
    return version if _UNQUOTED.fullmatch(version) else hydra_value(version)


def _comparable(version: str) -> str:
    """Return a version without differences of spelling: ``_`` for ``-`` in folder names, 3.12.1+ of a Python build."""
    return version.replace("_", "-").removesuffix("+")
