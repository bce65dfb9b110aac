"""The host's facts for a launch and for preflight's checks. No installed package is imported."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from trainers.contract.host_facts import Container, HostFacts, ProbeTimes
from trainers.contract.records import as_json

from ..files.folders import holds_pack
from ..files.leftovers import tidy_workdir
from ..node import address_and_port, from_environment, identity, machine
from ..requests import ProbeRequest
from ..running.claims import claims_here
from ..running.warm import warm_up
from ..wire import Json, free_bytes, say
from . import container, hardware, network
from .software import software


def probe(request: ProbeRequest) -> None:
    """Answer with the facts for a launch, in the fields of ``HostFacts`` but for ``host``."""
    say(**as_json(facts(request)))


def facts(request: ProbeRequest) -> HostFacts:
    """Return this host's facts. Raises SystemExit: it has no container image, or no folder that can be written to."""
    began = time.time()
    if request.warm is not None:
        warm_up(request.env_passed, request.warm)
    own_name = network.OwnNameLookup()
    address, _ = address_and_port(request.access)
    interfaces = network.interfaces()
    workdir = os.path.expanduser(request.workdir)
    left_folders = tidy_workdir(request, workdir)
    ranks_container, ranks_software = software_of_ranks(request, workdir)
    return HostFacts(
        host="",
        identity=identity(request.access),
        hostname=socket.gethostname(),
        address=address,
        home=os.path.expanduser("~"),
        **ranks_software,
        container=ranks_container,
        cpus=hardware.count_cpus(),
        gpus=hardware.count_gpus(),
        hardware=hardware.hardware(),
        # in a container numactl would have to be in the image, and may not bind memory there
        can_bind_numa=ranks_container is None and hardware.can_bind_numa(),
        nvidia_smi=hardware.nvidia_smi(request.gpu_s) if request.gpu_s else None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_available_bytes=hardware.memory_available_bytes(),
        shared_memory_free_bytes=hardware.shared_memory_free_bytes(),
        disk_free_bytes=free_bytes(workdir),
        control_group=hardware.control_group(),
        limits=hardware.limits(),
        interface=interfaces.get(address),
        ssh_address=address,
        interfaces=interfaces,
        links=network.links(),
        infiniband=network.infiniband(),
        own_name=own_name.result(),
        free_ports=network.free_ports(4),
        machine=machine(),
        network_variables=from_environment(request.env_names),
        dropped_variables=from_environment(request.env_families, but=request.env_passed),
        claims=claims_here(),
        left_folders=left_folders,
        pack_path=pack_path(request.pack_digest, request.pack_folders, workdir),
        times=ProbeTimes(host_began=began, host_ended=time.time()),
    )


def software_of_ranks(request: ProbeRequest, workdir: str) -> tuple[Container | None, Json]:
    """Return the container of the ranks (None: they run without one), and their interpreter's software."""
    requested = request.container
    if requested is None:
        return None, software(request.modules, request.python_path)
    found = container.find_image(requested.image, workdir, gpus=requested.gpus, mounts=requested.mounts)
    return found, container.software_in(found, requested.image, request.modules, request.python_path)


def pack_path(digest: str, folders: Sequence[str], workdir: str) -> str | None:
    """Return the first folder that holds the data pack with this digest; None if none does, or without a digest."""
    candidates = [*folders, os.path.join(workdir, "data", digest)] if digest else []
    return next((folder for folder in candidates if holds_pack(folder, digest)), None)
