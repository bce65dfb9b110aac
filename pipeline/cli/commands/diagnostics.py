"""`doit preflight`, `benchmark` and `profile`: check or measure the hosts and the training, and print the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline import diagnostics
from pipeline.cli.output import answer, note, say, wants_json, width
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster import preflight as checks
from pipeline.cluster.hosts import refuse_without_lab
from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.preflight import Report
from pipeline.config.build import refuse_uneven
from pipeline.core.errors import HostError, PacelineError, UsageError
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted
from pipeline.execution.run import code_of, versions
from trainers.contract import run_folder


def preflight(current: Session) -> None:
    """Check that the hosts can train. Raises PacelineError: a check failed."""
    as_json, measures, is_deep = wants_json(), current.invocation.is_on("measure"), current.invocation.is_on("deep")
    cluster = current.config.cluster.with_spares
    refuse_without_lab(cluster, ROOT)
    on_progress: Callable[[str], None] = (lambda _: None) if as_json else note
    host_error: HostError | None = None  # of hosts that can't be reached; the JSON answer names them as a failed check
    try:
        report = _examine(current, cluster, deep=is_deep, say=on_progress)
    except HostError as error:
        if not as_json:
            raise
        labels, host_error = [host.label for host in cluster.hosts], error
        report = checks.Report(facts=(), checks=checks.from_error(error, "probe", labels))
    if measures and report.is_ok and not host_error:
        report = _measure(current, report, say=on_progress)
    if as_json:
        try:
            if host_error:
                raise host_error
            report.raise_if_failed()
        except PacelineError as error:
            answer(checks.as_json(report), error=error)
            raise PacelineError("") from error  # for the exit code; the answer contains the message
        answer(checks.as_json(report))
        return
    if not report.facts:  # a scheduler allocates hosts only for a job; its checks are about its answers
        for check in report.checks:
            say(check.seen)
        say("the nodes are known when a job runs; doit train asks each of them before it starts anything there")
        return
    say(checks.table(report.facts, width()))
    if measures or is_deep:
        # the refusals (hosts don't fit the configuration, or don't reach each other) count as failed checks here
        say(f"\n{checks.summary(report.all_checks)}\n")
    # ``checks`` alone, because only these have warnings; ``raise_if_failed`` raises the refusals
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


def _measure(current: Session, report: Report, *, say: Callable[[str], None]) -> Report:
    """Measure the speed of the hosts, print it, and return the report with the checks of these figures."""
    config = current.config
    folder, speeds = diagnostics.measure_hosts(
        config.cluster, backend=config.train.strategy.backend, runs_dir=config.runs_dir, root=ROOT, say=say
    )
    for speed in speeds:
        say(f"{speed.quantity}  {' – '.join(speed.hosts)}  {speed.formatted(speed.per_s)}  ({speed.setup})")
    say(f"  figures  {relative(folder / run_folder.HOST_SPEED)}")
    return replace(report, checks=[*report.checks, *diagnostics.checks(speeds)])


def refuse_unfit_hosts(current: Session) -> None:
    """Examine the hosts before a training with ``preflight.deep=1``. Raises PacelineError: a check failed."""
    report = _examine(current, current.config.cluster, deep=True, say=note)  # spares are examined when they are needed
    note(f"{checks.summary(report.all_checks)}\n")
    report.raise_if_failed()


def _examine(current: Session, cluster: Cluster, *, deep: bool, say: Callable[[str], None]) -> Report:
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


def benchmark(current: Session) -> None:
    """Measure the training speed."""
    config, invocation = current.config, current.invocation
    settings: dict[str, float] = {**invocation.numbers("pairs")}
    if "block_s" in invocation.options:
        settings["block_s"] = _parse_seconds("block_s", invocation.options["block_s"])
    measured = diagnostics.measure_scaling(config, _pack(current), settings=settings, root=ROOT, say=note)
    say(f"\n{diagnostics.table(measured)}")
    say(f"  figures  {relative(measured.folder / diagnostics.BENCHMARK)}")


def _parse_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise UsageError(f"{name}={text} must be a number of seconds above 0")
    return seconds


_TRACE = "trace.json.gz"
_QUIET = {"KINETO_LOG_LEVEL": "99"}  # torch's tracer reports a missing GPU as an error


def profile(current: Session) -> None:
    """Record a trace of some training steps."""
    config, pack = current.config, _pack(current)
    folder = diagnostics.new_folder(config.runs_dir, "profile")
    hosts = tuple(replace(host, env={**_QUIET, **host.env}) for host in config.cluster.hosts)
    diagnostics.run(
        # a measurement needs no initial weights
        {**config.resolved, "init": {}, "profile": current.invocation.numbers("steps")},
        run_folder.PROFILE,
        cluster=replace(config.cluster, hosts=hosts),
        folder=folder,
        root=ROOT,
        say=note,
        pack=pack,
        other_results=(_TRACE,),
        chosen=config.chosen,
    )
    say(f"\n  trace  {relative(folder / _TRACE)}   (open it in ui.perfetto.dev)")


def _pack(current: Session) -> PackSource:
    """Return the data pack to measure with. Raises UsageError: the configuration trains with a script."""
    pack = current.pack
    if current.config.script is not None:
        raise UsageError(f"doit {current.invocation.verb} measures Paceline's own trainer, not program=script")
    if pack is None or pack.path is None:
        raise PacelineError("the data set vanished after it was fetched", hint="the same command again")
    return PackSource(path=pack.path.resolve(), digest=pack.digest)
