"""The checks of the software on the hosts: Python and packages as in the run's key, NCCL, CUDA and driver equal. Pure.

Whether the hosts' releases of torch fit together is checked by ``cluster/validation.py``.
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

_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major release → its oldest driver (docs.nvidia.com/deploy/cuda-compatibility, minor versions)."""


def checks(cluster: Cluster, facts: Sequence[HostFacts]) -> Iterator[Check]:
    """Compare the hosts' Python and, if the ranks use GPUs, the GPU software."""
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
"""Name of a package (or ``python``, or IMAGE for the container image) → version, as in key.json."""

_COPY_IMAGE = "copy one image to every host (podman save IMAGE | ssh HOST podman load, or docker's)"
_UNKNOWN = "unknown"  # version of a module that no installed package lists among its files
_UNQUOTED = re.compile(r"\d[\w+-]*(\.[\w+-]+){2,}")  # with two dots it is no number for Hydra, so needs no quotes


def refuse_different(facts: Sequence[HostFacts], key: Versions, configured: Versions) -> None:
    """Refuse hosts whose Python or packages differ from the key, because their weights would differ too.

    ``configured``: the value of ``cluster.environment``. Raises HostError: lists every difference, and the override
    that makes the key fit the hosts.
    """
    differing_by_host = {fact.host: differing(fact, key) for fact in facts}
    if not any(differing_by_host.values()):
        return
    hosts_by_difference: dict[str, list[str]] = {}
    for host, versions in differing_by_host.items():
        if versions:
            what = ", ".join(f"{name} {version} (the key says {key[name]})" for name, version in versions.items())
            hosts_by_difference.setdefault(what, []).append(host)
    lines = [f"  {', '.join(hosts)}: {what}" for what, hosts in hosts_by_difference.items()]
    hint = _hint_for(differing_by_host, configured)
    raise HostError("\n".join(["the hosts differ from the run's key:", *lines]), hint=hint)


def common_versions(facts: Sequence[HostFacts], key: Versions) -> dict[str, str]:
    """Return the key's packages with the hosts' versions; unknown ones stay. Raises HostError: hosts differ."""
    by_host = {fact.host: {**key, **differing(fact, key)} for fact in facts}
    (first, wanted), *others = by_host.items()
    rows = [
        f"  {host}: {name} {versions[name]} ({first} has {wanted[name]})"
        for host, versions in others
        for name in sorted(key)
        if versions[name] != wanted[name]
    ]
    if rows:
        hint = "install the same versions everywhere, or cluster.python=<an interpreter that has them>"
        if IMAGE in key:
            hint = f"{_COPY_IMAGE}; or cluster.container=NAME@sha256:<the same digest for all hosts>"
        raise HostError("\n".join(["the hosts differ, and a run has one key:", *rows]), hint=hint)
    return wanted


def names_to_probe(key: Versions) -> list[str]:
    """Return the names in the key for which a probe must ask; it reports Python and the image in any case."""
    return [name for name in key if name not in ("python", IMAGE)]


def differing(fact: HostFacts, key: Versions) -> dict[str, str]:
    """Return what differs from the key on a host: name → version there (or ABSENT). Unknown versions don't differ."""
    different = {}
    for name in key:
        version = _version_on(fact, name)
        if not version or _comparable(version) == _comparable(key[name]):
            continue
        # a module whose version can't be told differs only from a key in which it is absent
        if version != _UNKNOWN or key[name] == ABSENT:
            different[name] = version
    return different


def _version_on(fact: HostFacts, name: str) -> str | None:
    """Return the version of a package, or of the package with a module of that name; None: not known."""
    if name == "python":
        return fact.python_version
    if name == IMAGE:
        return fact.container and fact.container.digest
    installed = {"torch": fact.torch_version, **fact.packages}
    if version := installed.get(normal_name(name)):
        return version
    return fact.modules.get(name, ABSENT) if fact.modules is not None else None


def _hint_for(differing_by_host: Mapping[str, dict[str, str]], configured: Versions) -> str:
    """Return the override that makes the key fit the hosts, if all have the same versions; else what to install."""
    if any(IMAGE in versions for versions in differing_by_host.values()):
        return f"the same command, if the image has just changed; else {_COPY_IMAGE}"
    install = "install the key's versions there, or cluster.python=<an interpreter that has them>"
    if len({tuple(sorted(versions.items())) for versions in differing_by_host.values()}) > 1:
        return f"hosts of one run need the same versions: {install}"
    versions = next(iter(differing_by_host.values()))
    listed = ", ".join(f"{name}: {_value(version)}" for name, version in sorted({**configured, **versions}.items()))
    override = f"cluster.environment={shlex.quote(f'{{{listed}}}')}"
    absent = [name for name, version in versions.items() if version == ABSENT]
    condition = f" (whose code can do without {', '.join(absent)})" if absent else ""
    return f"{override}, which is the key of a run on such hosts{condition}; or {install}"


def _value(version: str) -> str:
    """Return a version as it is written in an override."""
    return version if _UNQUOTED.fullmatch(version) else hydra_value(version)


def _comparable(version: str) -> str:
    """Remove differences that mean nothing: ``_`` for ``-`` (names of folders), the ``+`` of a locally built Python."""
    return version.replace("_", "-").removesuffix("+")
