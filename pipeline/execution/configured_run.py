"""A configured run whose data is in place: what a training is started from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.launchers.base import PackSource
from pipeline.config.build import RunConfig
from pipeline.core.errors import UsageError
from pipeline.data.manifest import Manifest, Pack
from pipeline.data.trees import Tree
from pipeline.execution import starting
from pipeline.execution.located import LocatedRun, Sources, locate
from pipeline.runs.layout import Description
from pipeline.runs.provenance import RunDetails
from trainers.core.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Run(LocatedRun):
    """A run with the whole of its configuration, its data and the weights that it starts from (None: fresh ones)."""

    config: RunConfig
    pack: Pack | Tree
    start: starting.Start | None = None

    def description(self, sources: Mapping[str, Path] | None = None) -> Description:
        """What its folder tells. ``sources``: copies of the files of its code (None: they themselves)."""
        from pipeline.config import compose  # it imports Hydra

        resolved = self.config.resolved
        return Description(
            key=self.key,
            config=resolved,
            config_yaml=compose.as_yaml(resolved),
            sources=sources or self.sources,
            pack_path=self.pack.path,
        )

    def details(self, unix_time: float) -> RunDetails:
        """What its provenance tells of it besides its checkout. ``unix_time``: when the command began."""
        hosts = [host.label for host in self.config.cluster.hosts]
        return RunDetails(
            overrides=self.config.overrides, hosts=hosts, data_digest=self.pack.digest, unix_time=unix_time
        )

    @property
    def pack_source(self) -> PackSource | None:
        """The data as a launcher takes it; None: it needs none."""
        if self.pack.path is None:
            return None
        inside = self.pack.inside if isinstance(self.pack, Tree) else ()
        return PackSource(path=self.pack.path.resolve(), digest=self.pack.digest, inside=inside)


def prepare(config: RunConfig, root: Path, pack: Pack | Tree, read: Sources | None = None) -> Run | None:
    """The run with its key; None while the weights that it starts from aren't known. Starts nothing, imports no torch.

    Raises UsageError: the settings don't fit its data, or nothing can give these weights.
    """
    if isinstance(pack, Pack):
        refuse_misfits(config.train, pack.manifest)
    start = starting.of(config, root)
    if start is not None:
        if start.sha256 is None:
            return None
        config = starting.with_digest(config, start)
    found = locate(config, root, pack.digest, read, pack.rank_modules)
    return Run(**vars(found), config=config, pack=pack, start=start)


def refuse_misfits(train: TrainConfig, data: Manifest) -> None:
    """Raises UsageError: the ranks would find that these settings don't fit the data."""
    weights = train.trainer.class_weights
    if isinstance(weights, list) and len(weights) != data.num_classes:
        raise UsageError(
            f"trainer.class_weights has {len(weights)} weights, and {data.name} has {data.num_classes} classes",
            hint="a weight for each class, in the order of their numbers; or trainer.class_weights=balanced",
        )
    start, stop = data.splits["train"]
    available = stop - start
    if (size := train.trainer.global_batch_size) > available > 0:
        raise UsageError(
            f"trainer.global_batch_size={size}: the train split of {data.name} has {available} images, fewer than that",
            hint=f"trainer.global_batch_size=N, N at most {available} and a multiple of the number of ranks",
        )
    crop = train.dataset.random_resized_crop
    if crop and data.encoding is None:
        raise UsageError(
            f"dataset.random_resized_crop={crop} is cut from the files, and the pack of {data.name} has pixels alone",
            hint="dataset.decoded_limit=0 keeps the files of dataset=folder, parquet and torchvision; or "
            "dataset.crop_padding=4",
        )
