"""Overrides on the command line: translation, parsing, sweeps and the origin of each value."""
