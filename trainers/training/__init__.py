"""The training of a run: session (folder to results), loop, step, evaluation, metrics."""
