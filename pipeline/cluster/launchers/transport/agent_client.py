"""Requests to the node agents on all hosts of a cluster at once, and how their content follows from cluster and plan.

``AgentLauncher`` uses the ``AgentClient``; the functions below it make the requests. A *claim* is written on the host:
it names the GPUs or cores that a run computes on, so that other runs there wait or are refused (docs/sharing-hosts.md).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from pipeline.cluster.agent.requests import (
    ClaimRequest,
    NodeStart,
    ProbeRequest,
    Request,
    StartRequest,
    WarmEnvironment,
)
from pipeline.cluster.agent.wire import BUSY
from pipeline.cluster.launchers.base import PackSource, Transport, workdir_of
from pipeline.cluster.launchers.settings import SHARE, WHEN_BUSY_HINT, busy_policy, capabilities, requested_container
from pipeline.cluster.launchers.transport.answers import Answer, parse_answer, received_bytes
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.core.errors import HostError
from pipeline.core.redact import rules, texts_to_mask
from pipeline.core.specs import Cluster, Host, LaunchPlan
from pipeline.core.tables import counted, first_of
from pipeline.keys import rank_environment
from pipeline.runs import journal
from trainers.contract import run_folder

_ANSWER_S = 8.0  # time limit of a short command once it is connected
_CONNECT_AGAIN_S = 5.0  # time limit for connecting to a host that has answered before
_ROWS, _HINTS = 20, 3  # at most, of an error, whose beginning must stay on the screen
_NAMED = 4  # hosts that a line of progress names
_SLOWEST_BYTES_PER_S = 1e6  # slower transfers are given up

Explain = Callable[[Host, Answer], tuple[str, str | None]]
"""Returns why a host's answer failed, and the command that fixes it (None: not known)."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Files that follow a request."""

    name: str  # as the user sees it while waiting
    append: Callable[[IO[bytes]], None]  # writes them to an open file, as a tar


class _Transfer(NamedTuple):
    """The payload that is being sent, for reports of progress."""

    name: str
    labels: Sequence[str]
    total_bytes: int  # for each host
    began: float  # monotonic seconds


