"""A run whose key is known, and whether it is finished. Looks, and starts nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.basis import Basis
from pipeline.core import program as programs
from pipeline.core.cache import remember_in
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.tables import first_of
from pipeline.evaluation import report_key
from pipeline.keys import observed_variables
from pipeline.keys.content_key import ContentKey, content_key, environment
from pipeline.keys.import_closure import Closure, import_closure
from pipeline.keys.script_files import with_inputs
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder
from trainers.core import dependencies

if TYPE_CHECKING:  # a run that has a result of its own needs nobody's word
    from pipeline.config.build import RunConfig
    from pipeline.runs.acceptance import Acceptance
    from pipeline.runs.result import Result

VARIABLES = "variables.json"
"""File of a run folder: digests of this shell's variables that the ranks of cluster=local got."""
_UNKEYED_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class LocatedRun:
    """``sources`` are the files of the run's code, ``unresolved`` imports of it that lead nowhere here, ``left_out``
    data of its packages that is too large. ``sealed``: a run that read what its key lacks isn't finished."""

    key: ContentKey
    sources: Mapping[str, Path]
    folder: RunFolder
    root: Path
    sealed: bool = False
    unresolved: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    metrics_pattern: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it must run, or None when it is finished and intact. Raises UsageError: a newer Paceline wrote it."""
        self.folder.refuse_newer()
        stale = self.folder.stale_because(self.key.digest)
        if stale is not None and (accepted := self.accepted) is not None:
            from pipeline.runs import acceptance

            return acceptance.stale_because(self.folder, accepted, self.key.digest)
        return stale or self.key_lacks or self.unread_log or report_key.stale_because(self.folder, self.root)

    @property
    def unread_log(self) -> str | None:
        """That the log of the finished run wasn't searched for the metrics that are wanted now; None: it was."""
        if self.metrics_pattern is None or self.metrics_pattern == self.pattern_before:
            return None
        return "its log wasn't searched for program.metrics_pattern yet (nothing is trained again)"

    @property
    def pattern_before(self) -> str | None:
        """The program.metrics_pattern by which its metrics were read."""
        made = (self.folder.read_json(run_folder.CONFIG) or {}).get(programs.SECTION) or {}
        return made.get("metrics_pattern")

    @property
    def key_lacks(self) -> str | None:
        """What the finished run read though its key doesn't hold it, and isn't as it was, in words; None: nothing.

        Of a result that was altered ``reason`` tells, and whether the training counts the folder judges.
        """
        try:
            result = self.folder.read_result() if self.sealed else None
        except AlteredError:
            return None
        if result is None:
            return None
        made = (self.folder.read_json(run_folder.CONFIG) or {}).get(programs.SECTION) or {}
        if made.get("seal") == "off":  # it is no part of the key
            return "it was made with program.seal=off, so nobody looked for files that its key lacks"
        field = "program.inputs" if made.get("script") or made.get("command") else "model.inputs"
        others = of_other_nodes(self.folder)
        record = {**(self.folder.read_json(run_folder.DEPENDENCIES) or {}), **({"nodes": others} if others else {})}
        lacking = unkeyed([result.fields, *others], field)
        changed = lacking or dependencies.changed(record, keyed=self.key.parts["environment"])
        if changed or not record.get("own_variables"):
            return changed
        return observed_variables.changed(record, self.folder.read_json(VARIABLES), os.environ)

    @property
    def accepted(self) -> Acceptance | None:
        """The person's word that another run holds for this key, which has no result of its own."""
        if self.folder.result.exists():
            return None
        from pipeline.runs import acceptance

        try:
            return acceptance.read(self.folder)
        except AlteredError:  # no word at all: it is trained
            return None

    def standing(self) -> tuple[Result | None, Acceptance | None]:
        """The result that counts: its own, or while an acceptance holds that of another run. Raises AlteredError."""
        own = self.folder.read_result()
        if own is not None:
            return own, None
        from pipeline.runs import acceptance

        return acceptance.standing(self.folder)


