"""Sweeps: many runs from one command line, each an ordinary run with its own key."""