class AgentClient:
    """Sends requests to the agents of a cluster, which a transport starts on its hosts."""

    def __init__(self, transport: Transport) -> None:
        self.cluster, self.transport = transport.cluster, transport
        self._transfer: _Transfer | None = None  # the newest payload
        self._tokens: dict[str, str] = {}  # host label → token of its newest request, which is also in the answers

    @property
    def slow_s(self) -> float:
        """How long further connections may take until they answer; 0: the usual limits are enough."""
        return self.transport.slow_s or 0.0

    @property
    def short_s(self) -> float:
        """Time limit of a short command: less for hosts that have answered before, so a lost one is noticed soon."""
        first_s = self.cluster.settings.connect_timeout_s
        slow_s = self.transport.slow_s
        return _ANSWER_S + (first_s if slow_s is None else min(first_s, max(_CONNECT_AGAIN_S, slow_s)))

    def ask(
        self,
        request: Request,
        *,
        hosts: Sequence[Host] | None = None,
        timeout_s: float | None = None,
        payload: Payload | None = None,
    ) -> dict[str, Answer]:
        """Send one request to all hosts (or some) at once. Returns host label → answer; never raises for a host.

        ``timeout_s``: without the time that the payload takes; None: that of a short command.
        """
        token, hosts = new_token(), self.cluster.hosts if hosts is None else hosts
        labels = [host.label for host in hosts]
        self._tokens |= dict.fromkeys(labels, token)
        # A file without a name: the request may hold secrets, and nothing of it stays if this process is killed.
        with tempfile.TemporaryFile(prefix="paceline-") as stdin:
            stdin.write(message(request._replace(access=self.transport.access), token))
            begin = stdin.tell()
            if payload is not None:
                payload.append(stdin)
                self._transfer = _Transfer(payload.name, labels, stdin.tell() - begin, time.monotonic())
            stdin.flush()
            transfer_s = (stdin.tell() - begin) * len(hosts) / _SLOWEST_BYTES_PER_S
            outputs = self.transport.exchange(stdin, hosts, (timeout_s or self.short_s) + transfer_s)
        return {
            label: Answer(value=parse_answer(output.stdout, token), output=output) for label, output in outputs.items()
        }

    def demand(
        self,
        purpose: str,
        request: Request,
        *,
        hosts: Sequence[Host] | None = None,
        timeout_s: float | None = None,
        payload: Payload | None = None,
    ) -> dict[str, Answer]:
        """Send a request in which no host may fail; arguments and result as in ``ask``.

        Raises HostError: lists the hosts that failed (of many the first ones) and the fix; ``purpose`` begins its text.
        """
        answers = self.ask(request, hosts=hosts, timeout_s=timeout_s, payload=payload)
        rows, hints = self.failures(answers, self._explain)
        if rows:
            head = f"{purpose}: {len(rows)} of {self.cluster.nnodes} hosts can't take part"
            silent = [label for label, answer in answers.items() if answer.value is None]
            more_rows = [f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else []
            more_hints = [f"and so on for {len(hints) - _HINTS} more"] if len(hints) > _HINTS else []
            hint = "; then ".join([*hints[:_HINTS], *more_hints])
            raise HostError("\n".join([head, *rows[:_ROWS], *more_rows]), hint=hint or None, hosts=silent)
        return answers

    def _explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        why, hint = self.transport.explain(host, answer)
        return why, WHEN_BUSY_HINT if BUSY in (answer.reported_error or "") else hint

    def failures(self, answers: Mapping[str, Answer], explain: Explain) -> tuple[list[str], list[str]]:
        """Return (rows, hints): a line for each host that failed, and the fixes.

        Fixes that differ only in the host's name are one hint, which names the other hosts at its end.
        """
        rows = list[str]()
        hints = dict[str, str]()  # the hint with HOST in place of the host's name → the first such hint
        other_hosts = defaultdict[str, list[str]](list)  # the same → further hosts for which it holds
        for host in self.cluster.hosts:
            answer = answers.get(host.label)
            if answer is None or answer.error is None:
                continue
            why, hint = explain(host, answer)
            rows.append(f"  {host.label}: {why}")
            if hint:
                form = hint.replace(host.label, "HOST")
                if hints.setdefault(form, hint) != hint:
                    other_hosts[form].append(host.label)
        same = {form: f", and the same for {first_of(labels, _NAMED)}" for form, labels in other_hosts.items()}
        return rows, [f"{hint}{same.get(form, '')}" for form, hint in hints.items()]

    def reported_counts(self, labels: Sequence[str]) -> dict[str, int]:
        """Return host label → the newest count in its agent's reports of progress. Callable from any thread.

        The agent counts the bytes of the payload that have arrived, or the packages that are installed.
        """
        counts = {}
        for label in labels:
            with contextlib.suppress(OSError, KeyError):  # not there yet, or no longer
                counts[label] = received_bytes(self.transport.outputs[label].read_bytes(), self._tokens[label])
        return counts

    def transfer_progress(self) -> str:
        """Return the progress and mean rate of the newest payload on each host; '' before any of it has arrived.

        Of many hosts, only those furthest behind. Callable from any thread.
        """
        transfer = self._transfer
        arrived = self.reported_counts(transfer.labels) if transfer is not None else {}
        if transfer is None or not any(arrived.values()):
            return ""
        seconds, rows = max(time.monotonic() - transfer.began, 1e-3), []
        labels = list(transfer.labels)
        has_many = len(labels) > _NAMED
        if has_many:
            labels = sorted(labels, key=lambda label: arrived.get(label, 0))[:_NAMED]
        for label in labels:
            mega = arrived.get(label, 0) / 1e6
            rows.append(f"{label} {mega:,.1f} of {transfer.total_bytes / 1e6:,.1f} MB ({mega / seconds:,.1f} MB/s)")
        if has_many:
            complete = sum(count >= transfer.total_bytes for count in arrived.values())
            rows[0] = f"{complete} of {counted(len(transfer.labels), 'host')} have it; furthest behind {rows[0]}"
        return f"sending {transfer.name}: {', '.join(rows)}"


# --------------------------------------------------------------------------------- requests, made of cluster and plan
ENV_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG*")
"""Variables that a plan doesn't set on a host that has them set itself."""
GPU_S = 1.0  # how long a probe waits for nvidia-smi, which takes seconds where no GPU is in use


def probe_request(
    cluster: Cluster,
    pack: PackSource | None,
    modules: Sequence[str],
    registry: str,
    gpu_s: float = GPU_S,
    warm: WarmEnvironment | None = None,
) -> ProbeRequest:
    """Return the request for the facts of a host. ``registry``: the folder there in which agents register."""
    return ProbeRequest(
        workdir=workdir_of(cluster),
        registry=registry,
        tests_writing=not capabilities(cluster).shares_run_dir,
        env_names=ENV_NAMES,
        env_families=tuple(rank_environment.DECIDING),
        env_passed=tuple(rank_environment.PASSED),
        modules=tuple(modules),
        python_path=tuple(cluster.python_path),
        pack_digest=pack.digest if pack else "",
        pack_folders=(str(pack.path),) if pack else (),
        gpu_s=gpu_s if cluster.device == "cuda" else 0.0,
        container=requested_container(cluster),
        warm=warm,
    )


def start_request(
    cluster: Cluster, plan: LaunchPlan, run_dir: Path, pack_digest: str, registry: str, slow_s: float
) -> StartRequest:
    """Return the request that starts a run, with secrets, claims and the rules that mask secrets.

    ``pack_digest``: '': the run needs no data. ``registry``: as in ``probe_request``. ``slow_s``: time of a slow login.
    """
    hosts = {host.label: host for host in cluster.hosts}
    hidden = frozenset[str]().union(*(texts_to_mask(host.env, host.secrets) for host in cluster.hosts))
    request = job_start_request(plan, registry, keeps_run_dir=capabilities(cluster).shares_run_dir)
    nodes = [
        node._replace(
            env={**node.env, **hosts[node.host].secrets},
            claim=claim(cluster, hosts[node.host], request.attempt_prefix, _title(run_dir, plan.run_key)),
        )
        for node in request.nodes
    ]
    return request._replace(
        nodes=tuple(nodes),
        env_passed=tuple(rank_environment.IN_CONTAINER if cluster.container else rank_environment.PASSED),
        masking_rules=rules(hidden),
        rendezvous=(plan.master_addr, plan.master_port) if plan.nnodes > 1 else None,
        pack_digest=pack_digest,
        sends_files=not capabilities(cluster).shares_run_dir,
        uses_warm_parent=plan.warm,
        slow_s=slow_s,
    )


def job_start_request(plan: LaunchPlan, registry: str, *, keeps_run_dir: bool) -> StartRequest:
    """Return the request that starts a plan in a scheduler's job: without secrets, claims and masking rules.

    ``keeps_run_dir``: the nodes share the run folder with this computer, so only the agent's own files are removed.
    """
    return StartRequest(
        run_key=plan.run_key,
        run_id=plan.run_id,
        attempt_prefix=journal.prefix_of_attempt(plan.run_id),
        registry=registry,
        lease_s=plan.lease_s,
        nodes=tuple(
            part._replace(
                nproc_per_node=node.nproc_per_node,
                argv=node.argv,
                env=dict(node.env),
                data_dir=node.data_dir,
                container=node.container,
            )
            for part, node in zip(nodes_of(plan, keeps_run_dir=keeps_run_dir), plan.nodes, strict=True)
        ),
    )


def nodes_of(plan: LaunchPlan, *, keeps_run_dir: bool) -> tuple[NodeStart, ...]:
    """Return all nodes of a plan, as later requests about a start contain them; every host finds its own part."""
    return tuple(
        NodeStart(
            host=node.host,
            identity=node.identity,
            node_rank=node.node_rank,
            first_rank=node.first_rank,
            run_dir=node.run_dir,
            state_dir=node.state_dir,
            own_folders=(node.state_dir if keeps_run_dir else node.run_dir,),
        )
        for node in plan.nodes
    )


def resources(host: Host, device: str) -> list[str]:
    """Return what a host's ranks compute on: ``gpu:0``, …, or ``cpu``."""
    if device != "cuda":
        return ["cpu"]
    chosen = {**host.placement, **host.env}.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(host.nproc_per_node)] if chosen is None else chosen.split(",")
    return [f"gpu:{name.strip()}" for name in names[: host.nproc_per_node] if name.strip()]


@cache
def _group() -> str:
    """Return an id of this process. Runs of one process never refuse each other: a sweep arranges its trials itself."""
    return secrets.token_hex(8)


def claim(cluster: Cluster, host: Host, attempt_prefix: str, title: str) -> ClaimRequest:
    """Return a run's claim on a host."""
    return ClaimRequest(
        resources=tuple(resources(host, cluster.device)),
        attempt_prefix=attempt_prefix,
        group=_group(),
        title=title,
        refuses_others=busy_policy(cluster) != SHARE,
    )


def _title(run_dir: Path, run_key: str) -> str:
    """Return the words by which other users of a host recognize a run: ``run KEY (small_cnn)``."""
    model = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
        model = f" ({config['model']['name']})"
    return f"run {run_key}{model}"
