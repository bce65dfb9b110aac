"""A configured run whose data is in place: what a training is started from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline import data
from pipeline.cluster.launchers.base import PackSource
from pipeline.config.build import RunConfig
from pipeline.execution.located import LocatedRun, Sources, locate


@dataclass(frozen=True, kw_only=True)
class Run(LocatedRun):
    """A run with the whole of its configuration and its data."""

    config: RunConfig
    pack: data.Pack

    @property
    def pack_source(self) -> PackSource:
        """The data as a launcher takes it."""
        return PackSource(path=self.pack.path.resolve(), digest=self.pack.digest)


def prepare(config: RunConfig, root: Path, pack: data.Pack, read: Sources | None = None) -> Run:
    """The run with its key. Starts nothing, imports no torch."""
    found = locate(config.basis, root, pack.digest, read)
    return Run(**vars(found), config=config, pack=pack)
