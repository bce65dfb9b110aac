"""A configured run whose data is in place: its content key and its folder. Looks, and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline import data
from pipeline.config.build import RunConfig
from pipeline.core.cache import remember_in
from pipeline.core.errors import UsageError, suggestion
from pipeline.evaluation import report_key
from pipeline.keys.content_key import ContentKey, content_key, environment
from pipeline.keys.import_closure import Closure, import_closure
from pipeline.runs import acceptance
from pipeline.runs.acceptance import Acceptance
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError

ENTRY = "trainers.classifier"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configured run whose data is in place, so that its key is known. ``sources`` are the files of its code."""

    config: RunConfig
    pack: data.Pack
    key: ContentKey
    sources: Mapping[str, Path]
    folder: RunFolder
    root: Path

    @property
    def reason(self) -> str | None:
        """Why it must run, or None when it is finished and intact. Raises UsageError: a newer Paceline wrote it."""
        self.folder.refuse_newer()
        stale = self.folder.stale_because(self.key)
        if stale is not None and self.accepted is not None:
            return acceptance.stale_because(self.folder, self.accepted, self.key)
        return stale or report_key.stale_because(self.folder, self.root)

    @property
    def accepted(self) -> Acceptance | None:
        """The person's word that another run holds for this key, which has no result of its own."""
        if self.folder.result.exists():
            return None
        try:
            return acceptance.read(self.folder)
        except AlteredError:  # no word at all: it is trained
            return None


Sources = Callable[[tuple[str, ...], tuple[str, ...]], Closure]
"""Modules of the chosen options, folders of the ranks' PYTHONPATH → the code."""


def sources(root: Path) -> Sources:
    """What is read of the code, kept: the many runs of one sweep take the same files."""

    @cache
    def read(chosen: tuple[str, ...], behind: tuple[str, ...]) -> Closure:
        return import_closure(root, (ENTRY, *chosen), behind)

    return read


def versions(config: RunConfig, code: Closure) -> dict[str, str]:
    """The key's part ``environment``. Raises UsageError."""
    return of_hosts(environment(code.versions), config.cluster.environment)


def of_hosts(here: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """The key's versions: the controller's, but where ``cluster.environment`` tells of the hosts. Raises UsageError."""
    for name in told:
        if name not in here:
            raise UsageError(f"cluster.environment.{name}: the run doesn't import that; {suggestion(name, here)}")
    return {**here, **told}


def prepare(config: RunConfig, root: Path, pack: data.Pack, read: Sources | None = None) -> Run:
    """The run with its key. Starts nothing, imports no torch."""
    remember_in(root, config.runs_dir)
    code = (read or sources(root))(config.chosen, config.cluster.python_path)
    key = content_key(
        config=config.resolved,
        code=code.digests,
        data_digest=pack.digest,
        environment=versions(config, code),
        cluster=config.cluster,
    )
    folder = RunFolder(config.runs_dir / key.short)
    return Run(config=config, pack=pack, key=key, sources=code.sources, folder=folder, root=root)
