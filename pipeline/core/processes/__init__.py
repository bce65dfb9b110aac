"""Processes and threads of the controller: how they start, are interrupted, wait, and end unexpectedly."""
