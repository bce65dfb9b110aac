"""Measurements: all-reduce bandwidth, host speed, training throughput against a reference loop, and profiler traces.

``measure`` is the entry for ``torchrun -m``.
"""
