"""The data sets: one module each, found by its name."""
