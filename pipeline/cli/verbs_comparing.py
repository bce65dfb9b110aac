"""The verbs for many runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.cli.verb import Option, Verb

_JSON = Option("1", "the same as JSON, for scripts")
_SWEEP = Option("NAME", "the trials of a sweep")

COMPARING: Mapping[str, Verb] = {
    "report": Verb(
        module="pipeline.cli.sweeping",
        answers=True,
        summary="results of a sweep, seeds taken together",
        options={"sweep": Option("NAME", "the sweep; without it the newest"), "json": _JSON},
        examples=("report", "report sweep=5bb24236b1de json=1"),
        shows_groups=False,
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
    ),
}
