"""Node modules that measure instead of train: all-reduce bandwidth, a profiler trace, throughput.

Public face: ``allreduce``, ``profiling``, ``benchmark``; ``node_module`` launches what a new one needs.
"""
