"""The verbs that measure: what they print and where their figures lie."""

from __future__ import annotations

from pipeline.cli.session import ROOT, relative, session


def allreduce() -> None:
    from pipeline import allreduce as bandwidth

    config = session().config
    folder, result = bandwidth.measure(
        config.cluster,
        backend=config.train.strategy.backend,
        options=session().asked.options,
        runs_dir=config.runs_dir,
        root=ROOT,
        say=_say,
    )
    _say(f"\n{bandwidth.summary(result)}")
    _say(f"  figures  {relative(folder / bandwidth.RESULT)}")


def benchmark() -> None:
    from pipeline import benchmark as benchmarks
    from pipeline.errors import PacelineError
    from pipeline.launchers.base import Pack

    current = session()
    if current.pack is None:
        raise PacelineError("the data set vanished after it was fetched", try_="the same command again")
    pack = Pack(path=current.pack.path, digest=current.pack.digest)
    folder, whole = benchmarks.measure(current.config, pack, options=current.asked.options, root=ROOT, say=_say)
    _say(f"\n{benchmarks.table(whole)}")
    _say(f"  figures  {relative(folder / benchmarks.RESULT)}")
    _say(f"  picture  {relative(folder / benchmarks.PICTURE)}")


def _say(text: str) -> None:
    print(text, flush=True)
