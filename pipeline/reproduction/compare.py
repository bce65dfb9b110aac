"""A run and its reproduction compared: weights, metrics and steps, then what may have made them differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.keys.diff import Difference, differences
from pipeline.reproduction.recipe import Recipe
from pipeline.runs.folder import RunFolder
from pipeline.runs.provenance import LOCK

_COMPARED = ("weights_sha256", "steps", "epochs")
_OF_SCRIPT = "outputs/"
_LOGS = (".jsonl", ".log")  # they and TensorBoard's hold the times at which they were written
_RANKS = ("nnodes", "world_size")  # with trainer.shards any number of them is to end with the same weights
_QUIET = ("hostname", "memory_bytes")  # differ from host to host and decide nothing


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``outcome`` differs in weights, metrics or steps (empty: reproduced); ``key`` and ``surroundings`` say why.

    ``compared``: what stands for the weights; of a script they are its outputs.
    """

    run: str
    again: str
    outcome: tuple[Difference, ...]
    key: tuple[Difference, ...]
    surroundings: tuple[Difference, ...]
    compared: str = "weights_sha256"

    @property
    def reproduced(self) -> bool:
        return not self.outcome


def compare(recipe: Recipe, again: RunFolder) -> Verdict:
    """Field by field: what came out, the parts of the key, and what the hosts had installed."""
    found, parts = again.read_result(), again.read_json("key.json") or {}
    result = found.fields if found is not None else {}
    provenance = again.read_json("provenance.json") or {}
    nodes = min(len(_hosts(recipe.provenance)), len(_hosts(provenance)))  # their number stands in ``outcome``
    return Verdict(
        run=recipe.folder.key,
        compared="outputs" if recipe.result.get("program") else "weights_sha256",
        again=again.key,
        outcome=tuple(differences(_outcome(recipe.result, recipe.parts), _outcome(result, recipe.parts))),
        key=tuple(differences(recipe.parts, parts)),
        surroundings=tuple(
            differences(
                _surroundings(recipe.provenance, recipe.result, nodes), _surroundings(provenance, result, nodes)
            ),
        ),
    )


def _outcome(result: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """As ``differences`` takes it: all under one part, so that each line shows field, old and new."""
    names = _COMPARED if "shards" in (parts.get("topology") or {}) else (*_COMPARED, *_RANKS)
    made = {name: file["sha256"] for name, file in _outputs(result).items()}
    return {"config": {**{name: result.get(name) for name in names}, **made, **(result.get("metrics") or {})}}


def _outputs(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a script has left in {run}, but for its logs."""
    files = result.get("files") or {} if result.get("program") else {}
    names = [name for name in files if name.startswith(_OF_SCRIPT) and not name.endswith(_LOGS)]
    return {name: files[name] for name in names if "tfevents" not in name}


def _surroundings(provenance: Mapping[str, Any], result: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """By node rank, not by name: the hosts may be called otherwise here."""
    hosts = _hosts(provenance)[:nodes]
    ran = [*(result.get("nodes") or ()), *({} for _ in hosts)]  # a run of an earlier version says nothing
    told = {
        f"node{rank}": {name: value for name, value in {**host, **ran[rank]}.items() if name not in _QUIET}
        for rank, host in enumerate(hosts)
    }
    return {"config": {**told, LOCK: provenance.get("lock_sha256"), "precision": result.get("precision")}}


def _hosts(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((provenance.get("environments") or {}).values())


def text(verdict: Verdict) -> str:
    """The verdict for a terminal."""
    lines = []
    if verdict.reproduced:
        lines.append(f"REPRODUCED {verdict.run}: {verdict.compared}, metrics and steps are equal")
    else:
        lines.append(f"NOT REPRODUCED {verdict.run}: {len(verdict.outcome)} field(s) differ")
        lines += [f"  {item}" for item in verdict.outcome]
    if verdict.again != verdict.run:
        lines.append(f"its key is {verdict.again} here, because of:")
        lines += [f"  {item}" for item in verdict.key]
    else:
        lines.append("its key is the same")
    if verdict.surroundings:
        lines.append("hosts and lock differ in:")
        lines += [f"  {item}" for item in verdict.surroundings]
    return "\n".join(lines)
