"""What a node tells of its ranks, from the JSON of its stream. Pure; what is damaged raises KeyError, TypeError or
ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core.beats import Collectives, NodeBeat, NodeLook, RankBeat, RankLook, Socket, Usage


def node_beat(host: str, value: Mapping[str, Any]) -> NodeBeat:
    """A line that a node sends each second."""
    ranks = tuple(_beat(row) for row in value.get("ranks", ()))
    told = value.get("usage")
    return NodeBeat(host=host, ranks=ranks, saved=int(value.get("saved", 0)), usage=Usage.of(told) if told else None)


def node_look(host: str, value: Mapping[str, Any]) -> NodeLook:
    """The answer to a look at a node."""
    ranks = tuple(_look(host, row) for row in value["ranks"])
    return NodeLook(host=host, ranks=ranks, peers=_texts(value["peers"]))


def _beat(row: Mapping[str, Any]) -> RankBeat:
    return RankBeat(
        rank=int(row["rank"]),
        pid=int(row["pid"]),
        step=int(row["step"]),
        phase=int(row["phase"]),
        moves=int(row["moves"]),
        for_s=float(row["for_s"]),
        collectives=int(row["collectives"]),
        own_s=float(row["own_s"]),
    )


def _look(host: str, row: Mapping[str, Any]) -> RankLook:
    sockets = tuple(
        Socket(
            peer=str(item["peer"]), **{name: int(item[name]) for name in ("unsent_bytes", "sent_again", "unread_bytes")}
        )
        for item in row["sockets"]
    )
    return RankLook(
        beat=_beat(row),
        host=host,
        state=str(row["state"]),
        cpu=float(row["cpu"]),
        sleeps_in=str(row["sleeps_in"]),
        stack=_texts(row["stack"]),
        sockets=sockets,
        nccl=tuple(map(_collectives, row["nccl"])),
    )


def _collectives(row: Mapping[str, Any]) -> Collectives:
    return Collectives(
        group=str(row["group"]),
        given=int(row["given"]),
        ended=int(row["ended"]),
        next=str(row["next"]),
        at=str(row["at"]),
    )


def _texts(value: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, value))
