"""The container of the ranks as the controller knows it: its image, what it sees of the hosts, the digest for the key.

The agent of a host starts it (agent/host/container.py). On Slurm the agent itself runs in it, started by srun.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.cluster.agent.requests import RequestedContainer
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.core import places
from pipeline.core.cache import Cache
from pipeline.core.errors import UsageError, os_reason
from pipeline.core.files import sha256_file
from pipeline.core.specs import Cluster
from trainers.contract.host_facts import Container, HostFacts

_FILES = (".sif", ".sqsh")
_SEPARATORS = ",:"  # of srun's and apptainer's lists of folders


def checked(image: str, launcher: Capabilities) -> str:
    """Return ``cluster.container``. Raises UsageError: no engine of such a launcher can take it."""
    if image.startswith("-") or not image.isprintable() or " " in image or not image:
        raise UsageError(
            f"cluster.container={image!r} is no name of an image: it is empty, or holds a space or '-' first"
        )
    is_file = image.endswith(_FILES)
    if is_file and not image.startswith("/"):
        raise UsageError(f"cluster.container={image} is a file, and needs its absolute path on the hosts")
    if launcher.hosts_are_granted and not is_file:
        raise UsageError(
            f"cluster.container={image}: on Slurm an image is a file that this computer and the nodes share",
            hint=f"apptainer pull torch.sif docker://{image}, then cluster.container=/shared/images/torch.sif; "
            "for pyxis: enroot import -o torch.sqsh",
        )
    if image.endswith(".sqsh") and not launcher.hosts_are_granted:
        raise UsageError(
            f"cluster.container={image}: pyxis, which starts such an image, is a part of Slurm",
            hint="an image of podman or docker, or a .sif file of apptainer",
        )
    return image


def requested(cluster: Cluster) -> RequestedContainer | None:
    """Return the container that agents are to start; None: they start none."""
    if cluster.container is None or not cluster.asks_environment:  # Slurm's, which can't be asked, are in it already
        return None
    return RequestedContainer(cluster.container, tuple(_mounts(cluster)), gpus=cluster.device == "cuda")


def of_node(cluster: Cluster, fact: HostFacts) -> Container | None:
    """Return a node's container in a plan; None: its agent starts none."""
    if (container := requested(cluster)) is None:
        return None
    found = fact.container or Container(f"<engine of {fact.host}>", container.image, "", container.gpus)
    return found._replace(gpus=container.gpus, mounts=container.mounts)


def _mounts(cluster: Cluster) -> list[str]:
    """Return the folders and files of the hosts that the ranks see besides those of their run."""
    folders = [path for path in cluster.python_path if path.startswith("/")]
    return list(dict.fromkeys([*cluster.container_mounts, *folders]))


def digest_here(cluster: Cluster) -> str | None:
    """Return the digest of the image, where no host has to be asked for it; None: one has, or there is no image.

    That is a file on a file system shared with Slurm's nodes, or a digest in the name of a pod's image. Raises
    UsageError: the file can't be read.
    """
    pods = getattr(cluster.settings, "image", None)
    if isinstance(pods, str):
        return pods.partition("@")[2] or None
    if cluster.container is None or cluster.asks_environment:
        return None
    path = Path(cluster.container)
    try:
        status = path.stat()
        known = Cache(places.ROOT, "images", most=64)
        name = f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        digest = known.get(name) or f"sha256:{sha256_file(path)}"
    except OSError as error:
        raise UsageError(
            f"cluster.container={path} can't be read here: {os_reason(error)}",
            hint="put the image on a file system that this computer and all nodes share",
        ) from error
    known.keep({name: digest})
    return str(digest)


def srun(cluster: Cluster, shared: Sequence[str]) -> tuple[str, str]:
    """Return srun's own options, and the beginning of its command, for an agent in the cluster's image. Pure.

    ``shared``: the folders of the runs and of the data. Raises UsageError: a folder's name holds a separator of their
    lists.
    """
    image = cluster.container
    if image is None:
        return "", ""
    folders = list(dict.fromkeys([*shared, *_mounts(cluster)]))
    for folder in folders:
        if any(mark in folder for mark in _SEPARATORS):
            raise UsageError(
                f"cluster.container: {folder} can't be seen there, as lists of folders are separated by , and :"
            )
    if image.endswith(".sqsh"):
        pairs = ",".join(f"{folder}:{folder}" for folder in folders)
        options = [f"--container-image={image}", f"--container-mounts={pairs}", "--no-container-mount-home"]
        return f"{shlex.join(options)} ", ""
    gpus = ["--nv"] if cluster.device == "cuda" else []
    return "", f"{shlex.join(['apptainer', 'exec', *gpus, '--no-home', '--bind', ','.join(folders), image])} "
