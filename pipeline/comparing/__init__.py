"""Comparisons of runs: differences, which of them are larger than the spread over seeds, curves, and reports."""
