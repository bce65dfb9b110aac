"""Compare runs: differences, which of them exceed the spread over seeds, curves, and reports."""
