"""What measures instead of trains: all-reduce bandwidth, throughput beside a plain loop, profiler traces.

Entries for ``torchrun -m``: ``allreduce``, ``measure``, ``profiling``.
"""
