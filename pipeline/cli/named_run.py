"""A run that a verb is told of by its key: its own words, configuration and hosts, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.cluster import build_cluster
from pipeline.core import documents
from pipeline.core.errors import UsageError
from pipeline.core.files import expanded
from pipeline.runs import index

if TYPE_CHECKING:
    from pipeline.cli.invocation import Invocation
    from pipeline.core.specs import Cluster
    from pipeline.runs.folder import RunFolder


def configuration(asked: Invocation, resolved: Mapping[str, Any], root: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration and the words of the run that ``run=KEY`` names; of ``resolved`` where runs lie, and where its
    data lies and it is recorded if a word says so.

    Raises:
        UsageError: no such run, it has no configuration, or another word would change it.
    """
    for word in asked.overrides:
        if not word.lstrip("+").startswith(("paths.", "tracking")):
            raise UsageError(
                f"doit {asked.verb} run=… takes no {word!r}: the run has its own configuration",
                hint=f"doit {asked.verb} with all words of the run and this one, in place of run=",
            )
    folder = index.find(root / expanded(resolved["paths"]["runs"], "paths.runs"), asked.options["run"])
    try:
        own = documents.read(folder.path / "config.json")
    except (documents.DamagedError, OSError) as error:
        raise UsageError(
            f"{folder.path / 'config.json'} can't be read, so only its words tell of run {folder.key}: {error}",
            hint=f"doit {asked.verb} with the words that it was trained with, in place of run=",
        ) from error
    told = (folder.read_json("provenance.json") or {}).get("overrides")
    words = tuple(map(str, told)) if isinstance(told, list) else ()
    told_anew = {"paths"} | {"tracking" for word in asked.overrides if word.lstrip("+").startswith("tracking")}
    merged = {**resolved, **own, **{name: resolved[name] for name in told_anew}}
    data = (own.get("paths") or {}).get("data")
    says_where = any(word.lstrip("+").startswith("paths.data") for word in asked.overrides)
    if not says_where and isinstance(data, str) and (root / data).is_dir():
        merged["paths"] = {**resolved["paths"], "data": data}
    return merged, words


def cluster(folder: RunFolder, root: Path, local_gpus: int, *, must_tell: bool) -> Cluster | None:
    """The hosts that the run was started on; None where its configuration can't tell them and nobody ``must_tell``.

    Raises:
        UsageError: the run was never started, or it must tell its hosts and can't.
    """
    path = folder.path / "config.json"
    if not path.exists():
        raise UsageError(f"run {folder.key} was never started: there is no {path}")
    try:
        return build_cluster(documents.read(path)["cluster"], root=root, local_gpus=local_gpus)
    except (documents.DamagedError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        if not must_tell:
            return None
        why = f"has no field {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{path} can't tell the hosts of run {folder.key}: it {why}",
            hint="doit stop with the words that it was trained with, instead of run=",
        ) from error
