"""The verbs for many runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import Option, Verb

_JSON = Option("1", "the same as JSON, for scripts")
_SWEEP = Option("NAME", "the trials of a sweep")

COMPARING: Mapping[str, Verb] = {
    "report": Verb(
        module="pipeline.cli.reporting",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="what a sweep, a run or any runs have come to, as a table and as one page that needs no network",
        details="Without a word the newest sweep, seeds taken together. KEY and overrides choose runs as in doit "
        "compare. The page lies in runs/reports; beside that of one finished run lies its certificate (doit verify).",
        options={
            "sweep": Option("NAME", "the sweep; without it the newest"),
            "json": _JSON,
            "format": Option("html|markdown|json", "the page, or the same as Markdown or JSON"),
            "file": Option("FILE", "where to"),
        },
        examples=(
            "report",
            "report sweep=5bb24236b1de json=1",
            "report 495e1d",
            "report model=resnet18 file=nets.html",
        ),
        shows_groups=False,
        shares_batch=False,
        chooses=True,
    ),
    "verify": Verb(
        module="pipeline.cli.verifying",
        answers=True,
        takes_paths=True,
        bare="FILE",
        summary="whether a run's certificate is whole, and its run still what it says",
        details="A certificate is sealed by its own digest: integrity, not authorship. Where the run's folder is, its "
        "files, code and data are hashed too. Exit code 1: altered; 3: no certificate.",
        examples=("verify runs/reports/495e1d67c76d.certificate.json",),
        shows_groups=False,
        shares_batch=False,
    ),
    "compare": Verb(
        module="pipeline.cli.comparing",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="runs beside each other: what differs, and which differences are larger than the spread over seeds",
        details="KEY is a run's key or its beginning; overrides choose as in doit runs, experiment=NAME too. Runs that "
        "differ in nothing but the seed are taken together; the others are held against the first. docs/comparing.md "
        "has the rule. Nothing is claimed of runs that aren't finished, or are unproven or accepted.",
        options={
            "sweep": _SWEEP,
            "metric": Option("NAME,…", "these metrics alone"),
            "json": _JSON,
            "markdown": Option("1", "as tables in Markdown"),
        },
        examples=("compare 495e1d cf0848", "compare experiment=quickstart markdown=1", "compare sweep=5bb242"),
        shows_groups=False,
        shares_batch=False,
        chooses=True,
    ),
    "plot": Verb(
        module="pipeline.cli.plotting",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="curves of a metric with their spread over seeds, in the terminal or as a picture",
        details="KEY and overrides choose runs as in doit compare. A value that is no number is a gap.",
        options={
            "metric": Option("NAME", "without it val/accuracy, of scripts their first one"),
            "x": Option("step|epoch|minutes", "without it step"),
            "log": Option("1", "a logarithmic axis of values"),
            "file": Option("FILE", "a picture instead: .svg, .png or .pdf"),
            "sweep": _SWEEP,
        },
        examples=("plot 495e1d cf0848 metric=train/loss log=1", "plot experiment=quickstart file=curves.pdf"),
        shows_groups=False,
        shares_batch=False,
        chooses=True,
    ),
}
