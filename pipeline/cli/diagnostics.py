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


def _say(text: str) -> None:
    print(text, flush=True)