def of_other_nodes(folder: RunFolder) -> list[Mapping[str, Any]]:
    """What the other nodes of a script's run took in."""
    paths = sorted(folder.path.glob(f"{run_folder.NODES}/*/{run_folder.DEPENDENCIES}"))
    return [folder.read_json(path.relative_to(folder.path).as_posix()) or {} for path in paths]


def unkeyed(nodes: Sequence[Mapping[str, Any]], field: str = "program.inputs") -> str | None:
    """That its key is not complete, as summary.json and the records of other nodes say; None where it is."""
    told = [kinds for node in nodes if isinstance(kinds := node.get("unkeyed"), Mapping)]
    kinds = {name: how for one in told for name, how in one.items()}
    if not kinds:
        return None
    read = [str(name) for name, how in kinds.items() if how == "read"]
    absent = [str(name) for name, how in kinds.items() if how != "read"]
    parts = [f"{_listed(read)} read"] if read else []
    if absent:
        are = "isn't" if len(absent) == 1 else "aren't"
        parts.append(f"{_listed(absent)} looked for and {are} in the snapshot")
    them = "it" if len(kinds) == 1 else "them"
    return f"its key is not complete: {'; '.join(parts)}; add {them} to {field}"


def _listed(names: list[str]) -> str:
    return f"{first_of(names, _UNKEYED_SHOWN)} {'was' if len(names) == 1 else 'were'}"


Sources = Callable[[tuple[str, ...], tuple[str, ...]], Closure]
"""Modules of the chosen options, folders of the ranks' PYTHONPATH → the code."""


def sources(root: Path) -> Sources:
    """A reader of import closures with a cache: the runs of one sweep read the same files."""

    @cache
    def read(chosen: tuple[str, ...], behind: tuple[str, ...]) -> Closure:
        return import_closure(root, (programs.CLASSIFIER.entry, programs.TORCHRUN, *chosen), behind)

    return read


def versions(told: Mapping[str, str], code: Closure) -> dict[str, str]:
    """The key's part ``environment``. ``told``: by ``cluster.environment``. Raises UsageError."""
    return of_hosts(environment(code.versions), told)


def of_hosts(here: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """The key's versions: the controller's (``here``), replaced where ``cluster.environment`` tells the hosts'.

    Raises:
        UsageError: it names what the run doesn't import.
    """
    for name in told:
        if name not in here:
            raise UsageError(f"cluster.environment.{name}: the run doesn't import that; {suggestion(name, here)}")
    return {**here, **told}


def code_of(
    basis: Basis | RunConfig, root: Path, read: Sources | None = None, reading: tuple[str, ...] = ()
) -> Closure:
    """All that the run imports, and of a script the files that it says it reads. Raises UsageError.

    ``reading``: modules that read this pack (its ``rank_modules``).
    """
    behind = basis.key_parts.python_path
    if basis.script is not None:
        return basis.script.closure(behind)
    code = (read or sources(root))((*basis.chosen, *reading), behind)
    return with_inputs(code, root, (basis.resolved.get("model") or {}).get("inputs") or ())


def locate(
    basis: Basis | RunConfig,
    root: Path,
    data_digest: str,
    read: Sources | None = None,
    reading: tuple[str, ...] = (),
) -> LocatedRun:
    """The run with its key and folder. Starts nothing, imports no torch. ``reading``: as ``code_of`` has it."""
    remember_in(root, basis.runs_dir)
    code = code_of(basis, root, read, reading)
    key = content_key(
        canonical=basis.key_parts.canonical,
        code=code.digests,
        data_digest=data_digest,
        environment=versions(basis.key_parts.environment, code),
        topology=basis.key_parts.topology,
    )
    told = basis.resolved.get(programs.SECTION) or {}
    return LocatedRun(
        key=key,
        sources=code.sources,
        folder=RunFolder(basis.runs_dir / key.short),
        root=root,
        sealed=told.get("seal") != "off",
        unresolved=code.unresolved,
        left_out=code.left_out,
        metrics_pattern=told.get("metrics_pattern"),
    )
