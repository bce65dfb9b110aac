"""This node in a Slurm job, by Slurm's variables and its short form of node names."""

from __future__ import annotations

import json
import os
import re

from ..node import route_to
from ..wire import Json, refuse

REQUEUES = True
SECRETS = "PACELINE_SECRETS"  # the job's secret variables
"""A job that was preempted is put back into the queue, if its agents leave that to Slurm."""


def who() -> tuple[str, int, int]:
    """Return this node's name, its number among the job's nodes, and how often Slurm has requeued the job."""
    environ = os.environ
    return environ["SLURMD_NODENAME"], int(environ["SLURM_NODEID"]), int(environ.get("SLURM_RESTART_COUNT", "0"))


def secrets(request: Json) -> Json:
    """Return the ranks' secret variables and the rules that mask them in the output, from the job's environment.

    Raises SystemExit: they didn't arrive, and ranks would take the *** in the request for their values.
    """
    if SECRETS not in os.environ and request["has_secrets"]:
        refuse(
            f"{who()[0]}: the ranks' secret variables did not come: they travel in PACELINE_SECRETS of the job's "
            "environment, which --export in cluster.sbatch or SBATCH_EXPORT leaves behind; --export=ALL takes it "
            "along, and so does --export=NAME,PACELINE_SECRETS"
        )
    value: Json = json.loads(os.environ.pop(SECRETS, "{}"))
    return value


def own_address() -> str:
    """Return this node's address towards another one of the job; by its own name it may know itself as 127.0.1.1.

    Raises SystemExit: the other's name doesn't resolve here.
    """
    own = who()[0]
    other = next((name for name in expand_nodelist(os.environ["SLURM_JOB_NODELIST"]) if name != own), None)
    if other is None:
        return "127.0.0.1"
    try:
        return route_to(other)[0]
    except OSError as error:
        refuse(f"{own}: can't reach {other} by its name ({error}); set cluster.interface")


# Slurm's short form of node names. Pure.


def expand_nodelist(text: str) -> list[str]:
    """Expand ``node[001-003,7],gpu-a`` to node001, node002, node003, node7, gpu-a. Raises ValueError."""
    return [name for part in split_nodelist(text) for name in expand_part(part)]


def split_nodelist(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    if not re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]*\]|,)*", text):
        raise ValueError(f"brackets that don't match in {text!r}")
    return list(re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text))


def expand_part(part: str) -> list[str]:
    """Expand one name with any number of brackets; the first bracket changes slowest."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = rest.partition("]")
    return [head + number + end for number in numbers_of(inside) for end in expand_part(tail)]


def numbers_of(ranges: str) -> list[str]:
    """Expand ``001-003,7`` to 001, 002, 003, 7, keeping the widths."""
    numbers: list[str] = []
    for item in ranges.split(","):
        low, dash, high = item.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"{item!r} is no range of numbers")
        numbers += [str(value).zfill(len(low)) for value in range(int(low), int(high or low) + 1)]
    return numbers
