"""`doit preflight`, `allreduce`, `benchmark` and `profile`: print measurements, and where they are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pipeline.cli import answers
from pipeline.cli.invocation import is_on
from pipeline.cli.output import note, say, width
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster import preflight as checks
from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.preflight import Report
from pipeline.config.build import refuse_uneven
from pipeline.core.errors import HostError, PacelineError, UsageError
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted
from pipeline.diagnostics import allreduce as bandwidth
from pipeline.diagnostics import benchmark as benchmarks
from pipeline.diagnostics import host_speed, profiling
from pipeline.execution import this_computer
from pipeline.execution.run import code_of, versions
from trainers.contract import run_folder


def preflight(current: Session) -> None:
    """Check that the hosts can train. Raises PacelineError: a check failed."""
    options = current.invocation.options
    as_json, saves = is_on(options, "json"), "baseline" in options
    if saves and options["baseline"] != "save":
        raise UsageError(f"baseline={options['baseline']}: baseline=save keeps what is measured now")
    cluster = current.config.cluster.with_spares
    this_computer.refuse_without_lab(cluster, ROOT)
    hear: Callable[[str], None] = (lambda _: None) if as_json else note
    unreached: HostError | None = None
    try:
        report = _examined(current, cluster, deep=is_on(options, "deep"), say=hear)
    except HostError as error:
        if not as_json:
            raise
        labels, unreached = [host.label for host in cluster.hosts], error
        report = checks.Report(facts=(), checks=checks.from_error(error, "probe", labels))
    measures = saves or is_on(options, "measure")
    if measures and report.is_ok and not unreached:
        report = _measured(current, report, saves=saves, say=hear)
    if as_json:
        try:
            if unreached:
                raise unreached
            report.raise_if_failed()
        except PacelineError as error:
            answers.answer(checks.as_json(report), error=error)
            raise PacelineError("") from error  # the answer holds its text
        answers.answer(checks.as_json(report))
        return
    if not report.facts:
        for check in report.checks:  # what a scheduler says about the hosts that it would allocate
            say(check.seen)
        say("the nodes are known when a job runs; doit train asks each of them before it starts anything there")
        return
    say(checks.table(report.facts, width()))
    if measures or is_on(options, "deep"):
        say(f"\n{checks.summary(report.all_checks)}\n")
    for line in checks.warnings(report.checks):
        say(line)
    report.raise_if_failed()
    spares = len(current.config.cluster.spares)
    say(f"{counted(len(report.facts), 'host')} can take part" + (f", {spares} of them as a spare" if spares else ""))
    config = current.config
    if config.script is None:
        try:
            refuse_uneven(config.train.trainer, config.cluster)
        except UsageError as error:
            note(f"warning: a training with these words would be refused: {error.what}")


def _measured(current: Session, report: Report, *, saves: bool, say: Callable[[str], None]) -> Report:
    """Add the hosts' speeds, compared with their baseline and each other."""
    config = current.config
    before = {} if saves else host_speed.baseline(config.runs_dir)
    folder, figures = host_speed.measure(
        config.cluster, backend=config.train.strategy.backend, runs_dir=config.runs_dir, root=ROOT, say=say
    )
    for figure in figures:
        say(f"{figure.what}  {' – '.join(figure.hosts)}  {figure.shown(figure.per_s)}  ({figure.on})")
    say(f"  figures  {relative(folder / run_folder.HOST_SPEED)}")
    if saves:
        say(f"  baseline  {relative(host_speed.save_baseline(config.runs_dir, figures))}")
    return dataclasses.replace(report, checks=[*report.checks, *host_speed.checks(figures, before)])


def refuse_unfit_hosts(current: Session) -> None:
    """Examine the hosts before a training with ``preflight.deep=1``. Raises PacelineError: a check failed."""
    report = _examined(current, current.config.cluster, deep=True, say=note)  # spares are examined once they are needed
    note(f"{checks.summary(report.all_checks)}\n")
    report.raise_if_failed()


def _examined(current: Session, cluster: Cluster, *, deep: bool, say: Callable[[str], None]) -> Report:
    config = current.config
    with waiting(note, "asking the hosts"):
        return checks.examine(
            cluster,
            backend=config.train.strategy.backend,
            key_versions=versions(config, code_of(config, ROOT)),
            deep=deep,
            runs_dir=config.runs_dir,
            on_note=say,
        )


def allreduce(current: Session) -> None:
    """Measure the bandwidth of all-reduce between the ranks."""
    config = current.config
    folder, result = bandwidth.measure(
        config.cluster,
        backend=config.train.strategy.backend,
        options=current.invocation.options,
        runs_dir=config.runs_dir,
        root=ROOT,
        say=note,
    )
    say(f"\n{bandwidth.summary(result)}")
    say(f"  figures  {relative(folder / run_folder.ALLREDUCE)}")


def benchmark(current: Session) -> None:
    """Measure the training speed, and draw it."""
    config, options = current.config, current.invocation.options
    folder, whole = benchmarks.measure(config, _pack(current), options=options, root=ROOT, say=note)
    say(f"\n{benchmarks.table(whole)}")
    say(f"  figures  {relative(folder / benchmarks.RESULT)}")
    say(f"  picture  {relative(folder / benchmarks.PICTURE)}")


def profile(current: Session) -> None:
    """Record a trace of some training steps."""
    path = profiling.trace(current.config, _pack(current), options=current.invocation.options, root=ROOT, say=note)
    say(f"\n  trace  {relative(path)}   (open it in ui.perfetto.dev)")


def _pack(current: Session) -> PackSource:
    pack = current.pack
    if current.config.script is not None:
        raise UsageError(f"doit {current.invocation.verb} measures Paceline's own trainer, not program=script")
    if pack is None or pack.path is None:
        raise PacelineError("the data set vanished after it was fetched", hint="the same command again")
    return PackSource(path=pack.path.resolve(), digest=pack.digest)
