"""Measurements: all-reduce bandwidth, host speed, training throughput against a reference loop, and profiler traces.

Entries for ``torchrun -m``: ``allreduce``, ``measure``.
"""
