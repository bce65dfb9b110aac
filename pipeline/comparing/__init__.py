"""Runs beside each other: what differs, which differences are larger than the spread over seeds, curves, reports.

Everything is read from run folders, by ``reading``; the rest is pure.
"""
