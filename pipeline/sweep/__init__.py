"""Sweeps: many runs from one command line, each an ordinary run with a key of its own."""
