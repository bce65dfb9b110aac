"""Compare runs: differences, which of them exceed the spread over seeds, curves, and reports.

``reading`` reads the run folders; the other modules are pure.
"""
