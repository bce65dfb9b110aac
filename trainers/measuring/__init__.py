"""Measurements instead of trainings: all-reduce bandwidth, host speed, throughput against a reference loop, profiler
traces. ``measure`` is the program that torchrun starts."""
