"""A configured run whose data is in place: its content key and its folder. Looks, and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline import data, evaluation_key
from pipeline.closure import import_closure
from pipeline.config.build import RunConfig
from pipeline.key import ContentKey, code_digests, content_key, environment
from pipeline.runfolder import RunFolder

ENTRY = "trainers.classifier"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configured run whose data is in place, so that its key is known."""

    config: RunConfig
    pack: data.Pack
    key: ContentKey
    folder: RunFolder
    root: Path

    @property
    def reason(self) -> str | None:
        """Why it must run, or None when it is finished and intact. Raises UsageError: a newer Paceline wrote it."""
        self.folder.refuse_newer()
        return self.folder.stale_because(self.key) or evaluation_key.stale_because(self.folder, self.root)


def prepare(config: RunConfig, root: Path, pack: data.Pack) -> Run:
    """The run with its key. Starts nothing, imports no torch."""
    closure = import_closure(root, ENTRY, config.chosen)
    key = content_key(
        config=config.resolved,
        code=code_digests(root, closure),
        data_digest=pack.digest,
        environment=environment(closure),
        cluster=config.cluster,
    )
    return Run(config=config, pack=pack, key=key, folder=RunFolder(config.runs_dir / key.short), root=root)
