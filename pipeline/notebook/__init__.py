"""Paceline from Python: in a notebook, or in a script that reads and starts runs (docs/notebook.md).

``import paceline`` offers these names. They work on the project that the working directory lies in, with the keys,
locks and run folders of the command line.
"""

from pipeline.notebook.commands import CommandError, sweep, train
from pipeline.notebook.comparisons import compare, plot
from pipeline.notebook.run import Run, run, runs

__all__ = ["CommandError", "Run", "compare", "plot", "run", "runs", "sweep", "train"]
