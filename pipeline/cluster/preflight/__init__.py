"""Whether every host of a cluster can take part, without starting anything there.

``judge`` turns what a probe told into checks (pure), ``short`` is what every training of several nodes asks,
``examine`` all of it. A check is a function from facts to ``Check`` records, with a line in docs/troubleshooting.md.
"""

from pipeline.cluster.preflight.examination import Report, as_json, examine, judge, short, summary, table
from pipeline.cluster.preflight.judgement import Check, State, from_error, refuse, warnings

__all__ = [
    "Check",
    "Report",
    "State",
    "as_json",
    "examine",
    "from_error",
    "judge",
    "refuse",
    "short",
    "summary",
    "table",
    "warnings",
]
