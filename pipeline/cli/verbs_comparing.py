"""The verbs for many runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import JSON, Option, Verb

_SWEEP = Option("NAME", "the trials of a sweep")

COMPARING: Mapping[str, Verb] = {
    "report": Verb(
        module="pipeline.cli.reporting",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="results of a sweep or of runs, as a table and a self-contained page",
        details="Default: the newest sweep, grouped over seeds. KEY and overrides choose runs as in doit compare. "
        "The page is written to runs/reports, together with a certificate (doit verify).",
        options={
            "sweep": Option("NAME", "the sweep; default: the newest"),
            "json": JSON,
            "format": Option("html|markdown|json", "the page, or the same as Markdown or JSON"),
            "file": Option("FILE", "the file to write"),
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
        summary="check a certificate, and whether its run still matches it",
        details="A certificate contains its own digest: it proves integrity, not authorship. If the run's folder is"
        " present, its files, code and data are hashed too. Exit code 1: altered; 3: not a certificate.",
        examples=("verify runs/reports/495e1d67c76d.certificate.json",),
        shows_groups=False,
        shares_batch=False,
    ),
    "compare": Verb(
        module="pipeline.cli.comparing",
        answers=True,
        takes_paths=True,
        bare="KEY",
        summary="what differs between runs, compared with the spread over seeds",
        details="KEY is a run's key or its first digits; overrides filter as in doit runs, experiment=NAME too. "
        "Runs that differ only in their seed form one configuration; the first one is compared with the "
        "others. No claim is made about runs that are unfinished, unproven or accepted. See "
        "docs/comparing.md.",
        options={
            "sweep": _SWEEP,
            "metric": Option("NAME,…", "only these metrics"),
            "json": JSON,
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
        summary="plot a metric with its spread over seeds",
        details="KEY and overrides choose runs as in doit compare. NaN and infinite values leave a gap.",
        options={
            "metric": Option("NAME", "default: val/accuracy, or the first metric of a script"),
            "x": Option("step|epoch|minutes", "default: step"),
            "log": Option("1", "a logarithmic axis of values"),
            "file": Option("FILE", "write a picture: .svg, .png or .pdf"),
            "sweep": _SWEEP,
        },
        examples=("plot 495e1d cf0848 metric=train/loss log=1", "plot experiment=quickstart file=curves.pdf"),
        shows_groups=False,
        shares_batch=False,
        chooses=True,
    ),
}
