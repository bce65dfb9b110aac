"""Which node of a job of Slurm this is."""

from __future__ import annotations

import json
import os
import socket

from trainers.contract import variables

from . import nodelist
from .wire import Json, refuse

REQUEUES = True
"""A job that was preempted is put back into the queue, if its agents leave that to Slurm."""


def who() -> tuple[str, int, int]:
    """This node's name, its number among the job's nodes, and how often Slurm has put the job back into the queue."""
    environ = os.environ
    return environ["SLURMD_NODENAME"], int(environ["SLURM_NODEID"]), int(environ.get("SLURM_RESTART_COUNT", "0"))


def secrets(request: Json) -> Json:
    """The ranks' secret variables, and what hides these in their output: they travel in the job's environment.

    Raises SystemExit: they didn't come, and ranks would take the *** in the request for their values.
    """
    if variables.SECRETS not in os.environ and request["has_secrets"]:
        refuse(
            f"{who()[0]}: the ranks' secret variables did not come: they travel in PACELINE_SECRETS of the job's "
            "environment, which --export in cluster.sbatch or SBATCH_EXPORT leaves behind; --export=ALL takes it "
            "along, and so does --export=NAME,PACELINE_SECRETS"
        )
    value: Json = json.loads(os.environ.pop(variables.SECRETS, "{}"))
    return value


def own_address() -> str:
    """The address from which this node reaches another one of the job: by its own name it may know itself as 127.0.1.1.

    Raises SystemExit: the other's name says nothing here.
    """
    own = who()[0]
    other = next((name for name in nodelist.expand(os.environ["SLURM_JOB_NODELIST"]) if name != own), None)
    if other is None:
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe_socket:
            probe_socket.connect(address)  # sends nothing
            return str(probe_socket.getsockname()[0])
    except OSError as error:
        refuse(f"{own}: can't reach {other} by its name ({error}); set cluster.interface")
