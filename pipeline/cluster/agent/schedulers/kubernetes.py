"""This node in a Kubernetes job: one pod, numbered by an operator or the Job controller."""

from __future__ import annotations

import json
import os
import re
from urllib.parse import quote

from ..wire import Json, refuse

NUMBERS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""Variables with a pod's number: of a TrainJob, whose pods have both, and of an indexed Job."""

REQUEUES = False
POD_IP, POD_NAME = "PACELINE_POD_IP", "PACELINE_POD_NAME"
"""A pod is never put back into a queue: after SIGTERM, and in a second life of its container, nothing is left to do."""


def who() -> tuple[str, int, int]:
    """Return this pod's name, its number among the job's nodes, and its restart, which is always 0."""
    name = os.environ[POD_NAME]
    number = next((os.environ[variable] for variable in NUMBERS if os.environ.get(variable, "").isdigit()), None)
    if number is None:
        refuse(f"{name}: none of {', '.join(NUMBERS)} is set, so this pod doesn't know its number; cluster.kind=job")
    return name, int(number), 0


def own_address() -> str:
    """Return the pod's address, at which the others reach it."""
    return os.environ[POD_IP]


def secrets(request: Json) -> Json:
    """Return variables from Secrets of the cluster, and the rules that mask their values in the ranks' output."""
    env = {name: os.environ[name] for name in request["env_from"] if name in os.environ}
    spelled = {text for value in env.values() for text in (value, json.dumps(value)[1:-1], quote(value, safe=""))}
    own = [[re.escape(text), "***"] for text in sorted(spelled, key=len, reverse=True) if len(text) >= 4]
    return {"env": env, "hide": [*own, *request["hide"]]}
