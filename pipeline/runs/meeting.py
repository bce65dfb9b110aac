"""Which hosts of the newest start have come to where their ranks meet, as the hosts' logs tell. Reads only."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.runs.contents import nodes_of
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_HEAD_BYTES = 256 << 10  # the hosts meet before a rank prints anything
_NAMED = 4  # hosts in one text
_TORCH = re.compile(r"The client socket has (?:failed to connect|timed out)[^\n]*")


def awaited(folder: RunFolder) -> str | None:
    """Words that follow "still": for whom the others wait and why, as far as it is known; None once all have come."""
    plan = folder.read_json(run_folder.PLAN) or {}
    nodes = nodes_of(plan)
    if len(nodes) < 2:
        return None
    where = f"{plan.get('master_addr')}:{plan.get('master_port')}"
    logs = folder.path / run_folder.ATTEMPTS / str(plan.get("attempt"))
    texts = {str(node.get("host")): _head(logs / f"{node.get('host')}.log") for node in nodes}
    come = [host for host, text in texts.items() if f"torchrun is at {where}," in text]
    absent = [host for host in texts if host not in come]
    if not come or not absent:
        return None
    reasons = [why for host in absent if (why := _why(host, texts[host], where, first=next(iter(texts))))]
    told = f": {'; '.join(reasons[:_NAMED])}" if reasons else ", where torchrun starts (it imports torch)"
    return f"waiting for {_listed(absent)}{told}; {_listed(come)} {'has' if len(come) == 1 else 'have'} come"


def _why(host: str, text: str, where: str, *, first: str) -> str | None:
    """What keeps the host, by the newest line that says so."""
    own = re.findall(rf"no answer from {re.escape(where)}, where the hosts meet, for (\d+ s)", text)
    torch = _TORCH.findall(text)
    if own:
        return f"{host} gets no answer from {first} ({where}) since {own[-1]}"
    return f"{host} says: {torch[-1].strip()}" if torch else None


def _listed(hosts: list[str]) -> str:
    rest = len(hosts) - _NAMED
    return ", ".join(hosts[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
