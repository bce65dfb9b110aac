"""`doit profile`: a torch profiler trace of a few steps of the configured training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.cluster.launchers.base import PackSource
from pipeline.config.build import RunConfig
from pipeline.diagnostics import node_module
from trainers.contract import run_folder

MODULE = "trainers.measuring.profiling"
TRACE = "trace.json.gz"
_QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch's tracer reports a missing GPU as an error


def trace(config: RunConfig, pack: PackSource, *, options: Mapping[str, str], root: Path, say: node_module.Say) -> Path:
    """Run it on all ranks; the path of rank 0's trace. Raises UsageError, HostError, TrainingError, Killed."""
    given = node_module.whole_numbers(options, "steps")
    folder = node_module.new_folder(config.runs_dir, "profile")
    diagnosis = node_module.Diagnosis(
        module=MODULE,
        config={**config.resolved, "init": {}, "profile": given},  # what only measures needs no weights
        result=run_folder.PROFILE,
        more=(TRACE,),
        chosen=config.chosen,
    )
    hosts = tuple(replace(host, env={**_QUIET, **host.env}) for host in config.cluster.hosts)
    cluster = replace(config.cluster, hosts=hosts)
    node_module.run(diagnosis, cluster=cluster, folder=folder, root=root, pack=pack, say=say)
    return folder / TRACE
