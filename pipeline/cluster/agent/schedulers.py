"""How an agent learns its place in a scheduler's job: name, number, address and secrets of this node.

There is one class for each scheduler. ``REQUEUES``: it may put a preempted job back into its queue, to start it again.
"""

from __future__ import annotations

import json
import os
import re
from urllib.parse import quote

from trainers.contract.records import from_json

from .node import route_to
from .requests import JobRequest, Secrets
from .wire import refuse

SLURM_SECRETS = "PACELINE_SECRETS"
"""The variable with a Slurm job's secret variables."""

POD_IP, POD_NAME = "PACELINE_POD_IP", "PACELINE_POD_NAME"
POD_NUMBERS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""Variables with a pod's number: of a TrainJob, whose pods have both, and of an indexed Job."""


class Slurm:
    """A node of a Slurm job. Slurm requeues the job after a preemption, if the agents don't end it themselves."""

    REQUEUES = True

    def who(self) -> tuple[str, int, int]:
        """Return this node's name, its number among the job's nodes, and how often Slurm has requeued the job."""
        environ = os.environ
        return environ["SLURMD_NODENAME"], int(environ["SLURM_NODEID"]), int(environ.get("SLURM_RESTART_COUNT", "0"))

    def secrets(self, request: JobRequest) -> Secrets:
        """Return the ranks' secrets from the job's environment. Raises SystemExit: they didn't arrive."""
        if SLURM_SECRETS not in os.environ and request.has_secrets:
            refuse(
                f"{self.who()[0]}: the ranks' secret variables did not come: they travel in PACELINE_SECRETS of the "
                "job's environment, which --export in cluster.sbatch or SBATCH_EXPORT leaves behind; --export=ALL "
                "takes it along, and so does --export=NAME,PACELINE_SECRETS"
            )
        return from_json(Secrets, json.loads(os.environ.pop(SLURM_SECRETS, "{}")))

    def own_address(self) -> str:
        """Return this node's address towards another one, as its own name may be 127.0.1.1. Raises SystemExit."""
        own = self.who()[0]
        other = next((name for name in expand_nodelist(os.environ["SLURM_JOB_NODELIST"]) if name != own), None)
        if other is None:
            return "127.0.0.1"
        try:
            return route_to(other)[0]
        except OSError as error:
            refuse(f"{own}: can't reach {other} by its name ({error}); set cluster.interface")


class Kubernetes:
    """A pod of a Kubernetes job. After SIGTERM the pod never runs again."""

    REQUEUES = False

    def who(self) -> tuple[str, int, int]:
        """Return this pod's name, its number among the job's nodes, and its restart, which is always 0."""
        name = os.environ[POD_NAME]
        number = next(
            (os.environ[variable] for variable in POD_NUMBERS if os.environ.get(variable, "").isdigit()), None
        )
        if number is None:
            names = ", ".join(POD_NUMBERS)
            refuse(f"{name}: none of {names} is set, so this pod doesn't know its number; cluster.kind=job")
        return name, int(number), 0

    def own_address(self) -> str:
        return os.environ[POD_IP]

    def secrets(self, request: JobRequest) -> Secrets:
        """Return variables from Secrets of the cluster, and the rules that mask their values in the ranks' output."""
        env = {name: os.environ[name] for name in request.env_from if name in os.environ}
        # a value may be printed as it is, inside of JSON, or inside of a URL
        spellings = {text for value in env.values() for text in (value, json.dumps(value)[1:-1], quote(value, safe=""))}
        # the longest first, as one value may be a part of another; texts below 4 characters occur in any output
        rules = [(re.escape(text), "***") for text in sorted(spellings, key=len, reverse=True) if len(text) >= 4]
        return Secrets(env=env, masking_rules=(*rules, *request.masking_rules))


SCHEDULERS: dict[str, type[Slurm] | type[Kubernetes]] = {"slurm": Slurm, "kubernetes": Kubernetes}
"""By the name in a job's request."""


def expand_nodelist(text: str) -> list[str]:
    """Expand ``node[001-003,7],gpu-a`` to node001, node002, node003, node7, gpu-a. Raises ValueError."""
    if not re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]*\]|,)*", text):
        raise ValueError(f"brackets that don't match in {text!r}")
    parts: list[str] = re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text)  # split at the commas outside of brackets
    return [name for part in parts for name in expand_part(part)]


def expand_part(part: str) -> list[str]:
    """Expand one entry of a list, such as ``rack[1-2]node[01-16]``; each bracket in it is expanded in turn."""
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
