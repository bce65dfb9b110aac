"""The verbs that measure: what they print and where their figures lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cli.output import say
from pipeline.cli.session import ROOT, relative, session
from pipeline.core.errors import PacelineError

if TYPE_CHECKING:
    from pipeline.cluster.launchers.base import PackSource


def allreduce() -> None:
    from pipeline.diagnostics import allreduce as bandwidth

    config = session().config
    folder, result = bandwidth.measure(
        config.cluster,
        backend=config.train.strategy.backend,
        options=session().asked.options,
        runs_dir=config.runs_dir,
        root=ROOT,
        say=say,
    )
    say(f"\n{bandwidth.summary(result)}")
    say(f"  figures  {relative(folder / bandwidth.RESULT)}")


def benchmark() -> None:
    from pipeline.diagnostics import benchmark as benchmarks

    config, options = session().config, session().asked.options
    folder, whole = benchmarks.measure(config, _pack(), options=options, root=ROOT, say=say)
    say(f"\n{benchmarks.table(whole)}")
    say(f"  figures  {relative(folder / benchmarks.RESULT)}")
    say(f"  picture  {relative(folder / benchmarks.PICTURE)}")


def profile() -> None:
    from pipeline.diagnostics import profiling

    path = profiling.trace(session().config, _pack(), options=session().asked.options, root=ROOT, say=say)
    say(f"\n  trace  {relative(path)}   (open it in ui.perfetto.dev)")


def _pack() -> PackSource:
    from pipeline.cluster.launchers.base import PackSource

    pack = session().pack
    if pack is None:
        raise PacelineError("the data set vanished after it was fetched", hint="the same command again")
    return PackSource(path=pack.path.resolve(), digest=pack.digest)
