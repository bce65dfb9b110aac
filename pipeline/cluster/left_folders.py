"""Folders that old attempts left on hosts and that nothing there uses: which of them are kept, and their removal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster import starts
from pipeline.core.tables import counted, file_size
from pipeline.runs import journal
from trainers.contract.host_facts import HostFacts, LeftFolder

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

OUTPUTS_KEPT_S = 7 * 86_400.0  # for a run that this project doesn't know, whose outputs another clone may fetch
EMPTY_KEPT_S = 3600.0  # for folders without outputs; then their controller counts as gone


def why_kept(left: LeftFolder, runs_dir: Path) -> str:
    """Return the reason to keep a folder; '' if it may be removed.

    ``runs_dir``: this project's folder of runs.
    """
    prefix = journal.prefix_of_attempt(left.run_id)
    key = prefix[: -len("-abcdef-")]
    run_dir = runs_dir.resolve() / key
    is_ours = prefix == journal.attempt_prefix(key, run_dir)
    if is_ours and starts.is_collected(left.run_id, run_dir):
        return ""
    is_newest = journal.known_attempts(run_dir)[-1:] == [left.run_id]
    if (
        is_ours and left.holds_outputs and (is_newest or starts.is_open(left.run_id, run_dir))
    ):  # the next attempt fetches them
        return f"run {key} goes on from its checkpoints: the same command fetches them"
    may_be_fetched = left.holds_outputs and (not is_ours or run_dir.exists())
    if left.idle_s > (OUTPUTS_KEPT_S if may_be_fetched else EMPTY_KEPT_S):
        return ""
    outputs = ", and has outputs of a run unknown here" if may_be_fetched else ""
    return f"it was in use {idle_words(left.idle_s)} ago{outputs}"


def clear(launcher: Launcher, facts: Sequence[HostFacts], runs_dir: Path) -> list[str]:
    """Remove the folders of old attempts that nobody needs; return a line for each host that had one."""
    unneeded = {fact.host: [left for left in fact.left_folders if not why_kept(left, runs_dir)] for fact in facts}
    names = [(fact, [left.name for left in unneeded[fact.host]]) for fact in facts if unneeded[fact.host]]
    lines = []
    for host, removed in launcher.remove_folders(names).items():
        size_bytes = sum(left.bytes for left in unneeded[host] if left.name in removed)
        if removed:
            lines.append(
                f"{host}: removed what was left of {counted(len(removed), 'attempt')}, {file_size(size_bytes)}"
            )
    return lines


def idle_words(seconds: float) -> str:
    """Return a duration in words."""
    return f"{seconds / 86_400:.0f} days" if seconds >= 2 * 86_400 else f"{seconds / 60:.0f} minutes"
