"""Whether a folder that is said to be shared is: a file that one host writes must be seen by the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.launchers.transport.answers import Answer
from pipeline.cluster.preflight.judgement import Check, State
from pipeline.core.specs import Cluster, Host

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

_NAME = "shared folder"


def said_to_be_shared(cluster: Cluster, launcher: Launcher, runs_dir: Path | None) -> list[str]:
    """The folders that the configuration or the launcher says every host sees alike."""
    folders = [cluster.rendezvous_dir] if cluster.rendezvous_dir else []
    if runs_dir is not None and launcher.capabilities.shares_run_dir and cluster.nnodes > 1:
        folders.append(str(runs_dir))
    return folders


def checks(cluster: Cluster, ask: Callable[..., Mapping[str, Answer]], folder: str) -> list[Check]:
    """The first host writes, the others look, the first removes. A network file system shows a name that nobody has
    looked for yet at once, so the file has a new one each time.

    Args:
        ask: ``Launcher.ask``.
    """
    first, *others = cluster.hosts
    request = {"do": "shared", "folder": folder, "mark": secrets.token_hex(6)}
    written = ask({**request, "act": "write"}, hosts=[first]).get(first.label)
    if written is None:  # no agents, nothing to ask
        return []
    if written.error is not None:
        return [_failed(first.label, f"can't write into {folder}: {written.error}", "a folder that it can write")]
    try:
        answers = ask({**request, "act": "look"}, hosts=others) if others else {}
    finally:
        ask({**request, "act": "remove"}, hosts=[first])
    return [
        Check(host=first.label, name=_NAME, state=State.OK, seen=f"{folder} is written"),
        *(check for host in others for check in _seen_by(host, answers.get(host.label), first, folder)),
    ]


def _seen_by(host: Host, answer: Answer | None, first: Host, folder: str) -> Iterator[Check]:
    if answer is None or answer.value is None or answer.error is not None:
        yield _failed(host.label, f"{folder}: {answer.error if answer else 'no answer'}", "an answer")
    elif answer.value["there"]:
        yield Check(host=host.label, name=_NAME, state=State.OK, seen=f"{folder} is the same as on {first.label}")
    elif answer.value["folder"]:
        yield _failed(
            host.label, f"{folder} there isn't the folder of that name on {first.label}", "one folder for all"
        )
    else:
        yield _failed(host.label, f"{folder} isn't there", "one folder for all")


def _failed(host: str, seen: str, wanted: str) -> Check:
    hint = "mount the same file system on every host, or name another folder (cluster.rendezvous_dir=, paths.runs=)"
    return Check(host=host, name=_NAME, state=State.FAILED, seen=seen, wanted=wanted, hint=hint)
